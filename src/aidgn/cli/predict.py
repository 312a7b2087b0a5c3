"""aidgn predict"""

import csv as csv_format
import io
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import click

from aidgn.errors import AidgnError, plural, some
from aidgn.files import written_at_last

# Files, each with its most probable classes and, from a model that can tell, '' or what is unlike the training images.
Rows = list[tuple[str, list[tuple[str, float]], str | None]]


@click.command(
    short_help="Labels, probabilities and warnings of images.",
    epilog="""\b
Examples:
  aidgn predict runs/digits-AIDGN-chalk-trial0-draw0-524de501 photo.jpg
  aidgn predict RUN photos/ --csv labels.csv
  aidgn predict RUN "photos/**/*.png" --top 3
  find . -name "*.jpg" | aidgn predict RUN - --json > labels.jsonl
Images that cannot be read are named on standard error and left out. A warning means that the feature's norm, or its
angle to the predicted class, is unlike those of images set aside in training.""",
)
@click.argument("model")
@click.argument("images", nargs=-1, required=True, metavar="IMAGES...")
@click.option(
    "--top",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="K",
    help="The K most probable classes instead of one.",
)
@click.option("--csv", metavar="FILE", help="Write CSV to FILE, or to standard output if it is -.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--false-alarms",
    default=0.01,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="How many new images of the training domains may get a warning by chance.",
)
@click.option("--algorithm", metavar="FILE.py:CLASS", help="Where the class is, if the algorithm is your own.")
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu.")
def predict(
    model: str,
    images: tuple[str, ...],
    top: int,
    csv: str | None,
    as_json: bool,
    false_alarms: float,
    algorithm: str | None,
    device: str,
) -> None:
    """Classify IMAGES with MODEL: what `aidgn fit`, `train` or `export` made. IMAGES are files, folders, quoted
    patterns, or - for a list of files on standard input."""
    if csv == "-" and as_json:
        raise AidgnError("--csv - and --json both print to standard output: choose one, or give --csv a file.")
    if csv and Path(csv).is_dir():
        raise AidgnError(f"--csv {csv} is a folder: name a file in it.")

    from aidgn.cli.display import RunDisplay
    from aidgn.errors import Interrupted
    from aidgn.inference import find_images, load_model

    ignored: list[str] = []
    files = find_images(
        (name for given in images for name in (_listed(sys.stdin.read()) if given == "-" else [given]) if name), ignored
    )
    passed_over = f"{plural(len(ignored), 'other file')} ignored: {some(ignored)}." if ignored else ""
    if not files:
        raise AidgnError(
            f"No image found in {', '.join(images)}: expected the model, then image files, folders with "
            f"some, or quoted patterns. {passed_over}".rstrip()
        )
    loaded = load_model(model, device, algorithm, false_alarms)
    top = min(top, len(loaded.classes))
    broken = done = warned = 0
    out = sys.stdout  # as it is before a live display redirects what is printed
    outputs: list[tuple[IO[str], Callable[[Rows, bool], str]]] = [(out, _as_json)] if as_json else []
    with ExitStack() as stack:
        if csv == "-":
            outputs.append((out, _as_csv))
        elif csv:
            outputs.append((stack.enter_context(written_at_last(Path(csv))), _as_csv))
        if not outputs:
            from rich.cells import cell_len

            widths = min(max(4, *map(cell_len, files)), 60), max(map(cell_len, ["label", *loaded.classes]))
            outputs.append((out, partial(_as_text, files=widths[0], labels=widths[1])))
        on_terminal = out.isatty() and any(stream is out for stream, _ in outputs)  # where rows show the progress
        display = None if on_terminal else stack.enter_context(RunDisplay())
        if display:
            display.update("predicting", 0, len(files))

        def skip(_: Any, error: AidgnError) -> None:
            nonlocal broken
            broken += 1
            click.echo(f"left out: {error}", err=True)

        try:
            for names, found in loaded.batches(files, skip):
                warnings = [None] * len(names) if found.warnings is None else [each or "" for each in found.warnings]
                warned += sum(map(bool, warnings))
                rows = list(zip(map(str, names), found.top(top), warnings, strict=True))
                for stream, form in outputs:
                    stream.write(form(rows, not done))
                    stream.flush()
                done += len(names)
                if display:
                    display.update("predicting", done + broken, len(files))
        except KeyboardInterrupt:
            kept = f"; {csv} was not written" if csv not in (None, "-") else ""
            raise Interrupted(f"Stopped after {done + broken} of {len(files)} images{kept}.") from None
        if passed_over:
            click.echo(passed_over, err=True)
        if not done:
            raise AidgnError(
                f"None of the {broken} images could be read." if broken > 1 else "The image could not be read."
            )
    click.echo(
        f"{plural(done, 'image')} classified"
        + (f", {broken} left out" if broken else "")
        + (f"; in {csv}" if csv not in (None, "-") else "")
        + ".",
        err=True,
    )
    if loaded.novelty is None:
        click.echo(
            "Warnings about images unlike the training ones are not available: this model came without "
            "novelty.json, which training writes.",
            err=True,
        )
    else:
        rate = loaded.novelty.rate(false_alarms)
        few = f" (the least that {len(loaded.novelty)} images set aside can tell)" if rate > false_alarms else ""
        click.echo(
            f"{warned} with a warning, {warned / done:.1%}; of new images of the training domains "
            f"{rate:.1%} get one by chance{few}.",
            err=True,
        )


def _listed(text: str) -> list[str]:
    """Names of files: one a line, with or without a carriage return, or with a null byte behind each (find -print0)."""
    return text.split("\0") if "\0" in text else [line.removesuffix("\r") for line in text.split("\n")]


def _as_json(rows: Rows, first: bool) -> str:
    lines = []
    for file, best, warning in rows:
        entries = [{"label": label, "probability": round(p, 6)} for label, p in best]
        told = {} if warning is None else {"warning": warning or None}
        lines.append(
            json.dumps(
                {"file": file, **entries[0], **told, **({"top": entries} if len(best) > 1 else {})}, allow_nan=False
            )
        )
    return "".join(f"{line}\n" for line in lines)


def _as_csv(rows: Rows, first: bool) -> str:
    text = io.StringIO()
    table = csv_format.writer(text, lineterminator="\n")
    if first:
        ranks = ["", *(f"_{rank}" for rank in range(2, len(rows[0][1]) + 1))]
        told = [] if rows[0][2] is None else ["warning"]
        table.writerow(["file", *(f"{head}{rank}" for rank in ranks for head in ("label", "probability")), *told])
    # Of a file from anywhere, a spreadsheet would take =... for a formula and run it; ./=... is the same file.
    table.writerows(
        [
            f"./{file}" if file[0] in "=+-@" else file,
            *(cell for label, p in best for cell in (label, f"{p:.6f}")),
            *([] if warning is None else [warning]),
        ]
        for file, best, warning in rows
    )
    return text.getvalue()


def _as_text(rows: Rows, first: bool, files: int, labels: int) -> str:
    """A table whose columns for file and label have these widths, in which some letters take two places."""
    from rich.cells import cell_len

    def padded(text: str, width: int) -> str:
        return text + " " * (width - cell_len(text))

    head = f"{'file':<{files}}  {'label':<{labels}}  probability\n" if first else ""
    return head + "".join(
        padded(file, files)
        + "".join(f"  {padded(label, labels)}  {p:>6.1%}" for label, p in best)
        + (f"  {warning}" if warning else "")
        + "\n"
        for file, best, warning in rows
    )
