"""A sweep folder: what is done, running, failed and left by the disk alone, and plans that do not go together."""

import errno
import json
import os
import re
import socket
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from aidgn.errors import AidgnError
from aidgn.files import StorageError, write_text
from aidgn.sweeps.journal import SILENCE, attempt, history
from aidgn.sweeps.plan import SweepPlan
from aidgn.sweeps.plan_file import read_plans
from aidgn.sweeps.status import describe_status, read_status
from aidgn.sweeps.store import PlannedRun, SweepFolder
from aidgn.sweeps.sweep import Sweep
from aidgn.training import train

PLAN = {
    "datasets": ("digits",),
    "algorithms": ("ERM",),
    "targets": ("ink",),
    "trials": 2,
    "steps": 4,
    "eval_every": 2,
    "hyper_parameters": {"batch_size": 4},
}


def test_a_sweep_removes_what_killed_processes_left(tmp_path: Path) -> None:
    todo = planned(tmp_path)
    run = train(todo.specs[0], tmp_path, device="cpu")
    shared = tmp_path / ".backbones"
    shared.mkdir()
    left = [run / "state.pt", run / ".tmpAb3xYz", shared / ".tmpAb3xYz", shared / ".a.safetensors.123.tmp"]
    fresh = shared / ".tmpFresh1"  # another process may be writing it
    for path in (*left, fresh):
        path.touch()
        if path != fresh:
            os.utime(path, (1.0, 1.0))
    planned(tmp_path)
    assert not (run / "state.pt").exists() and not (run / ".tmpAb3xYz").exists()
    train(todo.specs[1], tmp_path, device="cpu")
    assert not any(path.exists() for path in left) and fresh.exists()


def planned(out: Path, **changes: object) -> Sweep:
    todo = Sweep.prepare([SweepPlan(**{**PLAN, **changes})], out, precision="float32")  # type: ignore[arg-type]
    todo.check()
    return todo


@cache
def one_run() -> dict[str, bytes]:
    """The files of the first run of PLAN."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = train(planned(Path(folder)).specs[0], folder, device="cpu")
        return {f"{path.name}/{file.name}": file.read_bytes() for file in path.iterdir()}


def with_one_run(out: Path) -> Path:
    for name, content in one_run().items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    return (out / next(iter(one_run()))).parent


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 5}, "steps 4 (here 5)"),
        ({"eval_every": 1}, "eval_every 2 (here 1)"),
        ({"image_size": 32}, "image_size 28 (here 32)"),
        ({"backbone": "resnet18", "weights": "none"}, "backbone small"),
        ({"augment_validation": True}, "augment_validation False (here True)"),
        ({"hyper_parameters": {"batch_size": 8}}, "ERM's batch_size 4 (here 8)"),
    ],
)
def test_another_plan_is_refused_and_what_differs_is_named(changes: dict, words: str, tmp_path: Path) -> None:
    planned(tmp_path).save_plan(2, None)
    with_one_run(tmp_path)
    with pytest.raises(AidgnError) as caught:
        planned(tmp_path, **changes)
    assert words in str(caught.value) and "--out" in str(caught.value) and "on digits" in str(caught.value)


def test_conflicting_plans_of_a_file_are_refused(tmp_path: Path) -> None:
    plans = [SweepPlan(**PLAN), SweepPlan(**{**PLAN, "algorithms": ("CORAL",), "steps": 8})]  # type: ignore[arg-type]
    with pytest.raises(AidgnError, match="plans differ on digits, steps 4 and 8"):
        Sweep.prepare(plans, tmp_path)


def test_unknown_backbone_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match=r"resnet5O\.tv_in1k.*Did you mean resnet50\.tv_in1k"):
        planned(tmp_path, backbone="resnet5O.tv_in1k")
    assert not list(tmp_path.iterdir())


def test_two_own_algorithms_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            "from aidgn.algorithms import Algorithm\n\n\nclass Mine(Algorithm):\n"
            f"    def objective(self, minibatches):\n        return '{name}'\n"
        )
    one, two = f"{tmp_path}/a.py:Mine", f"{tmp_path}/b.py:Mine"
    with pytest.raises(AidgnError, match=r"a\.py:Mine and .*b\.py:Mine are both called Mine"):
        planned(tmp_path / "out", algorithms=(one, two))
    same = planned(tmp_path / "out", algorithms=(one, f"{tmp_path}/../{tmp_path.name}/a.py:Mine"))
    assert len(same.runs) == len(planned(tmp_path / "out", algorithms=(one,)).runs)


def test_an_own_algorithm_that_was_edited_meanwhile(tmp_path: Path) -> None:
    file, out = tmp_path / "own.py", tmp_path / "out"
    file.write_text("from aidgn.algorithms.erm import ERM\n\n\nclass Mine(ERM): ...\n")
    todo = planned(out, algorithms=(f"{file}:Mine",))
    todo.save_plan(2, None)
    train(todo.specs[0], out, device="cpu")
    assert todo.edited_runs() == 0
    file.write_text(file.read_text() + "# edited\n")
    assert todo.edited_runs() == 2
    del todo  # while it is at work, another text is refused
    again = planned(out, algorithms=(f"{file}:Mine",))  # its runs are others, in rows of their own
    again.refresh(2)
    assert again.older == ["Mine"] and again.count("left") == 2
    again.save_plan(2, None)
    assert again.folder.planned()[0] == again.runs and again.other_runs == 0  # the old ones can no more be made
    assert planned(out, algorithms=(f"{file}:Mine",)).older == []


def test_an_own_algorithm_whose_defaults_were_edited(tmp_path: Path) -> None:
    file, out = tmp_path / "own.py", tmp_path / "out"
    text = (
        "from aidgn.algorithms.base import COMMON\nfrom aidgn.algorithms.erm import ERM\nfrom aidgn.algorithms."
        "search_space import fixed\n\n\nclass Mine(ERM):\n    search_space = {**COMMON, 'a': (1, fixed(1))}\n"
    )
    file.write_text(text)
    todo = planned(out, algorithms=(f"{file}:Mine", "ERM"))
    todo.save_plan(2, None)
    for spec in todo.specs:
        train(spec, out, device="cpu")
    file.write_text(text.replace("(1, fixed(1))", "(2, fixed(2))"))
    again = planned(out, algorithms=(f"{file}:Mine", "ERM"))
    again.refresh(2)
    assert (again.count("left"), again.count("done")) == (2, 2)  # ERM's are not made again


def test_an_own_algorithm_that_was_edited_and_planned_otherwise(tmp_path: Path) -> None:
    file, out = tmp_path / "own.py", tmp_path / "out"
    text = (
        "from aidgn.algorithms.base import COMMON\nfrom aidgn.algorithms.erm import ERM\nfrom aidgn.algorithms."
        "search_space import fixed\n\n\nclass Mine(ERM):\n    search_space = {**COMMON, 'a': (1, fixed(1))}\n"
    )
    mine = {"algorithms": (f"{file}:Mine",)}
    file.write_text(text)
    todo = planned(out, **mine)
    todo.save_plan(2, None)
    train(todo.specs[0], out, device="cpu")
    edited = text.replace("(1, fixed(1))", "(2, fixed(2))")
    file.write_text(edited)
    with pytest.raises(AidgnError, match=r"planned for .*own\.py:Mine with batch_size=4,"):
        planned(out, **mine, hyper_parameters={"batch_size": 4, "a": 7})
    (tmp_path / "other.py").write_text(edited)
    with pytest.raises(AidgnError, match=r"planned for .*own\.py:Mine with batch_size=4"):
        planned(out, algorithms=(f"{tmp_path}/other.py:Mine",))
    assert planned(out, **mine).older == ["Mine"]

    train(todo.specs[1], out, device="cpu")  # planned by the old text, with its default, and made by the new one
    with pytest.raises(AidgnError, match=r"Different on digits: Mine's a 1 \(here 2\)"):
        planned(out, **mine)


def test_precision_and_images_are_compared_too(tmp_path: Path) -> None:
    with_one_run(tmp_path)
    todo = Sweep.prepare([SweepPlan(**PLAN)], tmp_path, precision="bfloat16")
    with pytest.raises(AidgnError, match=r"precision float32 \(here bfloat16\)"):
        todo.check()
    todo = planned(tmp_path)
    todo.shared["digits"]["data"] = "0" * 32 + "-0"
    with pytest.raises(AidgnError, match="Different on digits: images"):
        todo.check()


def test_run_with_other_hyper_parameters_is_a_candidate(tmp_path: Path) -> None:
    with_one_run(tmp_path)  # by `aidgn train`
    todo = planned(tmp_path, hyper_parameters={"batch_size": 8})
    todo.refresh(2)
    assert todo.count("left") == len(todo.specs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trials": 5},
        {"draws": 3},
        {"algorithms": ("ERM", "CORAL")},
        {"targets": ()},
        {"leave_one_out": True},
        {"average": "sma"},
        {"hyper_parameters": {"batch_size": 4, "lr": [0.1, 0.2]}},
    ],
)
def test_more_trials_find_the_finished_run(changes: dict, tmp_path: Path) -> None:
    with_one_run(tmp_path)
    todo = planned(tmp_path, **changes)
    todo.refresh(2)
    assert todo.count("done") == (0 if "average" in changes else 1)
    assert todo.count("left") == len(todo.specs) - todo.count("done")


def test_the_plan_in_the_folder_grows(tmp_path: Path) -> None:
    for number, changes in enumerate([{}, {"trials": 3}, {"trials": 1}, {"algorithms": ("CORAL",)}]):
        todo = planned(tmp_path, **changes)
        todo.save_plan(2, None)
        assert len(read_plans(tmp_path / "sweep.yaml")[0]) == number + 1
    assert todo.other_runs == 3
    items, retries = SweepFolder(tmp_path).planned()
    assert [(item.algorithm, item.trial) for item in items] == [
        ("ERM", 0),
        ("ERM", 1),
        ("ERM", 2),
        ("CORAL", 0),
        ("CORAL", 1),
    ] and retries == 2
    again = Sweep.prepare(read_plans(tmp_path / "sweep.yaml")[0], tmp_path)
    assert {spec.key() for spec in again.specs} == {item.key for item in items}


def test_plan_stopped_between_its_files_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path).save_plan(2, None)
    written = []

    def once(path: Path, text: str) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        write_text(path, text)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("aidgn.sweeps.store.write_text", once)
        planned(tmp_path, trials=3).save_plan(2, None)
    Sweep.prepare(read_plans(tmp_path / "sweep.yaml")[0], tmp_path).save_plan(2, None)
    assert [item.trial for item in SweepFolder(tmp_path).planned()[0]] == [0, 1, 2]


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    todo = planned(tmp_path)
    monkeypatch.setattr("fcntl.flock", flock)
    message = r"cannot be locked \(Function not implemented\).*with flock"
    with pytest.raises(StorageError, match=message):
        todo.save_plan(2, None)
    kind, why = attempt(todo.specs[0], tmp_path, device="cpu")
    assert kind == "stop" and re.search(message, why)  # no other run could go on either


def test_a_run_is_called_alike_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is that of a data set known by name, whatever lies here under it."""
    keys = {spec.key() for spec in planned(tmp_path / "out").specs}
    (tmp_path / "something").mkdir()
    (tmp_path / "digits").symlink_to(tmp_path / "something")
    monkeypatch.chdir(tmp_path)
    assert {spec.key() for spec in planned(tmp_path / "out").specs} == keys


def test_a_plan_that_has_not_begun_may_be_changed(tmp_path: Path) -> None:
    planned(tmp_path, steps=10).save_plan(2, None)
    planned(tmp_path, steps=20).save_plan(2, None)
    items, _ = SweepFolder(tmp_path).planned()
    assert {item.steps for item in items} == {20} and len(read_plans(tmp_path / "sweep.yaml")[0]) == 1


def test_draws_on_a_folder_with_broken_images(tmp_path: Path) -> None:
    for domain in ("a", "b"):
        for name in ("x", "y"):
            (tmp_path / "photos" / domain / name).mkdir(parents=True)
            for number in range(5):
                pixels = np.random.default_rng(number).integers(0, 255, (30, 30, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / domain / name / f"{number}.png")
    (tmp_path / "photos" / "a" / "x" / "9.png").write_text("broken")
    plan = SweepPlan(
        (str(tmp_path / "photos"),),
        ("ERM",),
        ("a",),
        trials=1,
        draws=2,
        steps=1,
        backbone="small",
        image_size=28,
        skip_broken=True,
    )
    todo = Sweep.prepare([plan], tmp_path / "out")
    alone = train(
        type(todo.specs[1])(
            str(tmp_path / "photos"), "ERM", "a", draw=1, steps=1, backbone="small", image_size=28, skip_broken=True
        ),
        tmp_path / "out",
        device="cpu",
    )
    todo.check()
    todo.refresh(2)
    assert [status.kind for status in todo.statuses] == ["left", "done"]
    identity = json.loads((alone / "run.json").read_text())["identity"]
    assert identity["hyper_parameters"] == todo.specs[1].hyper_parameters


def test_two_data_sets_of_one_name(tmp_path: Path) -> None:
    for place in ("one", "two"):
        for name in ("a/x", "a/y", "b/x", "b/y"):
            (tmp_path / place / "photos" / name).mkdir(parents=True)
            (tmp_path / place / "photos" / name / "1.png").touch()
    folders = tuple(str(tmp_path / place / "photos") for place in ("one", "two"))
    with pytest.raises(AidgnError, match="both called photos"):
        Sweep.prepare([SweepPlan(folders, ("ERM",))], tmp_path, dry_run=True)


# The status ---------------------------------------------------------------------------------------------------------


def write(folder: SweepFolder, item: PlannedRun, *said: dict, age: float = 0.0) -> None:
    path = folder.path / ".sweep" / "attempts" / f"{item.key}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\n" + json.dumps({"id": "a", **line}) for line in said))
    os.utime(path, (time.time() - age,) * 2)


def started(host: str = "node7", pid: int = 1) -> dict:
    return {"host": host, "pid": pid, "began": 1000.0}


def test_done_running_failed_left_speed_and_time_left(tmp_path: Path) -> None:
    name = with_one_run(tmp_path).name
    todo = planned(tmp_path, trials=6)
    todo.save_plan(1, None)
    folder, items = SweepFolder(tmp_path), todo.runs
    write(
        folder,
        items[0],
        started(),
        {"first": 0, "step": 4, "kind": "done", "what": f"/elsewhere/{name}", "step_seconds": 0.5},
    )
    write(folder, items[1], started(), {"first": 0, "step": 2, "time": 1010.0})
    write(folder, items[2], started(), {"first": 0, "step": 2, "time": 1010.0}, age=SILENCE + 9)  # its machine is gone
    write(
        folder,
        items[3],
        started(),
        {"kind": "failed", "what": "no luck"},
        {"id": "b", **started()},
        {"id": "b", "kind": "crashed", "what": "Traceback ...\nValueError: bad luck"},
    )
    write(folder, items[4], started(), {"kind": "failed", "what": "once is allowed"})
    status = read_status(folder)
    assert dict(status.counts) == {"done": 1, "running": 1, "failed": 1, "left": 3}
    assert status.steps_per_second == pytest.approx(2.0)
    # Of 24 steps are left: 2 of the running one, 2 of the one that stopped, 4 and 4; the failed one is given up.
    assert status.seconds_left == pytest.approx((2 + 2 + 4 + 4) / 2.0)
    text = "\n".join(describe_status(status, folder))
    for words in (
        "6 runs, 33% of the steps",
        "1 on node7",
        "time left  about 6 s",
        "2 attempts: ValueError: bad luck",
        "digits, ERM, ink unseen, trial 3, draw 0",
        "--retry-failed",
    ):
        assert words in text, text


def test_it_says_when_it_does_not_know(tmp_path: Path) -> None:
    todo = planned(tmp_path)
    todo.save_plan(2, None)
    folder = SweepFolder(tmp_path)
    assert "no process is at work" in read_status(folder).time_left
    write(folder, todo.runs[0], started(socket.gethostname(), os.getpid()))
    status = read_status(folder)
    assert status.seconds_left is None and status.unknown and status.steps_per_second is None
    begun = started(socket.gethostname(), os.getpid())
    write(
        folder, todo.runs[0], begun, {"first": 0, "step": 2, "time": 1400.0}
    )  # 400 s, most of them before the first step
    assert read_status(folder).seconds_left is None
    write(folder, todo.runs[0], begun, {"step": 3, "time": 1401.0, "step_seconds": 0.5})
    status = read_status(folder)
    assert status.steps_per_second == pytest.approx(2.0) and not status.unknown
    (tmp_path / ".sweep" / "plan.json").unlink()
    with pytest.raises(AidgnError, match="no runs and no plan"):
        read_status(folder)
    with_one_run(tmp_path)
    status = read_status(folder)
    assert (status.total, status.counts["done"]) == (1, 1) and "not planned" in status.unknown


def test_plan_is_refused_while_another_sweep_starts(tmp_path: Path) -> None:
    first = planned(tmp_path)
    first.save_plan(2, None)
    for changes in ({"steps": 5}, {"hyper_parameters": {"batch_size": 8}}):
        with pytest.raises(AidgnError, match=f"at work in {tmp_path}"):
            planned(tmp_path, **changes).save_plan(2, None)
    planned(tmp_path, trials=3).save_plan(2, None)  # shares its runs, and adds some
    assert len(first.folder.planned()[0]) == 3
    del first  # as at the end of its process
    planned(tmp_path, steps=5).save_plan(2, None)
    assert {item.steps for item in SweepFolder(tmp_path).planned()[0]} == {5}


def test_a_folder_of_sweeps_says_where_they_are(tmp_path: Path) -> None:
    planned(tmp_path / "first").save_plan(2, None)
    with_one_run(tmp_path / "fit-photos" / "runs")
    kept = tmp_path / "fit-photos" / "model" / "run.json"  # a model that was kept is no run
    write_text(kept, next(tmp_path.glob("fit-photos/runs/*/run.json")).read_text())
    for path, words in (
        (tmp_path, f"folders in it do: {tmp_path}/first, {tmp_path}/fit-photos/runs. Give one"),
        (next(tmp_path.glob("fit-photos/runs/*")), "is a run, not a sweep.*fit-photos/runs"),
        (tmp_path / "nowhere", "nowhere does not exist"),
    ):
        with pytest.raises(AidgnError, match=words):
            read_status(SweepFolder(path))


def test_done_run_without_its_folder_is_left_to_train(tmp_path: Path) -> None:
    path = with_one_run(tmp_path)
    todo = planned(tmp_path, trials=1)
    write(todo.folder, todo.runs[0], started(), {"kind": "done", "what": str(path)})
    (path / "last.safetensors").unlink()
    todo.refresh(2)
    assert todo.count("left") == 1


def test_status_of_three_thousand_runs_is_quick(tmp_path: Path) -> None:
    number = 3000
    folder = SweepFolder(tmp_path)
    items = [
        PlannedRun(f"digits-ERM-ink-trial{n}-draw0-{n:08x}", "digits", "ERM", ["ink"], n, 0, 100, "")
        for n in range(number)
    ]
    folder.write(items, 2, "")
    save_file({f"layer{n}.weight": torch.zeros(1) for n in range(320)}, tmp_path / "x")  # as many as a ResNet-50 has
    weights = (tmp_path / "x").read_bytes()
    for n, item in enumerate(items):
        (tmp_path / f"run{n}").mkdir()
        if n < number // 2:
            (tmp_path / f"run{n}" / "last.safetensors").write_bytes(weights)
            write(
                folder,
                item,
                started(),
                {"first": 0, "step": 0},
                {"step": 50},
                {"step": 100, "kind": "done", "what": f"/x/run{n}", "step_seconds": 0.1},
            )
    began = time.process_time()
    status = read_status(folder)
    assert status.counts["done"] == number // 2
    assert time.process_time() - began < 10 * number / 15000
    began = time.process_time()
    assert read_status(folder).counts == status.counts  # while watching, what is done is not read again
    assert time.process_time() - began < 5 * number / 15000


def test_history_of_a_run_nobody_began(tmp_path: Path) -> None:
    assert history(tmp_path, "none").attempts == []
