"""Tables of results: mean and spread over trials, per target and per data set, in four forms."""

import html
import io
import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from aidgn.data.catalogue import CATALOGUE
from aidgn.errors import UserError, did_you_mean
from aidgn.records import Record, Records, as_records
from aidgn.report.export import all_records_csv
from aidgn.selection import domain_names, select

__all__ = ["Cell", "Row", "Table", "all_records_csv", "tables"]

Mark = Literal["", "best", "second"]

METHOD_TITLES = {"training": "training-domain validation", "leave-one-out": "leave-one-domain-out validation",
                 "oracle": "test-domain validation (oracle)"}
SPREADS = {"sd": "standard deviation (n - 1) over trials", "se": "standard error, standard deviation (n) / sqrt(n)"}
# Rows of the paper's tables to set beside an algorithm of ours, where they are not of the same name.
PAPER_ROWS = {"ERM": ["ERM", "ERM (reproduced)"], "AIDGN-noRD": ["AIDGN w/o RD"], "AIDGN-noR": ["AIDGN w/o R"],
              "AIDGN-noD": ["AIDGN w/o D"]}


class Cell(NamedTuple):
    """Percent; `trials` is 0 where the number is no mean over trials."""

    mean: float
    spread: float | None = None
    trials: int = 0


@dataclass
class Row:
    head: str
    cells: list[Cell | None]  # None: missing
    kind: Literal["ours", "paper", "difference"] = "ours"


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    @property
    def trials(self) -> set[int]:
        """The numbers of trials behind our cells; they are printed where there is more than one."""
        return {cell.trials for row in self.rows if row.kind == "ours" for cell in row.cells if cell and cell.trials}

    def text(self, row: Row, cell: Cell | None) -> str:
        if cell is None:
            return "X" if row.kind == "ours" else ""
        if row.kind == "difference":
            return f"{round(cell.mean, 1) + 0.0:+.1f}"  # + 0.0: no minus before a zero
        spread = "" if cell.spread is None else f" ± {cell.spread:.1f}"
        trials = f" ({cell.trials})" if row.kind == "ours" and cell.trials and len(self.trials) > 1 else ""
        return f"{cell.mean:.1f}{spread}{trials}"

    def marks(self) -> list[list[Mark]]:
        """Best and second of every column among our rows, as printed: equal to one decimal is equal."""
        marks: list[list[Mark]] = [["" for _ in row.cells] for row in self.rows]
        for j in range(len(self.columns)):
            values = {i: round(cell.mean, 1) for i, row in enumerate(self.rows)
                      if row.kind == "ours" and (cell := row.cells[j]) is not None}
            ranks = sorted(set(values.values()), reverse=True)
            for i, value in values.items():
                if len(values) > 1 and value in ranks[:2]:
                    marks[i][j] = "best" if value == ranks[0] else "second"
        return marks

    def body(self) -> Iterable[tuple[Row, list[tuple[str, Mark]]]]:
        for row, marks in zip(self.rows, self.marks(), strict=True):
            yield row, [(self.text(row, cell), mark) for cell, mark in zip(row.cells, marks, strict=True)]

    def to_terminal(self) -> str:
        """With the terminal's codes for bold and underlined; as wide as needed where there is no terminal."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(self.title, style="bold"), title_justify="left", title_style="",
                          box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("Algorithm")
        for column in self.columns:
            table.add_column(Text(column), justify="right")
        for row, cells in self.body():
            styles = {"": "", "best": "bold", "second": "underline"}
            head = row.head if row.kind == "ours" else f"  {row.head}"
            dim = "" if row.kind == "ours" else "dim"
            table.add_row(Text(head, style=dim), *(Text.assemble((text, styles[mark] or dim)) for text, mark in cells))
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
        console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=width)
        console.print(table)
        for note in self.notes:
            console.print(Text(note, style="dim"), soft_wrap=not sys.stdout.isatty())
        return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]

    def to_markdown(self) -> str:
        wraps = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}
        lines = [f"### {_markdown(self.title)}", "",
                 "| Algorithm | " + " | ".join(map(_markdown, self.columns)) + " |",
                 "|:--|" + "--:|" * len(self.columns)]
        for row, cells in self.body():
            head = _markdown(row.head) if row.kind == "ours" else f"*{_markdown(row.head)}*"
            lines.append(f"| {head} | " + " | ".join(wraps[mark].format(text) for text, mark in cells) + " |")
        return "\n".join([*lines, "", *(f"{_markdown(note)}  " for note in self.notes)])

    def to_latex(self) -> str:
        wraps = {"": "{}", "best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}
        lines = ["% needs \\usepackage{booktabs}", r"\begin{table}", r"\centering",
                 rf"\caption{{{_latex(' '.join([self.title + '.', *self.notes]))}}}",
                 rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}", r"\toprule",
                 " & ".join(["Algorithm", *map(_latex, self.columns)]) + r" \\", r"\midrule"]
        for i, (row, cells) in enumerate(self.body()):
            if i and row.kind == "ours" and self.rows[i - 1].kind != "ours":
                lines.append(r"\addlinespace")
            head = _latex(row.head) if row.kind == "ours" else rf"\quad {_latex(row.head)}"
            texts = [wraps[mark].format(f"${text}$" if text and row.kind == "difference" else _latex(text))
                     for text, mark in cells]
            lines.append(" & ".join([head, *texts]) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])

    def to_html(self) -> str:
        wraps = {"": "{}", "best": "<strong>{}</strong>", "second": "<u>{}</u>"}
        heads = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in ["Algorithm", *self.columns])
        notes = "".join(f"<br><small>{html.escape(note)}</small>" for note in self.notes)
        lines = ['<table class="results">', f"<caption>{html.escape(self.title)}{notes}</caption>",
                 f"<thead><tr>{heads}</tr></thead>", "<tbody>"]
        for row, cells in self.body():
            values = "".join(f"<td>{wraps[mark].format(html.escape(text))}</td>" for text, mark in cells)
            lines.append(f'<tr class="{row.kind}"><th scope="row">{html.escape(row.head)}</th>{values}</tr>')
        return "\n".join([*lines, "</tbody>", "</table>"])


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
         **{character: "\\" + character for character in "&%$#_{}"}}


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


# From records to tables -----------------------------------------------------------------------------------------------


def tables(records: Iterable[Record], method: str = "training", spread: str = "sd", paper: bool = False) -> list[Table]:
    """One table per data set (algorithms x targets) and, of several data sets, one over them (algorithms x data sets).

    Unfinished runs are left out. `spread` is what stands after the plus-minus, "sd" or "se"; `paper` puts the paper's
    numbers and the difference below ours.
    """
    if spread not in SPREADS:
        raise UserError(f"There is no spread {spread}.{did_you_mean(spread, SPREADS)} Choose sd or se.")
    loaded = as_records(records)
    finished = loaded.finished()
    rows = select(finished, method)
    if not rows:
        needs = " It needs runs with each pair of domains as targets." if method == "leave-one-out" else ""
        raise UserError(f"There is nothing to tabulate: {len(finished.runs)} of {len(loaded.runs)} runs are finished, "
                        f"none of them can be selected by {METHOD_TITLES[method]}.{needs}")
    results: dict[tuple[str, str], dict[int, dict[int, float]]] = {}  # data set, algorithm -> target -> trial
    for row in rows:
        of_target = results.setdefault((row["dataset"], row["algorithm"]), {}).setdefault(row["target"], {})
        of_target[row["trial"]] = row["accuracy"]
    datasets = _in_order({run.args["dataset"] for run in finished.runs}, _paper()["benchmark"]["columns"])
    algorithms = _in_order({run.args["algorithm"] for run in finished.runs}, _paper_order())
    about = [*_reading_notes(loaded), *_mixture_notes(finished)]
    made = [_dataset_table(finished, dataset, algorithms, results, method, spread, paper) for dataset in datasets]
    if len(datasets) > 1:
        made.append(_benchmark_table(datasets, algorithms, results, method, spread, paper))
    for table in made:
        table.notes = [_caption(table, spread), *table.notes, *about]
    return made


def _dataset_table(records: Records, dataset: str, algorithms: Sequence[str], results: Mapping[Any, Any], method: str,
                   spread: str, paper: bool) -> Table:
    """Algorithms x targets. Avg is the mean of the target means, its spread that of the trials' averages."""
    heads, notes = _targets(records, dataset)
    rows = []
    ran = {run.args["algorithm"] for run in records.runs if run.args["dataset"] == dataset}
    for algorithm in [name for name in algorithms if name in ran]:
        of = results.get((dataset, algorithm), {})
        cells = [_cell(list(of.get(target, {}).values()), spread) for target in range(len(heads))]
        known = [cell for cell in cells if cell is not None]
        average = None
        if len(known) == len(cells):
            complete = set.intersection(*(set(trials) for trials in of.values()))
            averages = [float(np.mean([of[target][trial] for target in sorted(of)])) for trial in sorted(complete)]
            average = Cell(sum(cell.mean for cell in known) / len(known), _spread(averages, spread), len(complete))
        rows += [Row(algorithm, [*cells, average]), *(_paper_rows(algorithm, dataset, heads, [*cells, average])
                                                      if paper else [])]
    return Table(f"{dataset}, {METHOD_TITLES[method]}", [*heads, "Avg"], rows,
                 notes + (_paper_notes(rows, method) if paper else []))


def _benchmark_table(datasets: Sequence[str], algorithms: Sequence[str], results: Mapping[Any, Any], method: str,
                     spread: str, paper: bool) -> Table:
    """Algorithms x data sets: the targets are averaged within a trial first, as DomainBed does."""
    rows, partial = [], []
    for algorithm in algorithms:
        cells = []
        for dataset in datasets:
            of = results.get((dataset, algorithm), {})
            trials = sorted({trial for accuracies in of.values() for trial in accuracies})
            averages = [float(np.mean([of[target][trial] for target in sorted(of) if trial in of[target]]))
                        for trial in trials]
            cells.append(_cell(averages, spread))
            targets = {target for name in algorithms for target in results.get((dataset, name), {})}
            if any(trial not in of.get(target, {}) for trial in trials for target in targets):
                partial.append(f"{algorithm} on {dataset}")
        known = [cell.mean for cell in cells if cell is not None]
        average = Cell(sum(known) / len(known)) if len(known) == len(cells) else None
        rows += [Row(algorithm, [*cells, average]), *(_paper_rows(algorithm, "benchmark", datasets, [*cells, average])
                                                      if paper else [])]
    notes = [f"Some trials lack a target and average the others: {', '.join(partial)}."] if partial else []
    return Table(f"All data sets, {METHOD_TITLES[method]}", [*datasets, "Avg"], rows,
                 notes + (_paper_notes(rows, method) if paper else []))


def _cell(accuracies: Sequence[float], spread: str) -> Cell | None:
    return Cell(100 * float(np.mean(accuracies)), _spread(accuracies, spread), len(accuracies)) if accuracies else None


def _spread(accuracies: Sequence[float], spread: str) -> float | None:
    """sd: sqrt(sum (a - mean)^2 / (n - 1)); se: sqrt(sum (a - mean)^2 / n) / sqrt(n), as DomainBed prints it."""
    if len(accuracies) < 2:
        return None
    if spread == "sd":
        return 100 * float(np.std(accuracies, ddof=1))
    return 100 * float(np.std(np.array(accuracies) / np.sqrt(len(accuracies))))


def _targets(records: Records, dataset: str) -> tuple[list[str], list[str]]:
    """Heads of the target columns: letters of the catalogue, else names, else numbers; and a note on the letters."""
    runs = [run for run in records.runs if run.args["dataset"] == dataset]
    entry = CATALOGUE.get(dataset)
    known = {tuple(found) for run in runs if (found := domain_names(run.args))}
    if entry:  # the same domains may have been spelt differently on disk
        known = {entry.domains if entry.order(names) == list(names) else names for names in known}
    if len(known) > 1:
        raise UserError(f"The runs of {dataset} are of different domains ({' / '.join(', '.join(n) for n in known)}). "
                        "Tabulate their folders one by one.")
    if not known:
        return [str(i) for i in range(1 + max(i for run in runs for i in [*run.domains, *run.targets]))], []
    names = known.pop()
    if entry is None or names != entry.domains or names == entry.letters:
        return list(names), []
    pairs = [f"{letter} {name}" for letter, name in zip(entry.letters, names, strict=True)]
    return list(entry.letters), [f"Targets: {', '.join(pairs)}."]


def _in_order(names: Iterable[str], first: Sequence[str]) -> list[str]:
    """`names` in the order of `first`, then the others by name."""
    return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), name))


# The paper's numbers --------------------------------------------------------------------------------------------------


@cache
def _paper() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


def _paper_order() -> list[str]:
    """Our names of the paper's algorithms: its main table first, then the ablation."""
    ours = {row: name for name, rows in PAPER_ROWS.items() for row in rows}
    printed = [*_paper()["benchmark"]["rows"], *_paper()["ablation_vlcs"]["rows"]]
    return list(dict.fromkeys(ours.get(row, row) for row in printed))


def _paper_rows(algorithm: str, table: str, columns: Sequence[str], ours: Sequence[Cell | None]) -> list[Row]:
    """The paper's numbers for an algorithm, and ours minus the paper's."""
    printed = {**_paper().get(table, {}).get("rows", {})}
    if table == "VLCS":
        printed = _paper()["ablation_vlcs"]["rows"] | printed
    # The paper's average over its four data sets is of no use beside one over others.
    comparable = table != "benchmark" or [*columns, "Avg"] == _paper()["benchmark"]["columns"]
    rows = []
    for name in [name for name in PAPER_ROWS.get(algorithm, [algorithm]) if name in printed]:
        numbers = [printed[name].get(column) for column in columns] + [printed[name]["Avg"] if comparable else None]
        theirs = [Cell(number["mean"], number.get("std")) if number else None for number in numbers]
        differences = [Cell(our.mean - their.mean) if our and their else None
                       for our, their in zip(ours, theirs, strict=True)]
        also = ", reproduced" if name.endswith("(reproduced)") else ""
        rows += [Row(f"paper{also}", theirs, "paper"), Row("difference", differences, "difference")]
    return rows


def _paper_notes(rows: Sequence[Row], method: str) -> list[str]:
    if all(row.kind == "ours" for row in rows):
        return ["The paper has no numbers for this table."]
    other = " They were selected by training-domain validation." if method != "training" else ""
    return ["Paper: as printed there; ± is a standard deviation over three runs by its account, a standard error for "
            f"the baselines it quotes from DomainBed (not those reproduced).{other} Difference: ours minus paper."]


# Notes ----------------------------------------------------------------------------------------------------------------


def _caption(table: Table, spread: str) -> str:
    trials = sorted(table.trials)
    text = "Accuracy in percent on the target's in split"
    if trials == [1]:
        return f"{text}, one trial; without ± for that reason."
    if len(trials) == 1:
        text += f", mean over {trials[0]} trials; ± {SPREADS[spread]}."
    else:
        text += f", mean over trials, their number in brackets; ± {SPREADS[spread]}."
    missing = any(cell is None for row in table.rows if row.kind == "ours" for cell in row.cells)
    return text + (" X: no result." if missing else "")


def _reading_notes(records: Records) -> list[str]:
    notes = []
    left_out = records.unfinished
    if left_out:
        more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        notes.append(f"Unfinished runs left out: {len(left_out)} ({', '.join(map(str, left_out[:5]))}{more}).")
    if records.cut:
        notes.append(f"Records cut in half by a crash, ignored: {records.cut}.")
    if records.twice:
        notes.append(f"Runs found twice, counted once: {records.twice}.")
    return notes


def _mixture_notes(records: Records) -> list[str]:
    """Say where runs of different length, backbone or weights compete for one place in the table."""
    notes = []
    for dataset in sorted({run.args["dataset"] for run in records.runs}):
        for key in ("steps", "backbone", "weights"):
            found = {str(run.args[key]) for run in records.runs if run.args["dataset"] == dataset and key in run.args}
            if len(found) > 1:
                notes.append(f"The runs of {dataset} differ in {key}: {', '.join(sorted(found))}.")
    return notes
