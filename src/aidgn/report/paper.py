"""The paper's numbers, to set beside ours."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from aidgn.report.table_formats import Cell, Row, Table

# Rows of the paper's tables to set beside an algorithm of ours, where they are not of the same name.
PAPER_ROWS = {
    "ERM": ["ERM", "ERM (reproduced)"],
    "AIDGN-noRD": ["AIDGN w/o RD"],
    "AIDGN-noR": ["AIDGN w/o R"],
    "AIDGN-noD": ["AIDGN w/o D"],
}
ABLATIONS = ("AIDGN-noRD", "AIDGN-noR", "AIDGN-noD")


@cache
def paper() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


def paper_order() -> list[str]:
    """Our names of the paper's algorithms: its main table first, then the ablation."""
    ours = {row: name for name, rows in PAPER_ROWS.items() for row in rows}
    printed = [*paper()["benchmark"]["rows"], *paper()["ablation_vlcs"]["rows"]]
    return list(dict.fromkeys(ours.get(row, row) for row in printed))


def dataset_order() -> list[str]:
    return [name for name in paper()["benchmark"]["columns"] if name != "Avg"]


def paper_rows(algorithm: str, table: str, columns: Sequence[str], ours: Sequence[Cell | None]) -> list[Row]:
    """The paper's numbers for an algorithm, and ours minus the paper's. `table` is a data set or "benchmark"; the
    algorithm may be an adapted one, "AIDGN + T3A"."""
    algorithm, adapted, method = algorithm.partition(" + ")
    if adapted:
        names, printed = [f"+ {method}"] if algorithm == "AIDGN" else [], _adapted(table)
    else:
        names, printed = PAPER_ROWS.get(algorithm, [algorithm]), {**paper().get(table, {}).get("rows", {})}
    if table == "VLCS":
        printed = paper()["ablation_vlcs"]["rows"] | printed
    # The paper's average over its four data sets is of no use beside one over others.
    comparable = table != "benchmark" or list(columns) == dataset_order()
    rows = []
    for name in [name for name in names if name in printed]:
        numbers = [printed[name].get(column) for column in columns] + [printed[name]["Avg"] if comparable else None]
        theirs = [Cell(number["mean"], number.get("std")) if number else None for number in numbers]
        differences = [
            Cell(our.mean - their.mean) if our and their else None for our, their in zip(ours, theirs, strict=True)
        ]
        also = ", reproduced" if name.endswith("(reproduced)") else ""
        rows += [Row(f"paper{also}", theirs, "paper"), Row("difference", differences, "difference")]
    return rows


def _adapted(table: str) -> dict[str, Any]:
    """AIDGN under adaptation, per target; over data sets, the averages of these tables, as the paper's figure 3."""
    if table != "benchmark":
        return paper().get(f"tta_{table}", {}).get("rows", {})
    datasets = dataset_order()
    rows: dict[str, Any] = {}
    for name in paper()[f"tta_{datasets[0]}"]["rows"]:
        averages = {dataset: paper()[f"tta_{dataset}"]["rows"][name]["Avg"] for dataset in datasets}
        rows[name] = averages | {"Avg": {"mean": sum(each["mean"] for each in averages.values()) / len(datasets)}}
    return rows


def paper_notes(rows: Sequence[Row], method: str) -> list[str]:
    if all(row.kind == "ours" for row in rows):
        return ["The paper has no numbers for this table."]
    other = " They were selected by training-domain validation." if method != "training" else ""
    return [
        "Paper: as printed there; ± is a standard deviation over three runs by its account, a standard error for "
        f"the baselines it quotes from DomainBed (not those reproduced).{other} Difference: ours minus paper."
    ]


def paper_ablation(ours: Iterable[Table]) -> list[Table]:
    """The paper's table 2, where our tables have its ablations, but not on the data set that it made them on."""
    ours = list(ours)
    ablated = any(row.head in ABLATIONS for table in ours for row in table.rows)
    if not ablated or any(table.title.startswith("VLCS,") for table in ours):
        return []
    printed = paper()["ablation_vlcs"]
    names = {row: name for name, rows in PAPER_ROWS.items() for row in rows}
    rows = [
        Row(
            names.get(name, name),
            [Cell(row[column]["mean"], row[column].get("std")) for column in printed["columns"]],
            "paper",
        )
        for name, row in printed["rows"].items()
    ]
    return [
        Table(
            "The paper's ablation (its table 2), on VLCS",
            printed["columns"],
            rows,
            [
                "Accuracy in percent, as printed there; ± standard deviation over three runs. The paper has no "
                "ablation on other data sets."
            ],
        )
    ]
