"""Accuracies per class on the report page, against means worked out by hand."""

from aidgn.report.page_results import average_classes


def row(algorithm: str, classes: list[float | None], dataset: str = "photos") -> dict:
    return {"dataset": dataset, "algorithm": algorithm, "accuracy": 0.5, "class_accuracies": classes}


def test_classes_average_over_runs_with_images() -> None:
    rows = [row("ERM", [0.5, None, None]), row("ERM", [1.0, 0.25, None]), row("AIDGN", [0.0, 1.0, 0.5])]
    rows += [{"dataset": "photos", "algorithm": "ERM", "accuracy": 0.1}]  # of an earlier version
    (table,) = average_classes(rows, {"photos": ["cat", "dog", "cow"]})
    assert (table.dataset, table.columns) == ("photos", ["ERM", "AIDGN"])
    found = {row.head: list(map(str, cells)) for row, cells in table.body()}
    assert found == {"cat": ["75.0", "0.0"], "dog": ["25.0", "100.0"], "cow": ["", "50.0"]}


def test_runs_on_other_classes_do_not_compare() -> None:
    assert average_classes([row("ERM", [0.5]), row("AIDGN", [0.5, 0.5])], {}) == []
    assert [line.head for line in average_classes([row("ERM", [0.5])], {})[0].rows] == ["0"]
