"""Doubtful labels: the rule against a naive loop, and wrong labels that are put in."""

import csv
from pathlib import Path

import numpy as np
import pytest

from aidgn.analysis.label_errors import find_doubtful_labels, pool_out_of_site, suggest
from aidgn.analysis.predictions import Predictions
from aidgn.report.export import write_rows

SITES = ["north", "south", "west"]
CLASSES = ["cat", "dog", "bird", "fish"]


def naive(probabilities: np.ndarray, labels: np.ndarray) -> list[int]:
    """Follow Northcutt, Jiang & Chuang (2021), equation 1, one picture at a time."""
    count = probabilities.shape[1]
    thresholds = []
    for c in range(count):
        own = [probabilities[i, c] for i in range(len(labels)) if labels[i] == c]
        thresholds.append(sum(own) / len(own) if own else float("inf"))
    found = []
    for i, row in enumerate(probabilities):
        reached = [c for c in range(count) if row[c] >= thresholds[c]]
        found.append(max(reached, key=lambda c, row=row: row[c]) if reached else int(labels[i]))  # type: ignore[misc]
    return found


def test_suggestions_follow_the_paper() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(5, 0.4), size=300)
    labels = rng.integers(0, 4, size=300)  # nothing has label 4
    assert suggest(probabilities, labels).tolist() == naive(probabilities, labels)


def predictions(labels: np.ndarray, true: np.ndarray, trial: int) -> list[Predictions]:
    rng = np.random.default_rng(trial)
    sites = np.arange(len(labels)) % len(SITES)
    runs = []
    for number, site in enumerate(SITES):
        logits = rng.normal(size=(len(labels), len(CLASSES))) + 3 * np.eye(len(CLASSES))[true]
        runs.append(
            Predictions(
                files=[f"{SITES[s]}/{i}.png" for i, s in enumerate(sites)],
                labels=labels,
                domains=sites,
                unseen=sites == number,
                validation=np.zeros(len(labels), bool),
                logits=logits.astype(np.float32),
                scores=np.zeros((len(labels), 0)),
                score_names=[],
                class_names=CLASSES,
                domain_names=SITES,
                targets=[site],
                algorithm="ERM",
                trial=trial,
                model="",
            )
        )
    return runs


def test_wrong_labels_come_first() -> None:
    rng = np.random.default_rng(1)
    true = rng.integers(0, len(CLASSES), size=600)
    labels = true.copy()
    flipped = rng.permutation(600)[:20]
    labels[flipped] = (true[flipped] + 1) % len(CLASSES)
    found = find_doubtful_labels(pool_out_of_site([*predictions(labels, true, 0), *predictions(labels, true, 1)]))
    assert len(found) == len({doubt.file for doubt in found})  # one entry per picture, over trials
    wrong = {f"{SITES[i % 3]}/{i}.png": (CLASSES[labels[i]], CLASSES[true[i]]) for i in flipped}
    first = found[:20]
    assert sum(wrong.get(doubt.file) == (doubt.label, doubt.suggestion) for doubt in first) >= 18
    gaps = [doubt.label_probability - doubt.suggestion_probability for doubt in found]
    assert gaps == sorted(gaps) and gaps[-1] < 0
    assert all(doubt.file.startswith(doubt.site) for doubt in found)


def test_the_table_of_all_predictions(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    true = np.random.default_rng(1).integers(0, len(CLASSES), size=60)
    runs = [*predictions(true, true, 0), *predictions(true, true, 1)]
    pooled = pool_out_of_site(runs)
    write_rows(tmp_path / "all.csv", pooled.header, pooled.rows())
    write_rows(tmp_path / "all.parquet", pooled.header, pooled.rows())
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == ["file", "site", "label", "predicted", "confidence", *(f"p_{name}" for name in CLASSES)]
    assert len(rows) == len({row["file"] for row in rows}) == 60
    for row in rows:
        values = {name: float(row[f"p_{name}"]) for name in CLASSES}
        assert sum(values.values()) == pytest.approx(1, abs=1e-5)
        assert values[row["predicted"]] == max(values.values()) == float(row["confidence"])
        assert row["file"].startswith(row["site"])
        number = int(row["file"].split("/")[1][:-4])
        assert row["label"] == CLASSES[true[number]]
        logits = [run.logits[number] for run in runs if run.unseen[number]]
        assert len(logits) == 2  # one of each trial
    table = pyarrow.read_table(tmp_path / "all.parquet")
    assert table.column("file").to_pylist() == [row["file"] for row in rows]
    assert str(table.schema.field("label").type) == "string" and str(table.schema.field("confidence").type) == "double"
