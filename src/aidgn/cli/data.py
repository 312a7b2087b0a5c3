"""aidgn data list | check | download | prepare"""

from pathlib import Path

import click

from aidgn.errors import AidgnError, plural, some


@click.group(
    epilog="""\b
Example:
  aidgn data list"""
)
def data() -> None:
    """Data sets: list, check, download, prepare."""


@data.command(
    "list",
    epilog="""\b
Example:
  aidgn data list""",
)
def list_() -> None:
    """The data sets that are known by name."""
    from rich.table import Table

    from aidgn.cli.display import NARROW, wide_console
    from aidgn.data import DATASETS

    console = wide_console(160)
    heads = ["name", "domains", "images", "classes", "steps", "eval every", "halve lr at"]
    heads = heads if console.width >= NARROW else heads[:4]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    for entry in DATASETS.values():
        domains = ", ".join(
            f"{name} ({letter})" if letter != name else name
            for name, letter in zip(entry.domains, entry.letters, strict=True)
        )
        numbers = (sum(entry.counts.values()), entry.number_of_classes, entry.steps, entry.eval_every)
        row = (entry.name, domains, *map(str, numbers), ", ".join(map(str, entry.lr_milestones)))
        table.add_row(*row[: len(heads)])
    console.print(table)


@data.command(
    short_help="Count and decode every image: what is missing, broken or twice.",
    epilog="""\b
Examples:
  aidgn data check PACS
  aidgn data check photos/""",
)
@click.argument("folder")
@click.option("--data-dir", metavar="DIR", help="Where data sets are  [default: $AIDGN_DATA, else data/].")
def check(folder: str, data_dir: str | None) -> None:
    """Count and decode every image of FOLDER (or of a data set by name): what is missing, broken or twice."""
    from rich.table import Table
    from rich.text import Text

    from aidgn.cli.display import RunDisplay, wide_console
    from aidgn.data import check as check_dataset
    from aidgn.data import load_dataset

    dataset = load_dataset(folder, data_dir)
    with RunDisplay() as display:
        found = check_dataset(dataset, on_progress=lambda done, total: display.update("reading images", done, total))
    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        title_justify="left",
        title=Text(f"{dataset.name}: {len(dataset.labels)} images"),
    )
    table.add_column("class", overflow="fold")
    for name in (*dataset.domains, "all"):
        table.add_column(Text(name), justify="right", overflow="fold")
    for name, counts in (*zip(dataset.classes, found.counts.T, strict=True), ("all", found.counts.sum(1))):
        table.add_row(Text(name), *map(str, counts), str(counts.sum()))
    wide_console(160).print(table)
    for line in found.differences:
        click.echo(line)
    for file, reason in found.broken:
        click.echo(f"broken: {reason}" if file in reason else f"broken: {file}: {reason}")
    for group in found.duplicates:
        click.echo(f"the same image in several domains: {', '.join(group)}")
    for group in found.contradictions:
        click.echo(f"the same image in several classes: {', '.join(group)}")
    if found.copies:
        click.echo(
            f"{plural(len(found.copies), 'image')} with a copy in the same domain on the other side of the "
            "split (trial 0), so that validation sees what was trained on: "
            + some(map(", ".join, found.copies), 5, "; ")
        )
    empty = [
        f"{name} of {class_name}"
        for name, row in zip(dataset.domains, found.counts, strict=True)
        for class_name, number in zip(dataset.classes, row, strict=True)
        if not number
    ]
    if empty:
        click.echo(f"no images in {some(empty, 10)}: right, if there are none")
    if dataset.ignored:
        click.echo(f"{plural(len(dataset.ignored), 'other file')} ignored: {some(dataset.ignored, 5)}")
    if not found.fine:
        wrong = [
            (len(found.broken), "broken file{}"),
            (len(found.duplicates), "image{} in several domains"),
            (len(found.contradictions), "image{} in several classes"),
            (len(found.differences), "difference{} from the published counts"),
        ]
        raise AidgnError(
            f"{dataset.name} is not in order: "
            + ", ".join(f"{number} {words.format('s' * (number != 1))}" for number, words in wrong if number)
            + "."
        )
    click.echo(f"Every image can be read{f', counts are those of {found.expected}' if found.expected else ''}.")


@data.command(
    short_help="Fetch a data set from its mirrors and verify it.",
    epilog="""\b
Example:
  aidgn data download PACS --data-dir ~/data""",
)
@click.argument("name")
@click.option("--data-dir", metavar="DIR", help="Where to put it  [default: $AIDGN_DATA, else data/].")
def download(name: str, data_dir: str | None) -> None:
    """Fetch a data set by NAME from its mirrors, resume where it broke off, verify the counts."""
    import os

    from aidgn.cli.display import RunDisplay
    from aidgn.data.download import download as fetch

    with RunDisplay() as display:
        folder = fetch(
            name,
            Path(data_dir or os.environ.get("AIDGN_DATA") or "data"),
            on_progress=lambda done, total: display.update("downloading", done // 10**6, total and total // 10**6),
            on_message=lambda text: click.echo(text, err=True),
        )
    click.echo(f"{name} is in {folder}")


@data.command(
    epilog="""\b
Example:
  aidgn data prepare PACS"""
)
@click.argument("folder")
@click.option("--data-dir", metavar="DIR", help="Where data sets are  [default: $AIDGN_DATA, else data/].")
@click.option("--workers", type=int, metavar="N", help="Processes  [default: one per core].")
@click.option("--skip-broken", is_flag=True, help="Leave out images that cannot be read.")
def prepare(folder: str, data_dir: str | None, workers: int | None, skip_broken: bool) -> None:
    """Decode every image once, so that training starts at once. Training does this by itself on first use."""
    from aidgn.cli.display import RunDisplay
    from aidgn.data import load_dataset
    from aidgn.data.cache import prepare as prepare_dataset

    with RunDisplay() as display:
        prepared = prepare_dataset(
            load_dataset(folder, data_dir),
            workers=workers,
            skip_broken=skip_broken,
            on_progress=lambda done, total: display.update("decoding images", done, total),
        )
    click.echo(
        f"{len(prepared.rows)} images of {prepared.dataset.name} are ready"
        + (f"; {len(prepared.skipped)} broken files left out." if prepared.skipped else ".")
    )
