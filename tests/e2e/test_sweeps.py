"""Sweeps as a person starts, interrupts, continues and watches them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aidgn.cli import app
from aidgn.errors import AidgnError
from aidgn.runs.reader import read_runs
from aidgn.selection import select
from aidgn.sweeps.plan import plan_runs
from aidgn.sweeps.sweep import stop_if_all_fail
from aidgn.training import train

SMALL = ["--steps", "4", "--eval-every", "2", "--batch-size", "4", "--workers", "1"]


def aidgn(*arguments: str, ok: bool = True) -> Result:
    """In this process, which has imported everything already; the workers are processes of their own."""
    result = CliRunner().invoke(app, list(arguments), standalone_mode=False)
    if ok and result.exception:
        raise result.exception
    assert ok or isinstance(result.exception, AidgnError), result.output
    return result


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def runs(folder: str = "runs") -> list[str]:
    return sorted(path.parent.name for path in Path(folder).glob("*/last.safetensors"))


def test_start_add_continue_and_look(tmp_path: Path) -> None:
    first = aidgn("sweep", "digits", "--algorithm", "ERM", "--target", "ink", "--trials", "1", *SMALL)
    assert "1 run: 1 data set, 1 algorithm, 1 draw, 1 trial. 0 finished, 1 to do." in first.output
    assert "unknown until the first run has finished" in first.output
    assert "1 of 1 run is finished. `aidgn table runs` shows it." in first.output
    assert aidgn("table", "runs").output in first.output
    (done,) = runs()
    before = (Path("runs") / done / "last.safetensors").stat().st_mtime_ns

    # A trial more and a draw more: only what is new is trained, and how long it takes is known now.
    text = Path("runs/sweep.yaml").read_text().replace("trials: 1", "trials: 2")
    Path("more.yaml").write_text(text)
    second = aidgn("sweep", "more.yaml", "--yes", "--workers", "1")
    assert "2 runs: 1 data set, 1 algorithm, 1 draw, 2 trials. 1 finished, 1 to do." in second.output
    assert "by its runs so far" in second.output and ": 2 runs." in Path("runs/sweep.yaml").read_text()
    assert len(runs()) == 2 and (Path("runs") / done / "last.safetensors").stat().st_mtime_ns == before

    # The folder knows its plan.
    again = aidgn("sweep", "runs/sweep.yaml")
    assert "2 finished, 0 to do" in again.output and "2 of 2 runs are finished" in again.output
    assert aidgn("sweep").output == aidgn("sweep", "--out", "runs").output
    status = aidgn("status", "runs").output
    assert "2 runs, 100% of the steps" in status and status.split("done")[1].split()[0] == "2"
    assert "time left" not in status


def test_hyper_parameter_is_set_for_algorithms_that_have_it() -> None:
    result = aidgn(
        "sweep",
        "digits",
        "--algorithm",
        "ERM",
        "--algorithm",
        "VREx",
        "--set",
        "vrex_lambda=3",
        "--set",
        "lr=0.01",
        "--dry-run",
    )
    assert "vrex_lambda is set for VREx alone: the others have no such hyper-parameter." in result.output
    assert "lr is set" not in result.output


def test_a_dry_run_refuses_what_the_sweep_would_refuse() -> None:
    Path("mine.safetensors").touch()
    for spec in plan_runs(
        ["digits"], ["ERM"], targets=["ink"], trials=1, steps=4, eval_every=2, hyper_parameters={"batch_size": 4}
    ):
        train(spec, "runs", device="cpu")
    command = ["sweep", "digits", "--algorithm", "ERM", "--target", "ink", "--trials", "1", *SMALL]
    for fine in ([], ["--weights", "on-another-disk.safetensors"]):
        assert "1 finished, 0 to do" in aidgn(*command, *fine, "--dry-run").output
    for changes in (["--eval-every", "1"], ["--weights", "mine.safetensors"]):
        real, dry = (aidgn(*command, *changes, *more, ok=False) for more in ([], ["--dry-run"]))
        assert "runs holds runs of another plan" in str(real.exception) and str(dry.exception) == str(real.exception)
        assert "1 run: 1 data set" in dry.output  # nevertheless


def test_broken_runs_are_retried_when_asked(tmp_path: Path) -> None:
    content = {
        "datasets": "digits",
        "algorithms": ["ERM", "CORAL"],
        "targets": ["ink"],
        "trials": 1,
        "steps": 4,
        "eval_every": 2,
        "hyper_parameters": {"batch_size": 4, "ERM": {"lr": 1e30}},
    }
    Path("plan.yaml").write_text(json.dumps(content))
    result = aidgn("sweep", "--plan", "plan.yaml", "--workers", "1", "--retries", "1", ok=False)
    assert "1 of 2 runs are finished" in result.output and result.output.count("tried again") == 1
    message = str(result.exception)
    assert "1 run failed and was set aside" in message
    assert "digits, ERM, ink unseen, trial 0, draw 0: The loss" in message
    assert "--retry-failed" in message and len(runs()) == 1

    result = aidgn("sweep", "--plan", "plan.yaml", "--retries", "1", ok=False)
    assert "1 finished, 1 set aside, 0 to do" in result.output  # nothing was started
    assert "2 attempts: The loss, a weight or a prediction became NaN" in aidgn("status", "runs").output

    result = aidgn("sweep", "--plan", "plan.yaml", "--workers", "1", "--retries", "0", "--retry-failed", ok=False)
    assert "1 finished, 1 set aside, 1 to do" in result.output
    assert "3 attempts" in aidgn("status", "runs").output


def test_leave_one_out_selection_has_all_it_needs(tmp_path: Path) -> None:
    for spec in plan_runs(
        ["digits"],
        ["ERM"],
        targets=["ink"],
        leave_one_out=True,
        trials=1,
        steps=4,
        eval_every=2,
        hyper_parameters={"batch_size": 4},
    ):
        train(spec, "runs", device="cpu")  # here, as that starts no process
    result = aidgn(
        "sweep", "digits", "--algorithm", "ERM", "--target", "ink", "--leave-one-out", "--trials", "1", *SMALL
    )
    assert "4 runs: 1 data set" in result.output and "3 of them with two unseen domains. 4 finished" in result.output
    (row,) = (row for row in select(read_runs("runs"), "leave-one-out") if row["target_name"] == "ink")
    assert 0 <= row["accuracy"] <= 1


def test_a_sweep_of_sensitivity_ends_with_its_figure(tmp_path: Path) -> None:
    grid = {"batch_size": 4, "kappa": [5, 40], "mu_star": [5]}
    for spec in plan_runs(
        ["digits"], ["AIDGN"], targets=["ink"], trials=1, steps=2, eval_every=1, hyper_parameters=grid
    ):
        train(spec, "search", device="cpu")
    Path("plan.yaml").write_text(
        json.dumps(
            {
                "datasets": "digits",
                "algorithms": ["AIDGN"],
                "targets": ["ink"],
                "trials": 1,
                "steps": 2,
                "eval_every": 1,
                "hyper_parameters": grid,
                "out": "search",
            }
        )
    )
    result = aidgn("sweep", "plan.yaml", "--workers", "1")
    assert "4 finished, 0 to do" in result.output and "search/sensitivity.png" in result.output
    assert Path("search/sensitivity.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path("search/sensitivity.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "runs has no sweep.yaml"),
        (["digits"], "--algorithm"),
        (["digits", "--algorithm", "ERN"], "Did you mean ERM"),
        (["digits", "--algorithm", "ERM", "--retries", "-1"], "retries is -1"),
        (["digits", "--algorithm", "ERM", "--trials", "0"], "trials is 0"),
        (["digits", "--algorithm", "ERM", "--workers", "0"], "workers is 0"),
        (["digits", "--algorithm", "ERM", "--weights", "none.safetensors"], "none.safetensors"),
        (["one.yaml", "two.yaml"], "one plan"),
        (["one.yaml"], "one.yaml cannot be read"),
        (["PACS", "--algorithm", "ERM"], "not on this disk"),
        (["digits", "--algorithm", "ERM", "--launcher", "slurm"], "needs sbatch"),
        (["digits", "--algorithm", "ERM", "--launcher", "ray"], "pip install 'aidgn[ray]'"),
    ],
)
def test_mistakes_are_said_before_anything_is_written(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIDGN_DATA", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert words in str(aidgn("sweep", *arguments, ok=False).exception)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    Path("runs").write_text("a file")
    result = aidgn("sweep", "digits", "--algorithm", "ERM", *SMALL, ok=False)
    assert "runs" in str(result.exception) and "could not be written" in str(result.exception)


def test_sweep_stops_if_the_first_runs_fail_alike() -> None:
    seen: list[int] = []
    on_event = stop_if_all_fail(lambda number, kind, what: seen.append(number))
    for number in range(4):
        on_event(number, "failed", "Traceback ...\nno network")
    with pytest.raises(AidgnError, match=r"first 5 runs failed.*no network"):
        on_event(4, "failed", "Traceback of another line ...\nno network")
    assert seen == [0, 1, 2, 3, 4]
    on_event = stop_if_all_fail(lambda *_: None)
    on_event(0, "done", "folder")
    for number in range(9):
        on_event(number, "failed", "no luck")


@pytest.mark.slow
def test_the_command_is_killed_and_watched_from_another_process(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "aidgn",
        "sweep",
        "digits",
        "--algorithm",
        "ERM",
        "--trials",
        "1",
        "--steps",
        "400",
        "--eval-every",
        "20",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    while len(list(Path("runs").glob("*/results.jsonl"))) < 2:
        time.sleep(0.1)
        assert process.poll() is None
    watch = subprocess.Popen(
        [sys.executable, "-m", "aidgn", "status", "runs", "--watch", "--every", "1"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert watch.stdout and any("2 running" in line for line in watch.stdout)
        assert "2 on " in aidgn("status", "runs").output
        process.kill()
        process.communicate(timeout=300)
        assert "no process is at work" in aidgn("status", "runs").output
        assert any("no process is at work" in line for line in watch.stdout)
        subprocess.run(command, check=True)
        assert len(runs()) == 4
        said, _ = watch.communicate(timeout=300)
        assert "4 done, 0 running, 0 failed, 0 left" in said.splitlines()[-1]
    finally:
        process.kill()
        watch.kill()
