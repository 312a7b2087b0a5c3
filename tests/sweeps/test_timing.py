"""Forecasts from finished runs, and the numbers of runs in the headers of the experiments."""

import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from aidgn.cli import app
from aidgn.sweeps.journal import Attempt, History
from aidgn.sweeps.plan import SweepPlan
from aidgn.sweeps.store import PlannedRun, RunStatus
from aidgn.sweeps.sweep import Sweep
from aidgn.sweeps.timing import Speeds, in_words

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_times_of_finished_runs(tmp_path: Path) -> None:
    items = [
        PlannedRun(str(n), "digits", algorithm, ["ink"], n, 0, 100, "")
        for n, algorithm in enumerate(["ERM"] * 4 + ["IRM"])
    ]
    here = socket.gethostname()
    measured = ((here, 0.1), (here, 0.3), (here, 0.2), ("another", 99.0))
    states = [
        RunStatus("done", History([Attempt("a", host=host, kind="done", step_seconds=seconds)]))
        for host, seconds in measured
    ] + [RunStatus("left", History())]
    assert Speeds(items, states).total(items[:1]) == pytest.approx(100 * 0.2)
    assert Speeds(items, states).total(items[4:]) == pytest.approx(100 * 0.2)  # by other algorithms on the same data
    assert Speeds(items, states).total([items[0]._replace(dataset="PACS")]) is None


def test_durations_in_words() -> None:
    assert [in_words(seconds) for seconds in (0, 45, 600, 12_000, 1e6)] == [
        "1 s",
        "45 s",
        "10 min",
        "3 h 20 min",
        "278 hours",
    ]


RUNS = {
    "table1": 15 * 4 * 4 * 20 * 3,
    "table2": 4 * 4 * 20 * 3,
    "adaptation": 2 * 4 * 4 * 20 * 3,
    "sensitivity": (1 + 4 + 4 + 4) * 4 * 3,
    "compare": 18 * 4,
    "frozen": 2 * 4 * 20 * 3,
}


@pytest.mark.parametrize("name", RUNS)
def test_headers_of_the_experiments_agree_with_the_dry_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AIDGN_DATA", raising=False)
    path = EXPERIMENTS / f"{name}.yaml"
    header = re.search(r"# (\d+) runs", path.read_text())
    shown = CliRunner().invoke(app, ["sweep", str(path), "--dry-run"], catch_exceptions=False).output
    runs = re.match(r"(\d+) runs", shown)
    assert header and runs and int(header[1]) == int(runs[1]) == RUNS[name]
    assert "unknown until the first run" in shown and not list(tmp_path.iterdir())  # a dry run leaves nothing behind


def test_every_experiment_is_known_here() -> None:
    assert {path.stem for path in EXPERIMENTS.glob("*.yaml")} == set(RUNS)


def test_leave_one_out_adds_each_pair_once() -> None:
    todo = Sweep.prepare([SweepPlan(("PACS",), ("ERM",), leave_one_out=True, trials=1)], "nowhere", dry_run=True)
    assert sorted(len(spec.target) for spec in todo.specs) == [1] * 4 + [2] * 6
    plan = SweepPlan(("PACS",), ("ERM",), targets=("S",), leave_one_out=True, trials=1)
    todo = Sweep.prepare([plan], "nowhere", dry_run=True)
    assert [spec.target for spec in todo.specs] == [
        ("sketch",),
        ("art_painting", "sketch"),
        ("cartoon", "sketch"),
        ("photo", "sketch"),
    ]
