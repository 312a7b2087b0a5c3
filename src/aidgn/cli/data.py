"""aidgn data list | check | download | prepare | pages"""

from pathlib import Path

import click

from aidgn.cli.options import data_dir_option, source_options
from aidgn.errors import AidgnError, lists_uncut


@click.group(
    epilog="""\b
Examples:
  aidgn data list
  aidgn data check photos/"""
)
def data() -> None:
    """List, check, download and prepare data sets."""


@data.command(
    "list",
    epilog="""\b
Example:
  aidgn data list""",
)
def list_() -> None:
    """List the data sets that aidgn knows by name."""
    from rich.table import Table

    from aidgn.data import DATASETS
    from aidgn.progress import NARROW, wide_console

    console = wide_console(160)
    headings = ["name", "domains", "images", "classes", "steps", "eval every", "halve lr at"]
    headings = headings if console.width >= NARROW else headings[:4]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for info in DATASETS.values():
        domains = ", ".join(
            f"{name} ({letter})" if letter != name else name
            for name, letter in zip(info.domains, info.letters, strict=True)
        )
        numbers = (sum(info.counts.values()) or "", info.num_classes, info.steps, info.eval_every)
        row = (info.name, domains, *map(str, numbers), ", ".join(map(str, info.lr_milestones)))
        table.add_row(*row[: len(headings)])
    console.print(table)


@data.command(
    short_help="Decode every image; report missing, broken and duplicate images.",
    epilog="""\b
Examples:
  aidgn data check PACS
  aidgn data check photos/ --all > findings.txt
  aidgn data check pictures.csv --file path --label diagnosis --domain hospital
Exit code 0: everything is in order. 1: `fit` would train, but files are broken, copies lie in several domains, or
counts differ from the published ones. 2: `fit` would stop, or FOLDER cannot be read.""",
)
@click.argument("folder")
@source_options()
@data_dir_option
@click.option("--all", "uncut", is_flag=True, help="List all findings; by default long lists are cut.")
def check(folder: str, data_dir: str | None, uncut: bool, **columns: str | None) -> None:
    """Decode and count every image of FOLDER, a folder, a table or the name of a data set.

    The command reports everything at once: empty and too small domains, empty classes, names written in two ways,
    broken files, copies within and across domains, and everything else that `fit` would refuse."""
    from rich.table import Table
    from rich.text import Text

    from aidgn.data import inspect_dataset, load_dataset
    from aidgn.data.layout import doubt_layout
    from aidgn.data.source import DataSource
    from aidgn.progress import RunDisplay, wide_console

    with lists_uncut(uncut), RunDisplay() as display:
        dataset = load_dataset(DataSource.parse(folder, **columns), data_dir, tolerant=True)
        if columns["layout"] is None and (doubt := doubt_layout(dataset)):
            raise AidgnError("\n".join([doubt, *dataset.problems]))
        inspection = inspect_dataset(dataset, lambda done, total: display.update("reading images", done, total))
    title = Text(f"{dataset.name}: {len(dataset)} images")
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title=title)
    table.add_column("class", overflow="fold")
    for name in (*dataset.domains, "all"):
        table.add_column(Text(name), justify="right", overflow="fold")
    for name, counts in (*zip(dataset.classes, inspection.counts.T, strict=True), ("all", inspection.counts.sum(1))):
        table.add_row(Text(name), *map(str, counts), str(counts.sum()))
    wide_console(160).print(table)
    with lists_uncut(uncut):
        for sentence in inspection.findings():
            click.echo(sentence)
    click.echo(inspection.verdict())


@data.command(
    short_help="Download a data set and verify it.",
    epilog="""\b
Example:
  aidgn data download PACS --data-dir ~/data""",
)
@click.argument("name")
@click.option("--data-dir", metavar="DIR", help="Folder to download into  [default: $AIDGN_DATA, else data/].")
def download(name: str, data_dir: str | None) -> None:
    """Download the data set NAME from its mirrors and verify the counts. The same command resumes a download."""
    import os

    from aidgn.data.download import download as download_dataset
    from aidgn.progress import RunDisplay

    with RunDisplay() as display:
        folder = download_dataset(
            name,
            Path(data_dir or os.environ.get("AIDGN_DATA") or "data"),
            on_progress=lambda done, total: display.update("downloading", done // 10**6, total and total // 10**6),
            on_message=lambda text: click.echo(text, err=True),
        )
    click.echo(f"{name} is in {folder}")


@data.command(
    short_help="Decode every image now, so that training starts at once.",
    epilog="""\b
Example:
  aidgn data prepare PACS""",
)
@click.argument("folder")
@source_options()
@data_dir_option
@click.option("--workers", type=int, metavar="N", help="Decode in N processes  [default: one per core].")
@click.option("--skip-broken", is_flag=True, help="Leave out images that cannot be read.")
def prepare(folder: str, data_dir: str | None, workers: int | None, skip_broken: bool, **columns: str | None) -> None:
    """Decode the images of FOLDER now, so that the first training starts at once."""
    from aidgn.data import load_dataset
    from aidgn.data.cache import prepare as prepare_dataset
    from aidgn.data.source import DataSource
    from aidgn.progress import RunDisplay

    with RunDisplay() as display:
        prepared = prepare_dataset(
            load_dataset(DataSource.parse(folder, **columns), data_dir),
            workers=workers,
            skip_broken=skip_broken,
            on_progress=lambda done, total: display.update("decoding images", done, total),
        )
    click.echo(
        f"{len(prepared.rows)} images of {prepared.dataset.name} are ready"
        + (f"; {len(prepared.skipped)} broken files left out." if prepared.skipped else ".")
    )


@data.command(
    short_help="Write the pages of multi-page TIFF and DICOM files as pictures.",
    epilog="""\b
Examples:
  aidgn data pages scans/ --out pages
  aidgn fit pages --layout "{domain}/{class}/{group}" --quick""",
)
@click.argument("folder")
@click.option("--out", required=True, metavar="DIR", help="Folder to write to.")
def pages(folder: str, out: str) -> None:
    """Write each page of the TIFF and DICOM files in FOLDER, and its other pictures, as a PNG file.

    The folders stay the same, and each file becomes a folder of its pages, a group in splits. Without this command the
    first page of a file is used."""
    from aidgn.data.pages import PAGE_LAYOUT, split_pages
    from aidgn.progress import RunDisplay

    with RunDisplay() as display:
        count = split_pages(
            folder,
            out,
            lambda done, total: display.update("writing pages", done, total),
            lambda error: click.echo(f"left out: {error}", err=True),
        )
    if not count:
        raise AidgnError(f"{folder} has no picture that can be read.")
    click.echo(f'{count} pages are in {out}. Keep the pages of a file on one side of splits: --layout "{PAGE_LAYOUT}"')
