"""The published results equal those of the records in the same folder."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from aidgn.report.comparison import comparison_tables
from aidgn.report.table import keep_algorithms
from aidgn.report.table_formats import to_markdown
from aidgn.runs.reader import read_runs

ROOT = Path(__file__).parents[2]
RUNS, REPEATED = "docs/results/pacs-resnet50-he2015.zip", "docs/results/pacs-repeated.zip"
RECIPE = "docs/results/pacs-paper-recipe.zip"
FROZEN = [
    "docs/results/pacs-frozen-lite0.zip",
    "docs/results/pacs-frozen-lite2.zip",
    "docs/results/pacs-frozen-resnet50.zip",
]


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "aidgn", "table", RUNS, "--paper", "--markdown"],
        ["-m", "aidgn", "table", RUNS, "--adaptation", "--paper", "--markdown"],
        ["-m", "aidgn", "table", RECIPE, "--markdown"],
        ["benchmarks/steps.py", RUNS, REPEATED],
        *(["-m", "aidgn", "table", file, "--markdown"] for file in FROZEN),
    ],
    ids=["accuracy", "adaptation", "recipe", "steps", "frozen-lite0", "frozen-lite2", "frozen-resnet50"],
)
def test_tables_are_what_their_commands_print(command: list[str]) -> None:
    page = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    printed = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
        check=True,
        capture_output=True,
        encoding="utf-8",
    ).stdout
    table = printed[printed.index("| Algorithm") :].split("\n\n")[0].strip()
    assert len(table.splitlines()) >= 3
    assert table in page


@pytest.mark.parametrize("name", ["pacs-resnet50", "pacs-lite0", "digits"])
def test_promises_are_those_of_the_experiment(name: str) -> None:
    rows = json.loads((ROOT / f"docs/results/new-site-{name}.json").read_text())
    table = runpy.run_path(str(ROOT / "experiments/new_site.py"))["table_of"](rows)
    assert len(rows) == 4 and table in (ROOT / "docs/results/README.md").read_text(encoding="utf-8")


def test_comparison_is_what_its_command_prints() -> None:
    page = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    names = ("AIDGN", "AIDGN+SMA", "ERM", "ERM+SMA", "EQRM")
    printed = "\n\n".join(
        to_markdown(table) for table in comparison_tables(keep_algorithms(read_runs(ROOT / RUNS), names))
    )
    for table in ("| Comparison", "| Algorithm"):
        text = printed[printed.index(table) :].split("\n\n")[0].strip()
        assert len(text.splitlines()) > 6 and text in page
