"""aidgn report"""

from pathlib import Path
from typing import Any

import click

from aidgn.cli.options import custom_algorithms_option, data_option, device_option


@click.command(
    epilog="""\b
Examples:
  aidgn report runs/
  aidgn report runs/PACS-AIDGN-sketch-trial0-draw0-524de501
  aidgn report sweep1/ sweep2/ --out comparison.html
The run folders keep the features and the embedding, so the next report is quick.""",
)
@click.argument("folders", nargs=-1, required=True, metavar="RUN|SWEEP...")
@click.option("--out", metavar="FILE", help="Write the page to FILE  [default: report.html in the first folder].")
@data_option
@click.option(
    "--points",
    default=2000,
    type=click.IntRange(min=50),
    metavar="N",
    help="Show N images in the latent space, sampled by domain and class.",
)
@custom_algorithms_option
@device_option
def report(folders: tuple[str, ...], out: str | None, **options: Any) -> None:
    """Write one HTML page about the runs below each folder: tables, curves, the latent space, the diagnosis of both
    assumptions, adaptation, and the commands that reproduce the runs. The page works offline and loads nothing."""
    import time

    from aidgn.errors import AidgnError
    from aidgn.progress import RunDisplay
    from aidgn.report.page import write_report
    from aidgn.sweeps.timing import in_words

    began = time.monotonic()

    first = Path(folders[0])
    path = Path(out) if out else (first if first.is_dir() else first.parent) / "report.html"
    if path.is_dir():
        raise AidgnError(f"--out {path} is a folder: name a file in it, such as {path / 'report.html'}.")
    with RunDisplay() as display:
        write_report(folders, path, on_progress=display.update, **options)
    size, duration = path.stat().st_size / 1e6, in_words(time.monotonic() - began)
    click.echo(f"Report: {path} ({size:.1f} MB, {duration}). Open it in a browser; it needs no network.")
