"""What trackers wrote, read back by their own readers and held against results.jsonl, also after kill and resume."""

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from aidgn.cli import app
from aidgn.errors import AidgnError, UnknownNameError
from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, trackers, train

NAMES = ["tensorboard", "wandb", "mlflow"]
SPEC = RunSpec("digits", "ERM", "ink", steps=12, eval_every=2, hyper_parameters={"batch_size": 4})
KILLED = """
import os, signal, sys, time
from aidgn.training import RunSpec, train

def report(what, done, total, record):
    if what == "train" and done == 9:
        time.sleep(2)  # the trackers have told all records up to step 8 by now, as well as they can
        os.kill(os.getpid(), signal.SIGKILL)

train(RunSpec("digits", "ERM", "ink", steps=12, eval_every=2, hyper_parameters={"batch_size": 4}), sys.argv[1],
      device="cpu", trackers=["tensorboard", "wandb", "mlflow"], on_progress=report)
"""


DOMAINS = ["ink", "chalk", "poster", "outline"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By name in the tracker: step and value, from results.jsonl."""
    names = {
        "env0_in_acc": "accuracy/ink/in",
        **{f"env{i}_out_acc": f"accuracy/{name}/out" for i, name in enumerate(DOMAINS)},
        **{
            f"env{i}_{split}_{metric}": f"{metric}/{name}/{split}"
            for i, name in enumerate(DOMAINS)
            for split in ("in", "out")
            for metric in ("macro_f1", "balanced_accuracy", "nll", "ece")
        },
    }
    found: dict[str, list[tuple[int, float]]] = {}
    for record in RunFolder(folder).records:
        for key, value in record.items():
            if key not in ("step", "args", "hparams") and not isinstance(value, list):
                found.setdefault(names.get(key, key), []).append((record["step"], value))
    assert len(found["accuracy/chalk/out"]) == 6 and len(found) >= 8
    return found


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    text = events.Tensors("run/text_summary")
    assert len(text) == 1 and b"| batch_size | 4 |" in text[0].tensor_proto.string_val[0]
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """From the offline log: blocks of 32 KB, in each records with a header of checksum, length and kind; 7 bytes of
    file header first."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    data, position, whole = path.read_bytes(), 7, b""
    found: dict[str, list[tuple[int, float]]] = {}
    config: dict[str, Any] = {}
    while position < len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            record = Record.FromString(whole)
            whole = b""
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for key, value in items.items():
                if not key.startswith("_"):
                    found.setdefault(key, []).append((items["_step"], value))
    assert config["batch_size"] == 4 and config["algorithm"] == "ERM"
    return found


def mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((folder.parent / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("aidgn").experiment_id])
    assert run.info.run_name == folder.name and run.info.status == "FINISHED"
    assert run.data.params["batch_size"] == "4" and run.data.params["target"] == "['ink']"
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def assert_same(found: dict[str, list[tuple[int, float]]], truth: dict[str, list[tuple[int, float]]]) -> None:
    assert sorted(found) == sorted(truth)
    for name, points in truth.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        if not name.endswith("_time"):  # that of a repeated step is another
            assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(found[name], points, strict=True))


def test_every_record_once_after_kill_and_resume(tmp_path: Path) -> None:
    """Killed at step 9 with its state of step 2, or a bit later: steps 4, 6 and 8 are told, lost and made again."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = train(SPEC, tmp_path, device="cpu", trackers=NAMES)
    log = (folder / "log.txt").read_text()
    assert re.search(r"continued at step [2-8] of 12", log) and "warning" not in log
    truth = expected(folder)
    assert_same(tensorboard(folder), truth)
    assert_same(wandb(folder), truth)
    assert_same(mlflow(folder), truth)


class Broken:
    def __init__(self, where: str):
        self.where, self.calls = where, 0

    def fall(self, where: str) -> None:
        self.calls += 1
        if where == self.where:
            raise SystemExit("no route to host\nat all")

    def start(self, folder: Path, metadata: Any, records: Any) -> None:
        self.fall("start")

    def record(self, record: Any) -> None:
        self.fall("record")

    def end(self, how: str) -> None:
        self.fall("end")


@pytest.mark.parametrize(("where", "calls"), [("start", 1), ("record", 2), ("end", 8)])
def test_a_broken_tracker_is_one_warning(where: str, calls: int, tmp_path: Path) -> None:
    broken = Broken(where)
    folder = train(SPEC, tmp_path, device="cpu", trackers=[broken])
    assert RunFolder(folder).finished and broken.calls == calls
    (warning,) = (line for line in (folder / "log.txt").read_text().splitlines() if "warning" in line)
    assert warning.endswith("warning: tracking by Broken stopped: SystemExit: no route to host at all")


@pytest.mark.parametrize(("tracker", "file"), [("tensorboard", "events.out.tfevents.1"), ("wandb", "offline-run-1/x")])
def test_nothing_is_removed_behind_a_link(
    tracker: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(tracker)
    monkeypatch.setenv("WANDB_MODE", "offline")
    mine = tmp_path / "mine" / file
    mine.parent.mkdir(parents=True)
    mine.touch()
    run = tmp_path / "run"
    run.mkdir()
    (run / tracker).symlink_to(tmp_path / "mine")
    with pytest.raises(AidgnError, match="symbolic link"):
        trackers.TRACKERS[tracker]().start(run, {}, [])
    assert mine.exists()


class Hanging:
    hang = threading.Event()

    def start(self, folder: Path, metadata: Any, records: Any) -> None:
        self.hang.wait(60)

    def record(self, record: Any) -> None:
        pass

    def end(self, how: str) -> None:
        pass


def test_a_hanging_tracker_costs_one_short_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "PATIENCE", 0.5)
    first = train(SPEC, tmp_path / "1", device="cpu", trackers=[Hanging()])
    second = train(SPEC, tmp_path / "2", device="cpu", trackers=[Hanging()])
    Hanging.hang.set()
    assert "stopped: it has not answered for 0.5 s" in (first / "log.txt").read_text()
    assert "stopped: it still hangs since an earlier run" in (second / "log.txt").read_text()
    for folder in (first, second):
        assert (folder / "log.txt").read_text().count("warning") == 1 and RunFolder(folder).finished


class Watching:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self, folder: Path, metadata: Any, records: Any) -> None:
        self.heard.append([record["step"] for record in records])

    def record(self, record: Any) -> None:
        self.heard.append(record["step"])

    def end(self, how: str) -> None:
        self.heard.append(how)


def test_an_interrupted_and_a_failed_run_are_told_as_such(tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int, record: Any) -> None:
        if what == "train" and done == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    watching = Watching()
    with pytest.raises(AidgnError, match="Stopped at step"):
        train(SPEC, tmp_path, device="cpu", trackers=[watching], on_progress=stop)
    assert watching.heard == [[], 2, 4, 6, "interrupted"]
    train(SPEC, tmp_path, device="cpu", trackers=[again := Watching()])
    assert again.heard == [[2, 4, 6], 8, 10, 12, "finished"]
    failing = RunSpec("digits", "ERM", "ink", steps=4, hyper_parameters={"batch_size": 4, "lr": 1e30})
    with pytest.raises(AidgnError, match="NaN"):
        train(failing, tmp_path, device="cpu", trackers=[fails := Watching()])
    assert fails.heard[-1] == "failed"


def test_wandb_without_a_key_does_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    folder = train(SPEC, tmp_path, device="cpu", trackers=["wandb"])
    assert "no key is known; run `wandb login`, or set WANDB_MODE=offline" in (folder / "log.txt").read_text()


def test_the_switch_of_the_command_line(tmp_path: Path) -> None:
    given = [
        "train",
        "digits",
        "--target",
        "ink",
        "--algorithm",
        "ERM",
        "--steps",
        "4",
        "--eval-every",
        "2",
        "--batch-size",
        "4",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    app(given, standalone_mode=False)
    (folder,) = tmp_path.iterdir()
    assert not (folder / "tensorboard").exists()  # off unless asked for
    shutil.rmtree(folder)
    app([*given, "--track", "tensorboard"], standalone_mode=False)
    assert [step for step, _ in tensorboard(folder)["accuracy/chalk/out"]] == [2, 4]


def test_unknown_tracker_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError) as caught:
        train(SPEC, tmp_path, device="cpu", trackers=["wandbb"])
    assert caught.value.name == "wandbb" and "wandb" in caught.value.known
    monkeypatch.setattr(trackers.MLflow, "package", "no_such_package")
    with pytest.raises(AidgnError, match=r"pip install 'aidgn\[trackers\]'"):
        train(SPEC, tmp_path, device="cpu", trackers=["mlflow"])
    assert not list(tmp_path.iterdir())
