"""A table of accuracies and its forms: terminal, Markdown, LaTeX, HTML."""

import html
import io
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Mark = Literal["", "best", "second"]


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
            values = {
                i: round(cell.mean, 1)
                for i, row in enumerate(self.rows)
                if row.kind == "ours" and (cell := row.cells[j]) is not None
            }
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

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
        table = RichTable(
            title=Text(self.title, style="bold"),
            title_justify="left",
            title_style="",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1) if width >= 72 else 0,
        )
        table.add_column("Algorithm", overflow="fold")  # a narrow terminal may break a name, but cuts none off
        for column in self.columns:
            table.add_column(Text(column), justify="right", overflow="fold")
        for row, cells in self.body():
            styles = {"": "", "best": "bold", "second": "underline"}
            head = row.head if row.kind == "ours" else f"  {row.head}"
            dim = "" if row.kind == "ours" else "dim"
            table.add_row(Text(head, style=dim), *(Text.assemble((text, styles[mark] or dim)) for text, mark in cells))
        console = Console(
            file=io.StringIO(), force_terminal=True, color_system="standard", width=width, height=25
        )  # without a height, TERM=dumb makes it 80 columns
        console.print(table)
        for note in self.notes:
            console.print(Text(note, style="dim"), soft_wrap=not sys.stdout.isatty())
        return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]

    def to_markdown(self) -> str:
        wraps = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}
        lines = [
            f"### {markdown(self.title)}",
            "",
            "| Algorithm | " + " | ".join(map(markdown, self.columns)) + " |",
            "|:--|" + "--:|" * len(self.columns),
        ]
        for row, cells in self.body():
            head = markdown(row.head) if row.kind == "ours" else f"*{markdown(row.head)}*"
            lines.append(f"| {head} | " + " | ".join(wraps[mark].format(text) for text, mark in cells) + " |")
        return "\n".join([*lines, "", *(f"{markdown(note)}  " for note in self.notes)])

    def to_latex(self) -> str:
        wraps = {"": "{}", "best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}
        lines = [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(' '.join([self.title + '.', *self.notes]))}}}",
            rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}",
            r"\toprule",
            " & ".join(["Algorithm", *map(_latex, self.columns)]) + r" \\",
            r"\midrule",
        ]
        for i, (row, cells) in enumerate(self.body()):
            if i and row.kind == "ours" and self.rows[i - 1].kind != "ours":
                lines.append(r"\addlinespace")
            head = _latex(row.head) if row.kind == "ours" else rf"\quad {_latex(row.head)}"
            texts = [
                wraps[mark].format(f"${text}$" if text and row.kind == "difference" else _latex(text))
                for text, mark in cells
            ]
            lines.append(" & ".join([head, *texts]) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])

    def to_html(self) -> str:
        wraps = {"": "{}", "best": "<strong>{}</strong>", "second": "<u>{}</u>"}
        heads = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in ["Algorithm", *self.columns])
        notes = "".join(f"<br><small>{html.escape(note)}</small>" for note in self.notes)
        lines = [
            '<table class="results">',
            f"<caption>{html.escape(self.title)}{notes}</caption>",
            f"<thead><tr>{heads}</tr></thead>",
            "<tbody>",
        ]
        for row, cells in self.body():
            values = "".join(f"<td>{wraps[mark].format(html.escape(text))}</td>" for text, mark in cells)
            lines.append(f'<tr class="{row.kind}"><th scope="row">{html.escape(row.head)}</th>{values}</tr>')
        return "\n".join([*lines, "</tbody>", "</table>"])


def markdown(text: str) -> str:
    """A name that anyone may have chosen as Markdown shows it, not as Markdown reads it; on one line."""
    return "".join(f"\\{each}" if each in "\\`*_{}[]<>#|!" else each for each in " ".join(text.split()))


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",  # other characters in TeX's first encoding
    **{character: "\\" + character for character in "&%$#_{}"},
}


def _latex(text: str) -> str:
    """The same for LaTeX, where an empty line would end the caption."""
    return "".join(LATEX.get(character, character) for character in " ".join(text.split()))
