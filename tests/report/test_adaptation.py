"""Tables of adaptation from run folders written by hand: cells, the paper's numbers, holes, which runs count."""

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aidgn.errors import AidgnError, UnknownNameError
from aidgn.report.adaptation import adaptation_tables, choose_runs, keep_comparable, load_adaptation, write_lines
from aidgn.report.paper import paper, paper_ablation
from aidgn.report.table import tables
from aidgn.report.table_formats import FORMATS, Table
from aidgn.runs.reader import read_runs

PACS = ["art_painting", "cartoon", "photo", "sketch"]
TARGETS = range(4)


def write_run(
    root: Path,
    algorithm: str,
    target: int,
    trial: int,
    accuracies: dict[str, float] | None,
    *,
    dataset: str = "PACS",
    domains: list[str] = PACS,
    draw: int = 0,
    validation: float = 0.9,
    steps: int = 10,
    model: bool = True,
    **hparams: Any,
) -> Path:
    """A run folder whose records end at step 10, adapted with these accuracies by method."""
    folder = root / f"{dataset}-{algorithm}-{domains[target]}-{trial}-{draw}-{len(list(root.glob('*')))}"
    folder.mkdir(parents=True)
    args = {
        "dataset": dataset,
        "algorithm": algorithm,
        "test_envs": [target],
        "trial_seed": trial,
        "hparams_seed": draw,
        "domains": domains,
        "steps": steps,
    }
    record = {"step": 10, "args": args, "hparams": {"lr": 0.1, **hparams}} | {
        f"env{i}_{split}_acc": (accuracies or {}).get("none", 0.5) if i == target else validation
        for i in range(len(domains))
        for split in ("in", "out")
    }
    (folder / "results.jsonl").write_text(json.dumps(record) + "\n")
    identity = {
        "dataset": dataset,
        "algorithm": algorithm,
        "target": [domains[target]],
        "trial": trial,
        "draw": draw,
        "hyper_parameters": record["hparams"],
        "steps": steps,
    }
    (folder / "run.json").write_text(json.dumps({"identity": identity, "steps": steps, "domains": domains}))
    if model:
        (folder / "model.safetensors").write_bytes(b"x")
    if accuracies:
        lines = []
        for method, value in accuracies.items():
            front = {
                "dataset": dataset,
                "algorithm": algorithm,
                "target": [domains[target]],
                "trial": trial,
                "draw": draw,
                "method": method,
            }
            settings = [{}] if method == "none" else [{"filter_k": 1}, {"filter_k": "all"}]
            for i, setting in enumerate(settings):
                lines.append(
                    {
                        **front,
                        "settings": setting,
                        "source_accuracy": 0.9 - 0.1 * i,
                        "target_accuracy": min(value + 0.05 * i, 1.0),
                        "selected": i == 0,
                        "model": hashlib.sha256(b"x").hexdigest(),
                    }
                )
        (folder / "adaptation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def texts(table: Table) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in table.rows:
        found.setdefault(row.head, [str(table.cell_text(row, cell)) for cell in row.cells])
    return found


def test_mean_and_spread_over_trials(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(0.4, 0.9, (2, 3, 4, 3))  # algorithms, methods, targets, trials
    methods = ["none", "Tent-C", "T3A"]
    for a, algorithm in enumerate(("AIDGN", "ERM")):
        for target in TARGETS:
            for trial in range(3):
                write_run(
                    tmp_path, algorithm, target, trial, dict(zip(methods, values[a, :, target, trial], strict=True))
                )
    lines, notes = load_adaptation([tmp_path])
    assert not notes and len(lines) == 2 * 4 * 3 * 5
    (table,) = adaptation_tables(lines)
    assert table.columns == ["A", "C", "P", "S", "Avg"]
    assert [row.head for row in table.rows] == [
        "ERM",
        "ERM + T3A",
        "ERM + Tent-C",
        "AIDGN",
        "AIDGN + T3A",
        "AIDGN + Tent-C",
    ]
    for a, algorithm in enumerate(("AIDGN", "ERM")):
        for m, method in enumerate(methods):
            head = algorithm if method == "none" else f"{algorithm} + {method}"
            means, deviations = 100 * values[a, m].mean(1), 100 * values[a, m].std(1, ddof=1)
            average = 100 * values[a, m].mean(0)
            wanted = [f"{x:.1f} ± {s:.1f}" for x, s in zip(means, deviations, strict=True)]
            assert texts(table)[head] == [*wanted, f"{average.mean():.1f} ± {average.std(ddof=1):.1f}"]
    assert "mean over 3 trials" in table.footnotes[0] and any(
        "labels select nothing" in note for note in table.footnotes
    )
    for format_table in FORMATS.values():
        assert "T3A" in format_table(table)
    with pytest.raises(UnknownNameError, match="std"):
        adaptation_tables(lines, "std")


def test_the_papers_numbers_beside_ours(tmp_path: Path) -> None:
    printed = paper()["tta_PACS"]["rows"]
    for target, letter in zip(TARGETS, "ACPS", strict=True):
        for algorithm in ("AIDGN", "ERM"):
            t3a = printed["+ T3A"][letter]["mean"] / 100 - 0.01
            write_run(tmp_path, algorithm, target, 0, {"none": 0.9, "T3A": t3a, "Tent-BN": 0.8, "Tent": 0.7})
    (table,) = adaptation_tables(load_adaptation([tmp_path])[0], paper=True)
    heads = [row.head for row in table.rows]
    assert heads == [
        "ERM",
        "paper",
        "difference",
        "paper, reproduced",
        "difference",
        "ERM + T3A",
        "ERM + Tent-BN",
        "ERM + Tent",
        "AIDGN",
        "paper",
        "difference",
        "AIDGN + T3A",
        "paper",
        "difference",
        "AIDGN + Tent-BN",
        "paper",
        "difference",
        "AIDGN + Tent",
    ]
    at = heads.index("AIDGN + T3A")
    assert [str(table.cell_text(table.rows[at + 1], cell)) for cell in table.rows[at + 1].cells] == [
        "87.9 ± 0.5",
        "82.1 ± 0.2",
        "97.6 ± 0.1",
        "78.7 ± 0.9",
        "86.6",
    ]
    assert [str(table.cell_text(table.rows[at + 2], cell)) for cell in table.rows[at + 2].cells][:4] == ["-1.0"] * 4
    assert [cell and cell.mean for cell in table.rows[at + 4].cells] == [86.5, 81.0, 97.6, 78.0, 85.8]


def test_over_data_sets_as_the_papers_figure_3(tmp_path: Path) -> None:
    for dataset in ("PACS", "VLCS", "OfficeHome", "TerraIncognita"):
        for target in TARGETS:
            from aidgn.data.registry import DATASETS

            write_run(
                tmp_path,
                "AIDGN",
                target,
                0,
                {"none": 0.7, "Tent-C": 0.6},
                dataset=dataset,
                domains=list(DATASETS[dataset].domains),
            )
    *_, table = adaptation_tables(load_adaptation([tmp_path])[0], paper=True)
    assert table.columns == ["PACS", "VLCS", "OfficeHome", "TerraIncognita", "Avg"]
    theirs = table.rows[[row.head for row in table.rows].index("AIDGN + Tent-C") + 1]
    assert [cell and round(cell.mean, 6) for cell in theirs.cells] == [
        84.0,
        74.5,
        68.2,
        49.5,
        round((84.0 + 74.5 + 68.2 + 49.5) / 4, 6),
    ]


def test_holes_are_told_and_marked(tmp_path: Path) -> None:
    for trial in (0, 1):
        for target in TARGETS:
            if (target, trial) != (3, 1):
                write_run(tmp_path, "ERM", target, trial, {"none": 0.5, "T3A": 0.6})
    write_run(tmp_path, "AIDGN", 0, 0, {"none": 0.8})
    write_run(tmp_path, "AIDGN", 1, 0, None)  # trained, not adapted
    write_run(tmp_path, "AIDGN", 2, 0, {"none": 0.8}, steps=20)  # not finished
    write_run(tmp_path, "AIDGN", 3, 0, None, model=False)
    lines, notes = load_adaptation([tmp_path])
    text = "\n".join(notes)
    assert "Unfinished runs left out: 1." in text and "1 runs have records but no model" in text
    assert "lacks 6 finished runs" in text and "AIDGN, art_painting, trial 1; AIDGN, cartoon" in text
    assert "Not adapted yet: 1 runs" in text
    (table,) = adaptation_tables(lines, notes=notes)
    assert texts(table) == {
        "ERM": [*["50.0 ± 0.0 (2)"] * 3, "50.0 (1)", "50.0 (1)"],
        "ERM + T3A": [*["60.0 ± 0.0 (2)"] * 3, "60.0 (1)", "60.0 (1)"],
        "AIDGN": ["80.0 (1)", "X", "X", "X", "X"],
    }
    assert "X: no result" in table.footnotes[0] and table.footnotes[-len(notes) :] == notes
    compared = keep_comparable(lines)  # what all three rows have
    assert {(line["target"][0], line["trial"]) for line in compared} == {("art_painting", 0)} and len(compared) == 3
    assert keep_comparable([line for line in lines if line["method"] == "none" and line["algorithm"] == "ERM"]) == []


def test_of_several_draws_the_one_that_validation_chooses(tmp_path: Path) -> None:
    write_run(tmp_path, "ERM", 0, 0, {"none": 0.9, "T3A": 0.9}, draw=0, validation=0.7)
    best = write_run(tmp_path, "ERM", 0, 0, {"none": 0.5, "T3A": 0.6}, draw=1, validation=0.8, lr=0.2)
    write_run(tmp_path, "ERM", 0, 0, {"none": 0.1}, draw=2, validation=0.6, lr=0.3)
    assert choose_runs([tmp_path])[0] == [best]
    (table,) = adaptation_tables(load_adaptation([tmp_path])[0])
    assert texts(table)["ERM + T3A"][0] == "60.0"
    given = sorted(tmp_path.glob("*"))[0]
    assert choose_runs([given]) == ([given], [])  # a run is taken as it is
    with pytest.raises(AidgnError, match=r"-0-0-0 and .*-0-1-1"):
        choose_runs(sorted(tmp_path.glob("*")))


def test_what_was_measured_is_shown_without_the_model(tmp_path: Path) -> None:
    write_run(tmp_path, "ERM", 0, 0, {"none": 0.5, "T3A": 0.6}, model=False)
    (table,) = adaptation_tables(load_adaptation([tmp_path])[0])
    assert texts(table)["ERM + T3A"][0] == "60.0"


def test_what_other_weights_gave_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, "ERM", 0, 0, {"none": 0.5, "T3A": 0.6})
    trained_anew = write_run(tmp_path, "ERM", 1, 0, {"none": 0.7, "T3A": 0.8})
    (trained_anew / "model.safetensors").write_bytes(b"y")
    lines, notes = load_adaptation([tmp_path])
    assert {line["target"][0] for line in lines} == {"art_painting"}
    assert f"Not adapted yet: 1 runs ({trained_anew})" in notes[-1]


def test_nothing_to_show(tmp_path: Path) -> None:
    run = write_run(tmp_path, "ERM", 0, 0, None)
    with pytest.raises(AidgnError, match="aidgn adapt "):
        load_adaptation([tmp_path])
    for text in ("{", '{"method": "T3A"}', '{"dataset": 3}'):
        (run / "adaptation.jsonl").write_text(text + "\n")
        with pytest.raises(AidgnError, match=r"adaptation\.jsonl cannot be read .* Remove it"):
            load_adaptation([tmp_path])
    (run / "model.safetensors").unlink()
    with pytest.raises(AidgnError, match="no model"):
        choose_runs([tmp_path])


def test_all_lines_in_a_file(tmp_path: Path) -> None:
    write_run(tmp_path, "ERM", 0, 0, {"none": 0.5, "T3A": 0.6})
    lines, _ = load_adaptation([tmp_path])
    write_lines(lines, tmp_path / "all.csv")
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["target"] for row in rows} == {"art_painting"}
    assert [(row["method"], row["settings.filter_k"], row["selected"]) for row in rows] == [
        ("none", "", "True"),
        ("T3A", "1", "True"),
        ("T3A", "all", "False"),
    ]
    parquet = pytest.importorskip("pyarrow.parquet")
    write_lines(lines, tmp_path / "all.parquet")
    assert [row["target_accuracy"] for row in parquet.read_table(tmp_path / "all.parquet").to_pylist()] == [
        line["target_accuracy"] for line in lines
    ]


# Ablations and notes of the other tables ------------------------------------------------------------------------------

ABLATION = {"AIDGN": 0.98, "AIDGN-noR": 0.97, "AIDGN-noD": 0.96, "AIDGN-noRD": 0.95}


def test_the_papers_table_2_beside_ours(tmp_path: Path) -> None:
    from aidgn.data.registry import DATASETS

    for algorithm, accuracy in ABLATION.items():
        for target in TARGETS:
            write_run(tmp_path / "pacs", algorithm, target, 0, {"none": accuracy})
            write_run(
                tmp_path / "vlcs",
                algorithm,
                target,
                0,
                {"none": accuracy},
                dataset="VLCS",
                domains=list(DATASETS["VLCS"].domains),
            )
    (vlcs,) = tables(read_runs(tmp_path / "vlcs"), paper=True)
    assert [row.head for row in vlcs.rows] == [
        name
        for algorithm in ("AIDGN", "AIDGN-noRD", "AIDGN-noR", "AIDGN-noD")
        for name in (algorithm, "paper", "difference")
    ]
    assert [cell and cell.mean for cell in vlcs.rows[4].cells] == [96.9, 63.5, 73.0, 75.8, 77.3]
    assert paper_ablation([vlcs]) == []
    (pacs,) = tables(read_runs(tmp_path / "pacs"), paper=True)
    (theirs,) = paper_ablation([pacs])
    assert theirs.title == "The paper's ablation (its table 2), on VLCS"
    assert texts(theirs)["AIDGN-noRD"] == ["96.9 ± 0.3", "63.5 ± 0.5", "73.0 ± 0.5", "75.8 ± 0.6", "77.3"]
    assert paper_ablation(tables(read_runs(next((tmp_path / "pacs").glob("PACS-AIDGN-art*"))), paper=True)) == []


def test_hyper_parameters_set_by_hand_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path, "ERM", 0, 0, None)
    write_run(tmp_path, "ERM", 0, 1, None, draw=1, lr=0.7)  # draws differ from trial to trial
    write_run(tmp_path, "ERM", 0, 2, None, draw=1, lr=0.8)
    assert not any("hyper-parameter" in note for note in tables(read_runs(tmp_path))[0].footnotes)
    write_run(tmp_path, "ERM", 0, 1, None, lr=3.0)
    write_run(tmp_path, "ERM", 0, 2, None, lr=20.0)
    (table,) = tables(read_runs(tmp_path))
    (note,) = [note for note in table.footnotes if "hyper-parameter" in note]
    assert "ERM on PACS" in note and "lr" in note
    assert note.endswith("0.1 (1 run: trial 0); 3 (1 run: trial 1); 20 (1 run: trial 2).")


def test_mixed_settings_of_adapted_runs_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path, "ERM", 0, 0, {"none": 0.5})
    write_run(tmp_path, "ERM", 0, 1, {"none": 0.5}, steps=5)
    _, notes = load_adaptation([tmp_path])
    assert [note for note in notes if "differ in steps: 5 (1 run: trial 1); 10 (1 run: trial 0)." in note]
    lines = tmp_path / "PACS-ERM-art_painting-0-0-0" / "adaptation.jsonl"
    lines.write_text(lines.read_text().replace("0.9", "1.9"))
    with pytest.raises(AidgnError, match=r"adaptation\.jsonl cannot be read \(.*source_accuracy"):
        load_adaptation([tmp_path])


def test_missing_cells_are_explained_with_one_trial_too(tmp_path: Path) -> None:
    write_run(tmp_path, "ERM", 0, 0, None)
    (table,) = tables(read_runs(tmp_path))
    assert texts(table)["ERM"][1] == "X" and "one trial" in table.footnotes[0] and "X: no result" in table.footnotes[0]
    for target in (1, 2, 3):
        write_run(tmp_path, "ERM", target, 0, None)
    assert "X:" not in tables(read_runs(tmp_path))[0].footnotes[0]
