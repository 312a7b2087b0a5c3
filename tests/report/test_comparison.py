"""The comparison as tables, files and a figure."""

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from aidgn.analysis.comparison import compare
from aidgn.analysis.ranks import Ranks
from aidgn.cli import app
from aidgn.errors import UnknownNameError
from aidgn.report.comparison import comparison_tables
from aidgn.report.export import write_tidy
from aidgn.report.rank_figure import critical_difference, draw_ranks, to_svg
from aidgn.report.table_formats import FORMATS
from aidgn.runs.reader import read_runs

RANDOM = np.random.default_rng(1)
LEVELS = {"ERM": 0.7, "CORAL": 0.71, "AIDGN": 0.9}


def grid(dataset: str, algorithm: str, accuracies: list[list[float]]) -> list[dict[str, Any]]:
    """Records of targets x trials."""
    return [
        {
            "args": {
                "dataset": dataset,
                "algorithm": algorithm,
                "test_envs": [target],
                "trial_seed": trial,
                "hparams_seed": 0,
            },
            "hparams": {},
            "step": 0,
            **{f"env{i}_out_acc": 0.5 for i in range(4)},
            f"env{target}_in_acc": accuracy,
        }
        for target, of_trials in enumerate(accuracies)
        for trial, accuracy in enumerate(of_trials)
    ]


def records(trials: int = 3) -> list[dict[str, Any]]:
    return [
        record
        for name, level in LEVELS.items()
        for record in grid("PACS", name, (level + RANDOM.normal(0, 0.01, (4, trials))).tolist())
    ]


def written(folder: Path, lines: list[dict[str, Any]]) -> str:
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_tables_show_what_was_compared() -> None:
    lines = records()
    differences, ranks = comparison_tables(lines)
    (found,) = compare(lines)
    assert differences.columns == ["A", "C", "P", "S", "Mean", "95 % interval", "W/T/L", "p (Holm)", "Result"]
    assert [row.head for row in differences.rows] == [f"{d.first} vs {d.second}" for d in found.differences]
    assert [str(text) for text in differences.texts[0]][4:] == [
        f"{found.differences[0].mean:+.1f}",
        f"{found.differences[0].low:+.1f} to {found.differences[0].high:+.1f}",
        "12/0/0",
        f"{found.differences[0].p_holm:.3f}",
        "AIDGN is better",
    ]
    assert ranks.rows[0].head == "AIDGN"
    for format_table in FORMATS.values():
        assert "AIDGN is better" in format_table(differences)


def test_two_trials_have_no_test() -> None:
    (table,) = comparison_tables(records(trials=2))
    assert {str(texts[-1]) for texts in table.texts} == {"too few trials (2)"}
    assert all(str(texts[5]) == "" for texts in table.texts)
    assert any("no result" in note for note in table.footnotes)


def test_unequal_budgets_are_marked_in_tables_and_figure() -> None:
    lines = records()
    assert not any("nequal budgets" in note for table in comparison_tables(lines) for note in table.footnotes)
    second = [{**line, "args": {**line["args"], "hparams_seed": 1}} for line in lines]
    lines += [line for line in second if line["args"]["algorithm"] == "AIDGN"]
    for table in comparison_tables(lines):
        assert any("nequal budgets" in note for note in table.footnotes), table.title
    (found,) = compare(lines)
    assert found.ranks and found.ranks.draws == {"AIDGN": 2, "ERM": 1, "CORAL": 1}
    figure = draw_ranks(found)
    assert figure and any("unequal budgets" in text.get_text() for text in figure.axes[0].texts)


def test_too_few_pairs_are_named() -> None:
    lines = [record for record in records() if record["args"]["test_envs"] == [0]]
    table = comparison_tables(lines)[0]
    assert any("cannot fall below" in note for note in table.footnotes)


def test_command_writes_files(tmp_path: Path) -> None:
    folder, out = written(tmp_path, records()), tmp_path / "out"
    out.mkdir()
    options = ["--json", str(out / "c.json"), "--csv", str(out / "c.csv"), "--figures", str(out)]
    options += ["--tidy", str(out / "tidy.csv"), "--algorithm", "ERM", "--algorithm", "AIDGN"]
    result = CliRunner().invoke(app, ["table", folder, "--compare", "--markdown", *options])
    assert result.exit_code == 0, result.output
    assert "CORAL" not in result.output and "AIDGN vs ERM" in result.output
    (saved,) = json.loads((out / "c.json").read_text())
    (line,) = csv.DictReader((out / "c.csv").open())
    assert saved["differences"][0]["mean"] == pytest.approx(float(line["mean"]))
    assert (out / "ranks-PACS.png").stat().st_size > 1000 and (out / "ranks-PACS.svg").exists()
    tidy = list(csv.DictReader((out / "tidy.csv").open()))
    assert len(tidy) == 2 * 12 and {row["metric"] for row in tidy} == {"accuracy"}
    refused = CliRunner().invoke(app, ["table", folder, "--algorithm", "AIDNG"])
    assert isinstance(refused.exception, UnknownNameError)


def test_tidy_marks_selected_draws(tmp_path: Path) -> None:
    first = grid("PACS", "ERM", [[0.5]])
    second = [{**record, "args": {**record["args"], "hparams_seed": 1}, "env1_out_acc": 0.9} for record in first]
    assert write_tidy(first + second, "training", tmp_path / "t.csv") == 2
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert {(row["draw"], row["selected"]) for row in rows} == {("0", "False"), ("1", "True")}


def test_tidy_tells_apart_runs_of_one_draw(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        (tmp_path / str(lr)).mkdir()
        written(tmp_path / str(lr), [{**record, "hparams": {"lr": lr}} for record in grid("PACS", "ERM", [[0.5]])])
    assert write_tidy(read_runs(tmp_path), "training", tmp_path / "t.csv") == 2
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert {row["run"] for row in rows} == {str(tmp_path / "0.1"), str(tmp_path / "0.2")}


def test_figure_shows_every_algorithm() -> None:
    names = {f"algorithm {i}": 1.0 + i for i in range(7)}
    figure = critical_difference(Ranks(names, 12, 0.001, 2.2), "title")
    assert isinstance(figure, Figure)
    shown = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert all(name in shown for name in names) and "2.20" in shown
    svg = to_svg(figure, "one")
    ids = [element.get("id") for element in ET.fromstring(svg).iter() if element.get("id")]
    assert all(str(name).startswith("one-") for name in ids) and "#000000" not in svg
