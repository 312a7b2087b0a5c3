"""aidgn evaluate"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aidgn.cli.options import custom_algorithm_option, device_option, source_options

if TYPE_CHECKING:
    from aidgn.evaluation import Evaluation


@click.command(
    epilog="""\b
Examples:
  aidgn evaluate runs/fit-photos/model new_shop/
  aidgn evaluate runs/fit-photos/model new_shop/ --page new_shop.html
  aidgn evaluate runs/fit-photos/model labels.csv --json
  aidgn evaluate runs/fit-photos/model new.parquet --file path --label diagnosis
  aidgn evaluate runs/fit-a/model runs/fit-b/model new_shop/ --mean
A table (CSV, TSV, JSON Lines, Parquet) has a row per picture; its files are relative to the table.""",
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.argument("pictures", metavar="NEWSITE")
@source_options("file", "label")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, or a list for several models.")
@click.option("--page", metavar="FILE.html", help="Also write a page with figures to FILE.html.")
@click.option("--mean", is_flag=True, help="Also measure the mean of the probabilities of several models.")
@custom_algorithm_option
@device_option
def evaluate(
    models: tuple[str, ...],
    pictures: str,
    file: str | None,
    label: str | None,
    as_json: bool,
    page: str | None,
    mean: bool,
    algorithm: str | None,
    device: str,
) -> None:
    """Measure MODEL on labelled pictures of a new site, NEWSITE/<class>/<picture> or a table, and compare the
    accuracy with what `aidgn fit` promised."""
    from aidgn.evaluation import evaluate as evaluate_model
    from aidgn.evaluation import find_labelled
    from aidgn.files import for_json
    from aidgn.inference import load_model
    from aidgn.progress import RunDisplay
    from aidgn.report.evaluation import write_evaluation

    results: list[Evaluation] = []
    measured: list[tuple[str, str | list[str]]] = [(path, path) for path in models]
    if mean and len(models) > 1:
        measured.append((f"The mean of {len(models)} models", list(models)))
    for name, paths in measured:
        model = load_model(paths, device, algorithm)
        labelled = find_labelled(pictures, model.classes, file, label)
        with RunDisplay() as display:
            results.append(evaluate_model(model, labelled, name, on_progress=display.update))
    if as_json:
        values = [for_json(result.to_dict()) for result in results]
        json.dump(values[0] if len(values) == 1 else values, sys.stdout, indent=1, allow_nan=False)
        click.echo()
    else:
        for number, result in enumerate(results):
            if number:
                click.echo()
            print_evaluation(result)
    if page:
        click.echo(f"Page: {write_evaluation(results, Path(page))}", err=as_json)


def print_evaluation(result: "Evaluation") -> None:
    """Print the sentences and a table of the classes."""
    for sentence in result.sentences():
        click.echo(sentence)
    width = max(map(len, ["class", *result.classes]))
    promise = f"{'promised':>8}  " if result.promised_classes else ""
    click.echo(f"{'class':<{width}}  pictures   right  {promise}precision      F1")
    for name, metrics in zip(result.classes, result.class_metrics, strict=True):
        shares = (metrics.accuracy, result.promised_classes.get(name), metrics.precision, metrics.f1)
        right, promised, precision, f1 = ("-" if share is None else f"{share:.1%}" for share in shares)
        promise = f"{promised:>8}  " if result.promised_classes else ""
        click.echo(f"{name:<{width}}  {metrics.images:>8}  {right:>6}  {promise}{precision:>9}  {f1:>6}")
