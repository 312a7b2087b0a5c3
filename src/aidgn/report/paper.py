"""Add the paper's numbers to tables, for comparison with ours."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from aidgn.report.table_formats import Cell, Row, RowName, Table

# Rows of the paper's tables for algorithms with other names in this package.
PAPER_ROWS = {
    "ERM": ["ERM", "ERM (reproduced)"],
    "AIDGN-noRD": ["AIDGN w/o RD"],
    "AIDGN-noR": ["AIDGN w/o R"],
    "AIDGN-noD": ["AIDGN w/o D"],
}
OUR_NAMES = {row: name for name, rows in PAPER_ROWS.items() for row in rows}
ABLATIONS = ("AIDGN-noRD", "AIDGN-noR", "AIDGN-noD")


@cache
def paper() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


def paper_order() -> list[str]:
    """List our names of the paper's algorithms: its main table first, then the ablation."""
    printed = [*paper()["benchmark"]["rows"], *paper()["ablation_vlcs"]["rows"]]
    return list(dict.fromkeys(OUR_NAMES.get(row, row) for row in printed))


def dataset_order() -> list[str]:
    return [name for name in paper()["benchmark"]["columns"] if name != "Avg"]


def paper_rows(name: RowName, table: str, columns: Sequence[str], ours: Sequence[Cell | None]) -> list[Row]:
    """Make the paper's rows for a row of ours, each with our numbers minus the paper's.

    Args:
        name: Algorithm and adaptation of our row.
        table: A data set, or "benchmark" for the table over data sets.
        columns: Columns of our table without the average.
        ours: Cells of our row, the average last.
    """
    if name.adaptation != "none":
        heads = [f"+ {name.adaptation}"] if name.algorithm == "AIDGN" else []
        printed = _adapted_rows(table)
    else:
        heads = PAPER_ROWS.get(name.algorithm, [name.algorithm])
        printed = paper().get(table, {}).get("rows", {})
    if table == "VLCS":
        printed = paper()["ablation_vlcs"]["rows"] | printed
    # The paper's average over its four data sets does not compare with one over others.
    comparable = table != "benchmark" or list(columns) == dataset_order()
    rows = []
    for head in [head for head in heads if head in printed]:
        numbers = [printed[head].get(column) for column in columns]
        numbers.append(printed[head]["Avg"] if comparable else None)
        theirs = [Cell(number["mean"], number.get("std")) if number else None for number in numbers]
        differences = [Cell(a.mean - b.mean) if a and b else None for a, b in zip(ours, theirs, strict=True)]
        suffix = ", reproduced" if head.endswith("(reproduced)") else ""
        rows += [Row(f"paper{suffix}", theirs, "paper"), Row("difference", differences, "difference")]
    return rows


def _adapted_rows(table: str) -> dict[str, Any]:
    """Return the paper's AIDGN under adaptation, per target or, over data sets, the averages of its figure 3."""
    if table != "benchmark":
        return paper().get(f"tta_{table}", {}).get("rows", {})
    datasets = dataset_order()
    rows: dict[str, Any] = {}
    for name in paper()[f"tta_{datasets[0]}"]["rows"]:
        averages = {dataset: paper()[f"tta_{dataset}"]["rows"][name]["Avg"] for dataset in datasets}
        rows[name] = averages | {"Avg": {"mean": sum(cell["mean"] for cell in averages.values()) / len(datasets)}}
    return rows


def paper_notes(rows: Sequence[Row], method: str) -> list[str]:
    """Explain the paper's numbers among these rows."""
    if all(row.kind == "ours" for row in rows):
        return ["The paper has no numbers for this table."]
    other = " They were selected by training-domain validation." if method != "training" else ""
    return [
        "Paper: as printed; ± is a standard deviation over three runs, or a standard error for the baselines that the "
        f"paper quotes from DomainBed (not the reproduced ones).{other} Difference: ours minus paper."
    ]


def paper_ablation(ours: Iterable[Table]) -> list[Table]:
    """Make the paper's table 2 if our tables have its ablations, but not on the data set of that table."""
    ours = list(ours)
    ablated = any(row.head in ABLATIONS for table in ours for row in table.rows)
    if not ablated or any(table.dataset == "VLCS" for table in ours):
        return []
    printed = paper()["ablation_vlcs"]
    rows = []
    for head, numbers in printed["rows"].items():
        cells: list[Cell | None] = [
            Cell(numbers[column]["mean"], numbers[column].get("std")) for column in printed["columns"]
        ]
        rows.append(Row(OUR_NAMES.get(head, head), cells, "paper"))
    note = (
        "Accuracy in percent, as printed; ± standard deviation over three runs. The paper has no ablation on other "
        "data sets."
    )
    return [Table("The paper's ablation (its table 2), on VLCS", printed["columns"], rows, [note], "VLCS")]
