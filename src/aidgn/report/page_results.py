"""The results of runs on the report page: tables, answers, metrics and accuracies per class, by selection method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from aidgn.analysis.comparison import compare
from aidgn.errors import AidgnError
from aidgn.metrics import METRICS
from aidgn.report.comparison import format_comparisons
from aidgn.report.page_answer import Answer, make_answer
from aidgn.report.page_data import datasets_of, for_page
from aidgn.report.rank_figure import draw_ranks, to_svg
from aidgn.report.table import Trials, tables
from aidgn.report.table_formats import RowName, Table, TextTable
from aidgn.runs.records import Record, Records
from aidgn.selection import METHODS, select


@dataclass(frozen=True)
class ClassAccuracies:
    """Accuracies on the images of each class of unseen domains, in percent: means over targets and trials.

    Args:
        algorithms: Names of the columns.
        rows: Name of each class and its accuracies; None where an algorithm has no images of it.
    """

    algorithms: list[str]
    rows: list[tuple[str, list[float | None]]]


@dataclass
class Result:
    """The tables by one way of selecting, and the accuracies behind them."""

    method: str
    tables: list[Table]
    accuracies: dict[str, dict[RowName, Trials]]  # by data set
    answers: dict[str, Answer | None] = field(default_factory=dict)  # by data set
    metric_tables: list[Table] = field(default_factory=list)  # of the metrics other than accuracy
    class_accuracies: dict[str, ClassAccuracies] = field(default_factory=dict)  # by data set
    comparisons: list[TextTable] = field(default_factory=list)
    rank_figures: dict[str, Markup] = field(default_factory=dict)  # SVG by data set, "" for all of several

    @property
    def short_title(self) -> str:
        return METHODS[self.method].short_title

    @property
    def title(self) -> str:
        return METHODS[self.method].title

    @property
    def words(self) -> str:
        return METHODS[self.method].description


def make_results(records: Records, finished: Records) -> tuple[list[Result], list[str]]:
    """Tabulate the runs by each selection method that they allow, and say why training-domain validation fails."""
    results, notes = [], []
    for method in METHODS if finished.runs else ():
        try:
            shown = tables(finished, method, paper=True)
            rows = select(finished, method)
        except AidgnError as error:
            if method == "training":  # what the others need, most sweeps are not made for
                notes.append(str(error))
            continue
        accuracies: dict[str, dict[RowName, Trials]] = {}
        for row in rows:
            trials = accuracies.setdefault(row["dataset"], {}).setdefault(RowName(row["algorithm"]), {})
            trials.setdefault(row["target"], {})[row["trial"]] = row["accuracy"]
        metric_tables = [
            table
            for metric in METRICS
            if metric != "accuracy" and any(metric in row for row in rows)
            for table in tables(finished, method, metric=metric)
        ]
        by_class = average_classes(rows, _class_names(finished))
        comparisons = compare(finished, method)
        figures = [(found.dataset or "", draw_ranks(found)) for found in comparisons]
        result = Result(
            method,
            for_page(shown, records),
            accuracies,
            metric_tables=for_page(metric_tables, records),
            class_accuracies=by_class,
            comparisons=format_comparisons(comparisons, finished, method),
            rank_figures={
                name: to_svg(figure, f"ranks-{method}-{number}")
                for number, (name, figure) in enumerate(figures)
                if figure
            },
        )
        for entry in datasets_of(finished):
            by_row = accuracies.get(entry["name"], {})
            by_algorithm = {name: by_row[RowName(name)] for name in entry["algorithms"] if RowName(name) in by_row}
            result.answers[entry["name"]] = make_answer(entry["domains"], by_algorithm)
        results.append(result)
    return results, notes


def average_classes(rows: Sequence[Record], names: Mapping[str, Sequence[str]]) -> dict[str, ClassAccuracies]:
    """Average the accuracies per class over targets and trials, by data set.

    Args:
        rows: Rows of `select`; those without accuracies per class are left out.
        names: Names of the classes by data set; numbers stand for missing names.
    """
    groups: dict[str, dict[str, list[list[float | None]]]] = {}
    for row in rows:
        if "class_accuracies" in row:
            by_algorithm = groups.setdefault(row["dataset"], {})
            by_algorithm.setdefault(row["algorithm"], []).append(row["class_accuracies"])
    averaged = {}
    for dataset, by_algorithm in groups.items():
        sizes = {len(values) for runs in by_algorithm.values() for values in runs}
        if len(sizes) > 1:
            continue  # runs on other classes do not compare
        size = sizes.pop()
        classes = names.get(dataset, ())
        labels = list(classes) if len(classes) == size else [str(number) for number in range(size)]
        columns = [_means(np.array(runs, float)) for runs in by_algorithm.values()]
        averaged[dataset] = ClassAccuracies(
            list(by_algorithm), [(label, list(cells)) for label, *cells in zip(labels, *columns, strict=True)]
        )
    return averaged


def _means(values: np.ndarray) -> list[float | None]:
    """Return the mean of each column in percent without NaN; None if a column has nothing else."""
    known = [column[~np.isnan(column)] for column in values.T]
    return [100 * float(column.mean()) if len(column) else None for column in known]


def _class_names(finished: Records) -> dict[str, list[str]]:
    return {run.args["dataset"]: run.metadata.classes for run in finished.runs if run.metadata.classes}
