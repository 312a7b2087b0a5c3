"""aidgn predict"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from aidgn.cli.options import custom_algorithm_option, device_option, source_options
from aidgn.errors import AidgnError, Interrupted, plural, some
from aidgn.files import written_at_last
from aidgn.terminal import direct

if TYPE_CHECKING:
    from aidgn.inference import Model
    from aidgn.inference.output import PredictionRow, TableRows
    from aidgn.new_site.monitor import SiteMonitor

    Output = tuple[IO[str], Callable[[Sequence[PredictionRow], bool], str]]  # a stream and its format


@click.command(
    epilog="""\b
Examples:
  aidgn predict runs/digits-AIDGN-chalk-trial0-draw0-524de501 photo.jpg
  aidgn predict RUN photos/ --csv labels.csv
  aidgn predict RUN "photos/**/*.png" --top 3
  aidgn predict RUN pictures.csv --file path --csv labelled.csv
  aidgn predict RUN1 photos/ --with RUN2 --with RUN3
  aidgn predict runs/fit-photos/model new_shop/ --abstain-below 0.8
  aidgn predict runs/fit-photos/model new_shop/ --explain heatmaps/
  find . -name "*.jpg" | aidgn predict RUN - --json > labels.jsonl
Unreadable images are listed on standard error and left out. A warning means that the norm of the image's feature, or
its angle to the predicted class, is unlike those of the validation images, or that the label is more likely wrong than
right. Models of `aidgn fit` also compare all images with those of the training sites.""",
)
@click.argument("model")
@click.argument("images", nargs=-1, required=True, metavar="IMAGES...")
@source_options("file")
@click.option(
    "--top",
    default=1,
    type=click.IntRange(min=1),
    metavar="K",
    help="Print the K most probable classes.",
)
@click.option("--csv", metavar="FILE", help="Write CSV to FILE; - is standard output.")
@click.option("--bom", is_flag=True, help="Begin the CSV file with a byte-order mark, by which Excel knows UTF-8.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--false-alarms",
    default=0.01,
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Share of new images from the training domains that may get a warning by chance.",
)
@click.option(
    "--with",
    "others",
    multiple=True,
    metavar="MODEL",
    help="Average the probabilities with those of another model; repeat for more.",
)
@click.option(
    "--abstain-below",
    type=click.FloatRange(0, 1),
    metavar="CHANCE",
    help="Give no label if the chance that it is right at an unseen site is lower; for models of `aidgn fit`.",
)
@click.option(
    "--adapt",
    type=click.Choice(["t3a", "tent-c"]),
    help="Adapt to the unlabelled images while predicting, if that helped at the sites that `aidgn fit` left out.",
)
@click.option("--explain", metavar="DIR", help="Write heatmaps to DIR that show where each picture supports its label.")
@custom_algorithm_option
@device_option
def predict(
    model: str,
    images: tuple[str, ...],
    file: str | None,
    others: tuple[str, ...],
    top: int,
    csv: str | None,
    bom: bool,
    as_json: bool,
    false_alarms: float,
    abstain_below: float | None,
    adapt: str | None,
    explain: str | None,
    algorithm: str | None,
    device: str,
) -> None:
    """Classify IMAGES with MODEL, a model that `aidgn fit`, `aidgn train` or `aidgn export` wrote, or hf://user/name.

    IMAGES are files, folders, quoted patterns, - to read a list of files from standard input, or a table (CSV, TSV,
    JSON Lines, Parquet) with a row per picture, whose order and columns the output keeps."""
    if csv == "-" and as_json:
        raise AidgnError("--csv - and --json both print to standard output: choose one, or give --csv a file.")
    if bom and csv in (None, "-"):
        raise AidgnError("--bom is for --csv FILE.")
    if csv and Path(csv).is_dir():
        raise AidgnError(f"--csv {csv} is a folder: name a file in it.")

    from aidgn.inference import load_model
    from aidgn.inference.output import make_rows
    from aidgn.progress import RunDisplay

    files, in_table, ignored_files = find_pictures(images, file)
    loaded = load_model([model, *others] if others else model, device, algorithm, false_alarms)
    if abstain_below is not None and loaded.expectations is None:
        raise AidgnError(
            f"--abstain-below needs to know how often labels are right at an unseen site, and {model} does not: "
            "`aidgn fit` with two or more sites makes models that do."
        )
    batches = loaded.batches
    monitor = loaded.site_monitor()
    if adapt is not None:
        if abstain_below is not None or others:
            raise AidgnError("--adapt cannot be combined with --abstain-below or --with: leave out one of them.")
        batches = adapted_batches(loaded, adapt, monitor)
    explanations = None
    if explain is not None:
        from aidgn.inference.explanation import ExplanationFolder

        if adapt is not None:
            raise AidgnError("--explain cannot be combined with --adapt, whose labels change while it predicts.")
        explanations = ExplanationFolder(loaded, Path(explain))
    top = min(top, len(loaded.classes))
    # A live display redirects standard output. Programs that read CSV from a pipe need names to the byte.
    stdout = sys.stdout if sys.stdout.isatty() or not csv else direct(sys.stdout)
    done = broken = warned = abstained = 0

    def skip(_: Any, error: AidgnError) -> None:
        nonlocal broken
        broken += 1
        click.echo(f"left out: {error}", err=True)

    with ExitStack() as stack:
        outputs = open_outputs(stack, stdout, csv, bom, as_json, files, loaded.classes)
        rows_on_terminal = stdout.isatty() and any(stream is stdout for stream, _ in outputs)
        display = None if rows_on_terminal else stack.enter_context(RunDisplay())  # the rows show the progress
        if display:
            display.update("predicting", 0, len(files))
        try:
            for names, prediction in batches(files, skip):
                rows = make_rows(names, prediction, top, abstain_below)
                if monitor is not None and prediction.chances is not None:
                    monitor.add(prediction.features.numpy(), prediction.logits.numpy(), prediction.chances)
                if explanations is not None:
                    explanations.write(names)
                shown = rows if in_table is None else in_table.merge(rows)
                for stream, format_rows in outputs:
                    stream.write(format_rows(shown, not done))
                    stream.flush()
                done += len(rows)
                warned += sum(bool(row.warning) for row in rows)
                abstained += sum(row.abstained for row in rows)
                if display:
                    display.update("predicting", done + broken, len(files))
            if in_table is not None and done:
                unread = in_table.merge(rows, last=True)
                for stream, format_rows in outputs:
                    stream.write(format_rows(unread, False))
        except KeyboardInterrupt:
            not_written = f"; {csv} was not written" if csv not in (None, "-") else ""
            raise Interrupted(f"Stopped after {done + broken} of {len(files)} images{not_written}.") from None
        if ignored_files:
            click.echo(ignored_files, err=True)
        if not done:
            raise AidgnError(
                f"None of the {broken} images could be read." if broken > 1 else "The image could not be read."
            )
    left_out = f", {broken} left out" if broken else ""
    place = f"; in {csv}" if csv not in (None, "-") else ""
    click.echo(f"{plural(done, 'image')} classified{left_out}{place}.", err=True)
    if explanations is not None:
        click.echo(f"{plural(explanations.written, 'heatmap')} in {explain}, in the order of the pictures.", err=True)
    if abstain_below is not None:
        click.echo(f"{abstained} without a label, because its chance to be right is below {abstain_below:g}.", err=True)
    click.echo(describe_warnings(loaded, warned, done, adapt is not None), err=True)
    if monitor is not None:
        click.echo(f"{'Without adaptation: ' if adapt else ''}{monitor.report()}", err=True)


def find_pictures(images: Sequence[str], file: str | None) -> "tuple[list[str], TableRows | None, str]":
    """Return the files, the rows of their table if there is one, and a sentence on the files that were ignored."""
    from aidgn.data.source import DataSource
    from aidgn.data.table_reader import read_table
    from aidgn.inference import find_images
    from aidgn.inference.output import TableRows

    rows = None
    ignored: list[str] = []
    if file is not None or DataSource.parse(images[0]).is_table:
        if len(images) > 1:
            raise AidgnError(f"{images[0]} is a table: give it alone.")
        table = read_table(images[0])
        files = table.files(file)
        rows = TableRows(table.columns, files)
    else:
        files = find_images(read_names(images), ignored)
    ignored_files = f"{plural(len(ignored), 'other file')} ignored: {some(ignored)}." if ignored else ""
    if not files:
        expected = "expected the model, then image files, folders of images, or quoted patterns"
        raise AidgnError(f"No image found in {', '.join(images)}: {expected}. {ignored_files}".rstrip())
    return files, rows, ignored_files


def open_outputs(
    stack: ExitStack,
    stdout: IO[str],
    csv: str | None,
    bom: bool,
    as_json: bool,
    files: Sequence[str],
    classes: Sequence[str],
) -> "list[Output]":
    """Return the streams to write to, each with its format; the stack closes the CSV file."""
    from rich.cells import cell_len

    from aidgn.inference.output import format_csv, format_json, format_text

    outputs: list[Output] = []
    if as_json:
        outputs.append((stdout, format_json))
    if csv == "-":
        outputs.append((stdout, format_csv))
    elif csv:
        csv_file = stack.enter_context(written_at_last(Path(csv)))
        csv_file.write("\ufeff" if bom else "")
        outputs.append((csv_file, format_csv))
    if not outputs:
        file_width = min(max(4, *map(cell_len, files)), 60)  # some letters take two places
        label_width = max(map(cell_len, ["label", *classes]))
        outputs.append((stdout, partial(format_text, file_width=file_width, label_width=label_width)))
    return outputs


def adapted_batches(model: "Model", adapt: str, monitor: "SiteMonitor | None") -> Callable[..., Any]:
    """Return a function like `Model.batches` that adapts; print the results of the method at sites left out."""
    from aidgn.adaptation.predict import OFFERED, choose_settings, predict_adapted

    method = next(name for name in OFFERED if name.lower() == adapt)
    adaptation = {} if model.expectations is None else model.expectations.adaptation
    settings, description = choose_settings(adaptation, method)
    click.echo(description, err=True)
    return partial(predict_adapted, model, method, settings, monitor=monitor)


def read_names(images: Sequence[str]) -> list[str]:
    """Replace - by the names on standard input: one per line, or each with a null byte after it (find -print0)."""
    names: list[str] = []
    for name in images:
        if name != "-":
            names.append(name)
            continue
        text = sys.stdin.read()
        names += text.split("\0") if "\0" in text else [line.removesuffix("\r") for line in text.split("\n")]
    return [name for name in names if name]


def describe_warnings(model: "Model", warned: int, total: int, adapted: bool) -> str:
    """Say how many images got a warning, and how many would by chance."""
    from aidgn.inference import Ensemble

    if isinstance(model, Ensemble):
        return "Warnings about images unlike the training ones are not available for the mean of several models."
    if model.novelty is None:
        return (
            "Warnings about images unlike the training ones are not available: this model has no novelty.json, which "
            "training writes."
        )
    rate = model.novelty.false_alarm_rate(model.false_alarms)
    least = f" (the lowest rate that {len(model.novelty)} validation images allow)" if rate > model.false_alarms else ""
    if model.expectations is not None and not adapted:
        return (
            f"{warned} with a warning, {warned / total:.1%}: unsure, as {model.expectations.mean('warned'):.1%} of the "
            f"images of sites that were left out, or unlike the training images, as {rate:.1%} of new ones of the "
            f"training domains are by chance{least}. No warning is no promise."
        )
    return (
        f"{warned} with a warning, {warned / total:.1%}; of new images of the training domains {rate:.1%} get one by "
        f"chance{least}."
    )
