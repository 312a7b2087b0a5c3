"""Make the results of the report page by selection method: tables, answers, metrics and accuracies per class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from aidgn.analysis.comparison import Comparison, Difference, compare
from aidgn.errors import AidgnError
from aidgn.metrics import METRICS
from aidgn.report.comparison import format_comparisons
from aidgn.report.page_data import datasets_of, for_page
from aidgn.report.rank_figure import draw_ranks, to_svg
from aidgn.report.table import Trials, have_same_trials, tables
from aidgn.report.table_formats import Cell, CellText, Row, RowName, Table
from aidgn.runs.records import Record, Records
from aidgn.selection import METHODS, SelectionMethod, select


@dataclass(frozen=True)
class Answer:
    """The algorithm with the highest average accuracy on a data set."""

    best: str  # the algorithm
    mean: float  # its average accuracy in percent
    targets: dict[str, float]  # its accuracy by unseen domain
    trials: int | None  # number of trials; None if targets have different trials
    second: str  # the next in the table, "" if no other algorithm has an average
    difference: Difference | None  # the comparison of both, if there is one
    without_average: list[str]  # algorithms that lack a target

    @property
    def points(self) -> float:
        """How far the best algorithm is ahead in the trials that both have."""
        assert self.difference is not None
        return self.difference.mean * (1 if self.difference.first == self.best else -1)

    @property
    def wins(self) -> int:
        """Pairs of domain and trial in which the best algorithm is ahead."""
        assert self.difference is not None
        return self.difference.wins if self.difference.first == self.best else self.difference.losses


def make_answer(
    table: Table, domains: Sequence[str], trials: Mapping[RowName, Trials], comparison: Comparison
) -> Answer | None:
    """Find the best algorithm of a data set's table and its comparison with the next; None if there is no average."""
    means = {row.head: row.cells[-1].mean for row in table.ours if row.cells[-1] is not None}
    if not means:
        return None
    best, *others = sorted(means, key=lambda name: -means[name])
    second = others[0] if others else ""
    of_best = trials[RowName(best)]
    return Answer(
        best,
        means[best],
        {domains[target]: 100 * float(np.mean(list(values.values()))) for target, values in sorted(of_best.items())},
        len(next(iter(of_best.values()))) if have_same_trials(of_best) else None,
        second,
        next((pair for pair in comparison.differences if {pair.first, pair.second} == {best, second}), None),
        [row.head for row in table.ours if row.head not in means],
    )


@dataclass
class Result:
    """The tables of one selection method, and the accuracies in them."""

    method: str
    tables: list[Table]
    accuracies: dict[str, dict[RowName, Trials]]  # by data set
    answers: dict[str, Answer | None] = field(default_factory=dict)  # by data set
    metric_tables: list[Table] = field(default_factory=list)  # of the metrics other than accuracy
    class_tables: list[Table] = field(default_factory=list)
    comparisons: list[Table] = field(default_factory=list)
    rank_figures: dict[str, Markup] = field(default_factory=dict)  # SVG by data set, "" for all of several

    @property
    def selection(self) -> SelectionMethod:
        return METHODS[self.method]


def make_results(records: Records, finished: Records) -> tuple[list[Result], list[str]]:
    """Tabulate the runs by each selection method that they allow, and say why training-domain validation fails."""
    results, notes = [], []
    class_names = {run.args["dataset"]: run.metadata.classes for run in finished.runs if run.metadata.classes}
    for method in METHODS if finished.runs else ():
        try:
            shown = tables(finished, method, paper=True)
            rows = select(finished, method)
        except AidgnError as error:
            if method == "training":  # most sweeps lack the runs that other methods need
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
        comparisons = compare(finished, method)
        figures = [(comparison.dataset or "", draw_ranks(comparison)) for comparison in comparisons]
        result = Result(
            method,
            for_page(shown, records),
            accuracies,
            metric_tables=for_page(metric_tables, records),
            class_tables=average_classes(rows, class_names),
            comparisons=format_comparisons(comparisons, finished, method),
            rank_figures={
                name: to_svg(figure, f"ranks-{method}-{number}")
                for number, (name, figure) in enumerate(figures)
                if figure
            },
        )
        by_name = {comparison.dataset: comparison for comparison in comparisons}
        domains = {entry["name"]: entry["domains"] for entry in datasets_of(finished)}
        for table in shown:
            if name := table.dataset:
                result.answers[name] = make_answer(table, domains[name], accuracies.get(name, {}), by_name[name])
        results.append(result)
    return results, notes


def average_classes(rows: Sequence[Record], names: Mapping[str, Sequence[str]]) -> list[Table]:
    """Tabulate the accuracies on the images of each class of unseen domains, means over targets and trials.

    Args:
        rows: Rows of `select`; those without accuracies per class are left out.
        names: Names of the classes by data set; numbers stand for missing names.
    """
    groups: dict[str, dict[str, list[list[float | None]]]] = {}
    for row in rows:
        if "class_accuracies" in row:
            by_algorithm = groups.setdefault(row["dataset"], {})
            by_algorithm.setdefault(row["algorithm"], []).append(row["class_accuracies"])
    made = []
    for dataset, by_algorithm in groups.items():
        sizes = {len(values) for runs in by_algorithm.values() for values in runs}
        if len(sizes) > 1:
            continue  # runs with other classes cannot be compared
        labels = names.get(dataset, ())
        labels = labels if len(labels) in sizes else [str(number) for number in range(sizes.pop())]
        columns = [_means(np.array(runs, float)) for runs in by_algorithm.values()]
        lines = [Row(label, list(cells)) for label, *cells in zip(labels, *columns, strict=True)]
        title = f"Accuracy (%) on the images of each class, mean over unseen domains and trials, {dataset}"
        texts = [[CellText(f"{cell.mean:.1f}" if cell else "") for cell in line.cells] for line in lines]
        made.append(Table(title, list(by_algorithm), lines, dataset=dataset, head="Class", texts=texts))
    return made


def _means(values: np.ndarray) -> list[Cell | None]:
    """Return the mean of each column in percent without NaN; None if a column has nothing else."""
    known = [column[~np.isnan(column)] for column in values.T]
    return [Cell(100 * float(column.mean())) if len(column) else None for column in known]
