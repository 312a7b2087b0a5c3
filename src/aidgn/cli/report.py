"""aidgn report"""

from pathlib import Path

import click


@click.command(
    epilog="""\b
Examples:
  aidgn report runs/
  aidgn report runs/PACS-AIDGN-sketch-trial0-draw0-524de501
  aidgn report sweep1/ sweep2/ --out comparison.html
What is computed for it (features, embedding) is kept in the run folders, so that the next report is quick.""",
)
@click.argument("folders", nargs=-1, required=True, metavar="RUN|SWEEP...")
@click.option("--out", metavar="FILE", help="The page  [default: report.html in the first folder].")
@click.option("--data", metavar="DIR", help="The data set's folder  [default: where the training found it].")
@click.option(
    "--points",
    default=2000,
    show_default=True,
    type=click.IntRange(min=50),
    metavar="N",
    help="Images in the latent space, drawn by domain and class.",
)
@click.option(
    "--algorithm",
    multiple=True,
    metavar="FILE.py:CLASS",
    help="Where the class is, if an algorithm is your own; repeatable.",
)
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu.")
def report(
    folders: tuple[str, ...], out: str | None, data: str | None, points: int, algorithm: tuple[str, ...], device: str
) -> None:
    """One self-contained HTML page of the runs below each folder: tables, curves, the latent space, the diagnosis of
    both assumptions, adaptation, and what is needed to run it all again. It loads nothing from anywhere."""
    from aidgn.cli.display import RunDisplay
    from aidgn.errors import AidgnError
    from aidgn.report.page import write_report

    first = Path(folders[0])
    path = Path(out) if out else (first if first.is_dir() else first.parent) / "report.html"
    if path.is_dir():
        raise AidgnError(f"--out {path} is a folder: name a file in it, such as {path / 'report.html'}.")
    with RunDisplay() as display:
        write_report(
            folders, path, data=data, device=device, algorithm=algorithm, points=points, on_progress=display.update
        )
    click.echo(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB). Open it in a browser; it needs no network.")
