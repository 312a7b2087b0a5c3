"""What is counted, what is not, and what can be known of an attempt from its file."""

import json
import os
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.files import storage_error
from aidgn.runs.folder import RunFolder, RunWriter
from aidgn.runs.run_id import sweep_key
from aidgn.sweeps import journal
from aidgn.sweeps.journal import KILLS, SILENCE, attempt, history, record_death, reset_failures, should_retry
from aidgn.sweeps.plan import plan_runs
from aidgn.training import RunSpec, train


def spec_of(**changes: object) -> RunSpec:
    return plan_runs(
        ["digits"],
        ["ERM"],
        targets=["ink"],
        trials=1,
        steps=4,
        eval_every=2,
        **{"hyper_parameters": {"batch_size": 4}, **changes},
    )[0]


def write(out: Path, spec: RunSpec, *lines: dict) -> Path:
    path = out / ".sweep" / "attempts" / f"{spec.key()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines("\n" + json.dumps(line) for line in lines)
    return path


def ended(out: Path, spec: RunSpec, *ends: tuple[str, int]) -> int:
    """Failures after attempts that ended so, beginning at these steps."""
    for kind, first in ends:
        name = os.urandom(4).hex()
        write(
            out,
            spec,
            {"id": name, "host": "h", "pid": 1, "began": 1.0},
            {"id": name, "first": first, "step": first, "time": 2.0},
            {"id": name, "kind": kind, "what": kind, "time": 3.0},
        )
    return history(out, spec.key()).failures


def test_a_run_from_start_to_end_and_its_key_on_disk(tmp_path: Path) -> None:
    spec, seen = spec_of(), []
    kind, what = attempt(spec, tmp_path, device="cpu", on_event=lambda *event: seen.append(event))
    assert kind == "done" and RunFolder(Path(what)).finished and ("step", 4) in seen
    found = history(tmp_path, spec.key())
    (one,) = found.attempts
    assert (one.kind, one.first, one.step, one.pid, found.folder) == ("done", 0, 4, os.getpid(), Path(what).name)
    assert one.step_seconds is not None and 0 < one.step_seconds < 60 and found.failures == 0 and not found.running
    identity = json.loads((Path(what) / "run.json").read_text())["identity"]
    assert sweep_key(identity) == spec.key()


@pytest.mark.parametrize("name", ["PACS", "cafe\u0301", os.fsdecode(b"caf\xe9")])  # a published name, two ways to write
def test_the_key_of_an_own_folder_is_that_on_disk(tmp_path: Path, name: str) -> None:
    for place in product(("camera", "phone"), ("cat", "dog"), ("1.png", "2.png")):
        path = tmp_path.joinpath(name, *place)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    dataset = load_dataset(tmp_path / name)
    spec = RunSpec(str(tmp_path / name), "ERM", "phone", weights="none").resolved(dataset)
    assert sweep_key(spec.identity(dataset, "0")) == replace(spec, dataset=os.path.relpath(tmp_path / name)).key()


def test_where_memory_ran_out_the_process_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from aidgn.algorithms.erm import ERM\nclass Large(ERM):\n"
        "    def update(self, minibatches):\n        raise MemoryError\n"
    )
    spec = plan_runs(["digits"], [f"{tmp_path / 'own.py'}:Large"], targets=["ink"], trials=1, steps=4)[0]
    kind, why = attempt(spec, tmp_path / "out", device="cpu")
    assert kind == "crashed" and why.startswith("Out of memory with 3 x")  # in words, all the same
    assert history(tmp_path / "out", spec.key()).failures == 1


def test_failures_count_across_calls_and_can_be_forgiven(tmp_path: Path) -> None:
    spec = spec_of(hyper_parameters={"batch_size": 4, "lr": 1e30})
    for calls in range(1, 4):
        kind, why = attempt(spec, tmp_path, device="cpu")
        assert kind == "crashed" and "NaN" in why
        assert history(tmp_path, spec.key()).failures == calls
        assert should_retry(spec, tmp_path, 2) == (calls < 2)  # the same error again
    assert "NaN" in history(tmp_path, spec.key()).error
    reset_failures(tmp_path, spec.key())
    assert should_retry(spec, tmp_path, 0)


def test_what_counts_as_a_failure(tmp_path: Path) -> None:
    specs = plan_runs(["digits"], ["ERM"], trials=3)
    assert ended(tmp_path, specs[0], ("failed", 0), ("interrupted", 5), ("busy", 0), ("stop", 5), ("crashed", 5)) == 2
    # Killed again and again at random: each time it had got further.
    assert ended(tmp_path, specs[1], *(("died", first) for first in (0, 10, 20, 30, 40))) == 1
    # Killed at the same place: something in the run does that.
    assert ended(tmp_path, specs[2], *(("died", first) for first in (0, 10, 10, 10))) == 3
    assert ended(tmp_path, specs[3], ("failed", 0), ("failed", 0), ("done", 0)) == 0
    # An attempt that ended with its launcher, unseen by anyone, says nothing against the run.
    write(tmp_path, specs[4], {"id": "a", "host": "h", "pid": 1, "began": 1.0})
    assert history(tmp_path, specs[4].key()).failures == 0
    assert record_death(specs[4], tmp_path, "gone") and history(tmp_path, specs[4].key()).failures == 1
    assert not record_death(specs[4], tmp_path, "gone") and not record_death(specs[5], tmp_path, "never there")


def test_kills_are_counted_apart(tmp_path: Path) -> None:
    first, second = plan_runs(["digits"], ["ERM"], trials=2, targets=["ink"])

    def kill(spec: RunSpec, begins: int = 0) -> bool:
        name = os.urandom(4).hex()
        write(tmp_path, spec, {"id": name, "host": "h", "pid": 1, "began": 1.0, "first": begins, "step": begins})
        assert record_death(spec, tmp_path, "killed", killed=True)
        return should_retry(spec, tmp_path, 0)

    assert all(kill(first) for _ in range(KILLS)) and history(tmp_path, first.key()).failures == 0
    assert not kill(first) and history(tmp_path, first.key()).error == "killed"  # not for ever
    reset_failures(tmp_path, first.key())
    assert kill(first)
    assert all(kill(second, begins) for begins in range(2 * KILLS))  # each got further than the one before
    ended(tmp_path, second, ("died", 0))
    assert not should_retry(second, tmp_path, 0)


def test_the_same_error_again_is_enough(tmp_path: Path) -> None:
    first, second = plan_runs(["digits"], ["ERM"], trials=2, targets=["ink"])

    def fail(spec: RunSpec, name: str, what: str, kind: str = "crashed") -> bool:
        write(tmp_path, spec, {"id": name, "kind": kind, "what": what, "time": 1.0})
        return should_retry(spec, tmp_path, 5)

    assert fail(first, "a", "Traceback ...\n line 3\nValueError: bad luck")
    assert fail(first, "b", "out of memory")
    assert fail(first, "c", "saved", "interrupted")
    assert fail(first, "d", "ValueError: bad luck")  # another than the last
    assert not fail(first, "e", "Traceback ...\n line 9\nValueError: bad luck")
    reset_failures(tmp_path, first.key())
    assert fail(first, "f", "ValueError: bad luck")
    # A kill says nothing of the run: only deaths without progress count.
    assert all(fail(second, name, "its process died (exit code -9)", "died") for name in "abc")


def test_lines_cut_in_half_by_a_crash_are_passed_over(tmp_path: Path) -> None:
    spec = spec_of()
    ended(tmp_path, spec, ("failed", 0))
    with write(tmp_path, spec).open("a") as file:
        file.write('\n{"id": "b", "ho')
    assert ended(tmp_path, spec, ("failed", 0)) == 2


def test_a_run_of_another_process_is_busy_and_not_a_failure(tmp_path: Path) -> None:
    spec = spec_of()
    folder = train(spec, tmp_path, device="cpu")
    (folder / "last.safetensors").unlink()
    with RunWriter(folder).locked():
        kind, what = attempt(spec, tmp_path, device="cpu")
    assert kind == "busy" and "Another process" in what and history(tmp_path, spec.key()).failures == 0


def test_storage_concerns_all_runs_and_is_no_failure_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of()
    for error in (OSError(28, "No space left on device"), storage_error(tmp_path, OSError(30, "Read-only"))):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("aidgn.training.trainer.train", fails)
        kind, what = attempt(spec, tmp_path)
        assert kind == "stop" and ("disk is full" in what or "cannot be written" in what)
    assert history(tmp_path, spec.key()).failures == 0
    assert "--out" not in str(storage_error(tmp_path, OSError(13, "Permission denied")))
    assert isinstance(storage_error(tmp_path, OSError(5, "Input/output error")), AidgnError)


def test_who_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, gone = plan_runs(["digits"], ["ERM"], trials=1)[:3]
    name = journal.socket.gethostname()
    write(tmp_path, here, {"id": "a", "host": name, "pid": os.getpid(), "began": 1.0})
    path = write(tmp_path, there, {"id": "a", "host": "another", "pid": 1, "began": 1.0})
    write(tmp_path, gone, {"id": "a", "host": name, "pid": 2**22 + 1, "began": 1.0})  # no such process
    assert [history(tmp_path, spec.key()).running is not None for spec in (here, there, gone)] == [True, True, False]
    then = time.time() - SILENCE - 5
    os.utime(path, (then, then))
    assert history(tmp_path, there.key()).running is None  # silent for too long


def test_signs_of_life_while_a_run_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, on_progress, **__: object) -> Path:
        on_progress("train", 7, 100, None)
        time.sleep(1.5)
        on_progress("train", 9, 100, None)
        return tmp_path / "folder"

    monkeypatch.setattr(journal, "BEAT", 0.1)
    monkeypatch.setattr("aidgn.training.trainer.train", slow)
    spec = spec_of()
    assert attempt(spec, tmp_path) == ("done", str(tmp_path / "folder"))
    lines = [json.loads(line) for line in write(tmp_path, spec).read_text().split("\n") if line]
    assert sum(line.get("step") == 7 for line in lines) >= 3
    assert history(tmp_path, spec.key()).attempts[0].first == 7


def test_heartbeats_tell_the_speed_between_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    log = journal._Log(spec_of(), tmp_path)
    for second, step, recorded in ((0, 0, False), (500, 10, True), (502, 14, False), (508, 20, True), (600, 24, False)):
        now[0] = float(second)
        log.step(step, recorded)
    monkeypatch.setattr(journal, "BEAT", 0.01)
    log.thread.start()
    while not (attempts := history(tmp_path, spec_of().key()).attempts) or attempts[0].step != 24:
        time.sleep(0.01)
    log.over.set()
    assert attempts[0].step_seconds == pytest.approx(0.8)  # 8 s for the 10 steps between two evaluations
