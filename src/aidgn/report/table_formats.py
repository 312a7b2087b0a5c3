"""A table of accuracies or another metric, and the formats that it is printed in."""

import io
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from aidgn.escape import for_html, for_latex, for_markdown, for_terminal
from aidgn.metrics import METRICS

Mark = Literal["", "best", "second"]

SPREADS = {"sd": "standard deviation (n - 1) over trials", "se": "standard error, standard deviation (n) / sqrt(n)"}


class Cell(NamedTuple):
    """A value or a difference, in percent if the metric is a share."""

    mean: float
    spread: float | None = None
    trials: int = 0  # 0 if the number is no mean over trials


class CellText(NamedTuple):
    """The parts of a cell as they are printed."""

    mean: str
    spread: str = ""
    trials: str = ""
    mark: Mark = ""

    @property
    def rest(self) -> str:
        """Everything after the mean."""
        return f" ± {self.spread}" * bool(self.spread) + f" ({self.trials})" * bool(self.trials)

    def __str__(self) -> str:
        return self.mean + self.rest


class RowName(NamedTuple):
    """The name of a row with our results: an algorithm, as trained or adapted at test time."""

    algorithm: str
    adaptation: str = "none"  # a name in `aidgn.adaptation.methods.METHODS`

    def __str__(self) -> str:
        return self.algorithm if self.adaptation == "none" else f"{self.algorithm} + {self.adaptation}"


@dataclass
class Row:
    """A row of a table: our results, the paper's, or the difference of both."""

    head: str
    cells: list[Cell | None]  # None: missing
    kind: Literal["ours", "paper", "difference"] = "ours"
    name: RowName | None = None  # for rows with our results


@dataclass
class Table:
    """Rows of cells, with a caption that explains the numbers, then `notes`, then notes on the paper's numbers."""

    title: str
    columns: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    dataset: str | None = None  # None: over several data sets
    spread: str | None = None  # a key of SPREADS; None: no caption
    metric: str = "accuracy"  # a key of METRICS
    head: str = "Algorithm"  # title of the column of names
    paper_notes: list[str] = field(default_factory=list)
    texts: list[list[CellText]] | None = None  # cells as they are printed, if they are composed already

    @property
    def ours(self) -> list[Row]:
        return [row for row in self.rows if row.kind == "ours"]

    @property
    def trials(self) -> set[int]:
        """Numbers of trials behind our cells; each cell shows its own if there are several."""
        return {cell.trials for row in self.ours for cell in row.cells if cell and cell.trials}

    @property
    def footnotes(self) -> list[str]:
        """The caption and the notes."""
        caption = [] if self.spread is None else [self.caption(self.spread)]
        return [*caption, *self.notes, *self.paper_notes]

    def caption(self, spread: str) -> str:
        trials = sorted(self.trials)
        metric = METRICS[self.metric]
        text = f"{metric.title}{' (%)' * metric.percent}{'' if metric.higher_is_better else ', lower is better,'}"
        text += " on the 80 % of the unseen domain's images that the protocol evaluates"
        if trials == [1]:
            text += ", one trial, so there is no ±."
        elif len(trials) == 1:
            text += f", mean over {trials[0]} trials; ± {SPREADS[spread]}."
        else:
            text += f", mean over trials, their number in brackets; ± {SPREADS[spread]}."
        missing = any(cell is None for row in self.ours for cell in row.cells)
        return text + (" X: no result yet; an average that lacks a result is X too." if missing else "")

    def keep_columns(self, numbers: list[int]) -> None:
        """Drop all other columns."""
        self.columns = [self.columns[number] for number in numbers]
        for row in self.rows:
            row.cells = [row.cells[number] for number in numbers]

    def cell_text(self, row: Row, cell: Cell | None, mark: Mark = "") -> CellText:
        if cell is None:
            return CellText("X" if row.kind == "ours" else "")
        digits = METRICS[self.metric].digits
        if row.kind == "difference":
            return CellText(f"{round(cell.mean, digits) + 0.0:+.{digits}f}")  # + 0.0: no minus before a zero
        spread = "" if cell.spread is None else f"{cell.spread:.{digits}f}"
        trials = str(cell.trials) if row.kind == "ours" and cell.trials and len(self.trials) > 1 else ""
        return CellText(f"{cell.mean:.{digits}f}", spread, trials, mark)

    def marks(self) -> list[list[Mark]]:
        """Mark the best and the second of every column among our rows; numbers that print alike are equal."""
        metric = METRICS[self.metric]
        marks: list[list[Mark]] = [["" for _ in row.cells] for row in self.rows]
        for column in range(len(self.columns)):
            printed = {
                number: round(cell.mean, metric.digits)
                for number, row in enumerate(self.rows)
                if row.kind == "ours" and (cell := row.cells[column]) is not None
            }
            ranks = sorted(set(printed.values()), reverse=metric.higher_is_better)
            for number, value in printed.items():
                if len(printed) > 1 and value in ranks[:2]:
                    marks[number][column] = "best" if value == ranks[0] else "second"
        return marks

    def body(self) -> Iterator[tuple[Row, list[CellText]]]:
        if self.texts is not None:
            yield from zip(self.rows, self.texts, strict=True)
            return
        for row, marks in zip(self.rows, self.marks(), strict=True):
            yield row, [self.cell_text(row, cell, mark) for cell, mark in zip(row.cells, marks, strict=True)]

    def __str__(self) -> str:
        return to_markdown(self)

    def _repr_html_(self) -> str:
        return to_html(self)


def to_terminal(table: Table) -> str:
    """Format with the terminal's codes for bold and underlined; in files and pipes lines may be of any length."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
    grid = RichTable(
        title=Text(for_terminal(table.title), style="bold"),
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1) if width >= 72 else 0,
    )
    grid.add_column(table.head, overflow="fold")  # a narrow terminal may break a name, but cuts none off
    for column in table.columns:
        grid.add_column(Text(for_terminal(column)), justify="right", overflow="fold")
    for row, cells in table.body():
        dim, indent = ("", "") if row.kind == "ours" else ("dim", "  ")
        styles = {"": dim, "best": "bold", "second": "underline"}
        texts = [Text.assemble((str(cell), styles[cell.mark])) for cell in cells]
        grid.add_row(Text(indent + for_terminal(row.head), style=dim), *texts)
    output = io.StringIO()
    # Without a height, TERM=dumb makes the console 80 columns wide.
    console = Console(file=output, force_terminal=True, color_system="standard", width=width, height=25)
    console.print(grid)
    for note in table.footnotes:
        console.print(Text(for_terminal(note), style="dim"), soft_wrap=not sys.stdout.isatty())
    return output.getvalue().rstrip("\n")


def to_markdown(table: Table) -> str:
    marked = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}
    lines = [
        f"### {for_markdown(table.title)}",
        "",
        f"| {table.head} | {' | '.join(map(for_markdown, table.columns))} |",
        f"|:--|{'--:|' * len(table.columns)}",
    ]
    for row, cells in table.body():
        head = for_markdown(row.head) if row.kind == "ours" else f"*{for_markdown(row.head)}*"
        lines.append(f"| {' | '.join([head, *(marked[cell.mark].format(cell) for cell in cells)])} |")
    return "\n".join([*lines, "", *(f"{for_markdown(note)}  " for note in table.footnotes)])


def to_latex(table: Table) -> str:
    marked = {"": "{}", "best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}
    lines = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{for_latex(' '.join([table.title + '.', *table.footnotes]))}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join([table.head, *map(for_latex, table.columns)]) + r" \\",
        r"\midrule",
    ]
    previous = "ours"
    for row, cells in table.body():
        if row.kind == "ours" and previous != "ours":
            lines.append(r"\addlinespace")
        previous = row.kind
        head = for_latex(row.head) if row.kind == "ours" else rf"\quad {for_latex(row.head)}"
        texts = [marked[cell.mark].format(for_latex(str(cell))) for cell in cells]
        if row.kind == "difference":
            texts = [f"${text}$" if text else "" for text in texts]
        lines.append(" & ".join([head, *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def to_html(table: Table) -> str:
    marked = {"": "{}", "best": "<strong>{}</strong>", "second": "<u>{}</u>"}
    heads = "".join(f'<th scope="col">{for_html(column)}</th>' for column in [table.head, *table.columns])
    notes = "".join(f"<br><small>{for_html(note)}</small>" for note in table.footnotes)
    lines = [
        '<table class="results">',
        f"<caption>{for_html(table.title)}{notes}</caption>",
        f"<thead><tr>{heads}</tr></thead>",
        "<tbody>",
    ]
    for row, cells in table.body():
        values = "".join(f"<td>{marked[cell.mark].format(for_html(str(cell)))}</td>" for cell in cells)
        lines.append(f'<tr class="{row.kind}"><th scope="row">{for_html(row.head)}</th>{values}</tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])


FORMATS: dict[str, Callable[[Table], str]] = {
    "terminal": to_terminal,
    "markdown": to_markdown,
    "latex": to_latex,
    "html": to_html,
}
