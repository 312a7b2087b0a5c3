"""The paired comparison of algorithms as tables: differences with their tests, and average ranks."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.analysis.comparison import MIN_TRIALS, RESAMPLES, Comparison, Difference, compare
from aidgn.analysis.ranks import LEVEL, Ranks
from aidgn.errors import plural, some
from aidgn.files import for_json, write_text
from aidgn.metrics import METRICS
from aidgn.report.export import write_rows
from aidgn.report.table import column_names
from aidgn.report.table_formats import Cell, CellText, Row, Table
from aidgn.runs.records import Record, Records, as_records, domain_names
from aidgn.selection import find_method

SCOPE = "The tests are about these unseen domains, trained again; they say nothing about other domains."


def comparison_tables(records: Iterable[Record], method: str = "training", metric: str = "accuracy") -> list[Table]:
    """Tabulate the comparison of every two algorithms, and their average ranks.

    Args:
        records: Records of runs. Unfinished runs are left out.
        method: Selection method, a name in `aidgn.selection.METHODS`.
        metric: A key of `aidgn.metrics.METRICS`.
    """
    loaded = as_records(records)
    return format_comparisons(compare(loaded, method, metric), loaded, method)


def format_comparisons(comparisons: Sequence[Comparison], records: Records, method: str) -> list[Table]:
    """Make the tables of each comparison: differences and, if there are some, ranks."""
    tables = []
    title = find_method(method).title
    for comparison in comparisons:
        if comparison.differences:
            tables.append(_differences_table(comparison, records, title))
        if comparison.ranks:
            tables.append(_ranks_table(comparison, comparison.ranks, title))
    return tables


def target_names(records: Records, dataset: str) -> list[str]:
    """Return the names of a data set's columns."""
    runs = [run for run in records.runs if run.args["dataset"] == dataset]
    count = 1 + max(domain for run in runs for domain in [*run.domains, *run.targets])
    return column_names(dataset, [domain_names(run.args) for run in runs], count).names


def _differences_table(comparison: Comparison, records: Records, title: str) -> Table:
    metric = METRICS[comparison.metric]
    places: list[list[tuple[str, int]]]
    if comparison.dataset:
        names = target_names(records, comparison.dataset)
        numbers = sorted({place[1] for difference in comparison.differences for place in difference.targets})
        columns, places = [names[number] for number in numbers], [[(comparison.dataset, n)] for n in numbers]
    else:
        keys = sorted({place for difference in comparison.differences for place in difference.targets})
        columns = list(dict.fromkeys(dataset for dataset, _ in keys))
        places = [[place for place in keys if place[0] == dataset] for dataset in columns]
    rows, texts = [], []
    for difference in comparison.differences:
        means = [
            float(np.mean([difference.targets[place] for place in group])) if group[0] in difference.targets else None
            for group in places
        ]
        signed = [_signed(mean, metric.digits) for mean in [*means, _known(difference.mean)]]
        interval = "" if difference.low is None else f"{_signed(difference.low, metric.digits)} to "
        interval += _signed(difference.high, metric.digits) if interval else ""
        words = [
            interval,
            f"{difference.wins}/{difference.ties}/{difference.losses}",
            "" if difference.p_holm is None else f"{difference.p_holm:.3f}",
            difference.verdict,
        ]
        values = [*means, _known(difference.mean), difference.low, difference.wins, difference.p_holm, None]
        cells = [None if value is None else Cell(value) for value in values]
        rows.append(Row(f"{difference.first} vs {difference.second}", cells))
        texts.append([*map(CellText, signed), *map(CellText, words)])
        if difference.clear:
            texts[-1][-1] = texts[-1][-1]._replace(mark="best")
    return Table(
        f"Paired differences, {_subject(comparison, title)}",
        [*columns, "Mean", "95 % interval", "W/T/L", "p (Holm)", "Result"],
        rows,
        _differences_notes(comparison),
        comparison.dataset,
        head="Comparison",
        texts=texts,
    )


def _ranks_table(comparison: Comparison, ranks: Ranks, title: str) -> Table:
    rows, texts = [], []
    groups = ranks.groups()
    for name, average in ranks.averages.items():
        alike = {other for group in groups if name in group for other in group} - {name}
        rows.append(Row(name, [Cell(average), None]))
        close = ", ".join(other for other in ranks.averages if other in alike) or "none"
        texts.append([CellText(f"{average:.2f}"), CellText(close)])
    note = (
        f"Rank 1 is the best; average over {ranks.blocks} pairs of unseen domain and trial. Ranks that are "
        f"{ranks.critical_difference:.2f} or less apart do not differ clearly (Nemenyi's critical difference at 5 %)."
    )
    if ranks.p is not None:
        note += f" Friedman's test that all are alike: p = {ranks.p:.3f}."
    notes = [note]
    if not ranks.same_budget:
        counts = some((f"{name} {count}" for name, count in ranks.draws.items()), 30)
        notes.append(f"Unequal budgets, so these ranks are no result. Runs that a value was chosen from: {counts}.")
    return Table(
        f"Average ranks, {_subject(comparison, title)}",
        ["Rank", "Not clearly different from"],
        rows,
        notes,
        comparison.dataset,
        texts=texts,
    )


def _subject(comparison: Comparison, title: str) -> str:
    metric = "" if comparison.metric == "accuracy" else f", {METRICS[comparison.metric].noun}"
    return f"{comparison.dataset or 'all data sets'}{metric}, {title}"


def _differences_notes(comparison: Comparison) -> list[str]:
    metric = METRICS[comparison.metric]
    unit = " in points" if metric.percent else ""
    tested = [difference for difference in comparison.differences if difference.p is not None]
    notes = [
        f"{metric.title}{unit}, the first minus the second{'' if metric.higher_is_better else ', lower is better'}: "
        "mean over pairs, which are the same unseen domain of the same trial. W/T/L: pairs in which the first is "
        "better, equal, worse."
    ]
    if tested:
        notes.append(
            f"Interval: Student's t over pairs, not corrected for the number of comparisons. p: permutation of the "
            f"signs of the differences, corrected for {plural(len(tested), 'test')} (Holm). A difference is a result "
            f"below {LEVEL:g}. {SCOPE}"
        )
        smallest = max(len(tested) * 2 / min(2**difference.pairs, RESAMPLES) for difference in tested)
        if smallest >= LEVEL:
            notes.append(
                f"Some of these tests have so few pairs that their p cannot fall below {min(smallest, 1):.2g}. Train "
                "more trials or targets."
            )
    if any(difference.p is None for difference in comparison.differences):
        notes.append(
            f"Fewer than {MIN_TRIALS} trials with every target are no result, so they have no interval and no test."
        )
    if any(not difference.same_budget for difference in comparison.differences):
        notes.append(
            "Unequal budgets: results of one of the two were chosen from more runs, draws or values of "
            "hyper-parameters, which alone can make it better. Give both the same number."
        )
    if comparison.left_out:
        names = some((f"{name} ({trials})" for name, trials in sorted(comparison.left_out.items())), 30)
        notes.append(f"Left out, with fewer than {MIN_TRIALS} trials that have every target: {names}.")
    return notes


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _signed(value: float | None, digits: int) -> str:
    return "X" if value is None else f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0: no minus before a zero


# Files ----------------------------------------------------------------------------------------------------------------

COLUMNS = ("first", "second", "trials", "pairs", "mean", "low", "high", "p", "p_holm", "wins", "ties", "losses")


def write_comparisons(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write comparisons as JSON, Parquet or CSV, by the suffix of the file; CSV and Parquet have no ranks."""
    if path.suffix == ".json":
        values = for_json([comparison.to_dict() for comparison in comparisons])
        write_text(path, json.dumps(values, indent=1, allow_nan=False) + "\n")
        return
    rows = [
        [comparison.dataset or "all", comparison.metric, *_values(difference)]
        for comparison in comparisons
        for difference in comparison.differences
    ]
    write_rows(path, ["dataset", "metric", *COLUMNS, "first_draws", "second_draws", "verdict"], rows)


def _values(difference: Difference) -> list[Any]:
    return [*(getattr(difference, name) for name in COLUMNS), *difference.draws, difference.verdict]
