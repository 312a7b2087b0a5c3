"""Files of runs and sweeps that someone edited, cut or removed: each command ends in a sentence or a correct result."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from aidgn.cli import app
from aidgn.errors import AidgnError
from aidgn.runs.checkpoints import verify
from aidgn.runs.folder import RunFolder
from aidgn.runs.record_log import LostRecords
from aidgn.sweeps.journal import attempt
from aidgn.sweeps.plan import SweepPlan
from aidgn.sweeps.plan_file import CHECKS
from aidgn.sweeps.sweep import Sweep
from aidgn.training import RunSpec, train
from tests.conftest import Tally

HYPER_PARAMETERS = {"batch_size": 4}
SPEC = RunSpec("digits", "ERM", "chalk", steps=6, eval_every=2, hyper_parameters=HYPER_PARAMETERS)
TRAIN = ["train", "digits", "--algorithm", "ERM", "--target", "chalk", "--steps", "6", "--eval-every", "2"]
TRAIN += ["--batch-size", "4", "--out", "RUNS", "--device", "cpu"]
FINISHED = {"table": ["table", "RUNS"], "status": ["status", "RUNS"], "predict": ["predict", "RUN", "PICTURE"]}
FINISHED |= {"continue": TRAIN}
DEEP = "[" * 100_000 + "]" * 100_000
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    10**9,
    10**30,
    1e308,
    float("nan"),
    "",
    "x",
    "\x1b[2J\0",
    "x" * 5000,
    ["x\0"],
    [],
    {},
    [[]],
    [1],
    {"a": {}},
]


class Stop(Exception):
    pass


def stop_at(step: int) -> Callable[..., None]:
    def stop(phase: str, done: int, *_: object) -> None:
        if phase == "train" and done == step:
            raise Stop

    return stop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run below `finished`, one stopped after step 5 below `stopped`, and a picture."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("edited")
    train(SPEC, folder / "finished", device="cpu")
    with pytest.raises(Stop):
        train(SPEC, folder / "stopped", device="cpu", save_seconds=0.0, on_progress=stop_at(5))
    Image.new("RGB", (28, 28)).save(folder / "picture.png")
    return folder


@pytest.fixture
def stopped(folder: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(folder / "stopped", tmp_path / "runs")
    return RunFolder(next((tmp_path / "runs").iterdir()))


def numbers(path: str | Path) -> list[dict[str, Any]]:
    """The records without times."""
    times = ("step_time", "eval_time")
    return [{key: value for key, value in r.items() if key not in times} for r in RunFolder(path).records]


# Mutations ------------------------------------------------------------------------------------------------------------


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all values in a JSON value; of long lists to the first two entries."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*above, key)
        yield from places(entry, (*above, key))


def change(text: str, dice: random.Random) -> str:
    """Change JSON: another value in one place, a place removed, nested deeply, or cut."""
    kind = dice.choice(["value", "value", "value", "value", "remove", "cut", "deep", "text"])
    if kind == "cut":
        return text[: dice.randrange(len(text))]
    if kind == "text":
        return dice.choice(["", DEEP, "null", "{}", "[1]", '"x"', "\0" * len(text), '{"a":' + "9" * 5000 + "}"])
    value = json.loads(text)
    *above, last = dice.choice(list(places(value)))
    inside = value
    for key in above:
        inside = inside[key]
    if kind == "remove":
        del inside[last]
    else:
        inside[last] = "DEEP" if kind == "deep" else dice.choice(VALUES)
    return json.dumps(value).replace('"DEEP"', dice.choice([DEEP, "[" * 200 + "]" * 200]))


def change_file(path: Path, dice: random.Random) -> None:
    """Change a file of one JSON value, or one line of a file of records."""
    if dice.random() < 0.05:
        path.unlink()
        return
    text = path.read_text()
    if path.suffix == ".yaml":
        text = json.dumps(yaml.safe_load(text))
    lines = text.strip().splitlines() if path.suffix == ".jsonl" else [text]
    number = dice.randrange(len(lines))
    if len(lines) > 1 and dice.random() < 0.2:
        del lines[number]
    else:
        lines[number] = change(lines[number], dice)
    end = dice.choice(["\n", "\n", ""])
    path.write_text("\n".join(lines) + end)


def run_command(arguments: list[str], folder: Path) -> Any:
    """The outcome of a command in this process; an exception other than those that end in a sentence is raised."""
    run = next(path for path in (folder / "runs").iterdir() if path.name[0] != "." and path.is_dir())
    named = {"RUNS": str(folder / "runs"), "RUN": str(run), "PICTURE": str(folder / "picture.png")}
    result = CliRunner().invoke(app, [named.get(word, word) for word in arguments], standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, AidgnError | SystemExit):
        raise result.exception
    if result.exception is not None:
        assert str(result.exception).strip() and len(str(result.exception)) < 2000
    return result


@pytest.mark.parametrize("attempts", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["run.json", "results.jsonl", "novelty.json"])
def test_edits_of_a_finished_run(
    name: str, attempts: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    dice = random.Random(name)
    for number in range(attempts):
        place = tmp_path / str(number)
        shutil.copytree(folder / "finished", place / "runs")
        shutil.copy(folder / "picture.png", place)
        (run,) = (place / "runs").iterdir()
        change_file(run / name, dice)
        for command, arguments in FINISHED.items():
            with tally(f"edits of {name} of a finished run"):
                try:
                    run_command(arguments, place)
                except BaseException as error:
                    raise AssertionError(f"{command}, {name}: {(run / name).read_text()[:3000]}") from error
        shutil.rmtree(place)


@pytest.mark.parametrize("attempts", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["run.json", "results.jsonl"])
def test_edits_of_an_interrupted_run(name: str, attempts: int, folder: Path, tmp_path: Path, tally: Tally) -> None:
    """A run that continues has the records of a run that was left alone, whatever was done to its own."""
    dice = random.Random(f"interrupted {name}")
    (finished,) = (folder / "finished").iterdir()
    for number in range(attempts):
        place = tmp_path / str(number)
        shutil.copytree(folder / "stopped", place / "runs")
        (run,) = (place / "runs").iterdir()
        change_file(run / name, dice)
        edited = (run / name).read_text()[:3000] if (run / name).exists() else "removed"
        with tally(f"edits of {name} of an interrupted run"):
            try:
                result = run_command(TRAIN, place)
                if result.exit_code == 0 and result.exception is None:
                    assert numbers(run) == numbers(finished)
                else:
                    assert name == "run.json" and not RunFolder(run).finished
            except BaseException as error:
                raise AssertionError(f"{name}: {edited}") from error
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep, `runs`: one run is finished, one has failed, one is left."""
    folder = tmp_path_factory.mktemp("edited")
    plan = SweepPlan(("digits",), ("ERM",), ("chalk",), trials=3, steps=6, eval_every=2)
    todo = Sweep.prepare([plan], folder / "runs", precision="float32")
    todo.save_plan(2, None)
    attempt(todo.specs[0], folder / "runs", device="cpu")
    journal = folder / "runs" / ".sweep" / "attempts"
    (finished,) = journal.iterdir()
    text = finished.read_text().replace('"done"', '"failed"')
    (journal / f"{todo.specs[1].key()}.jsonl").write_text(text)
    return folder


SWEEP_COMMANDS = {
    "status": ["status", "RUNS"],
    "sweep": ["sweep", "RUNS/sweep.yaml", "--dry-run"],
    "table": ["table", "RUNS"],
}


@pytest.mark.parametrize("attempts", [3, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sweep.yaml", ".sweep/plan.json", "journal"])
def test_edits_of_a_sweep(name: str, attempts: int, sweep: Path, tmp_path: Path, tally: Tally) -> None:
    dice = random.Random(name)
    for number in range(attempts):
        place = tmp_path / str(number)
        shutil.copytree(sweep / "runs", place / "runs")
        names = sorted((place / "runs" / ".sweep" / "attempts").iterdir())
        path = dice.choice(names) if name == "journal" else place / "runs" / name
        change_file(path, dice)
        edited = path.read_text()[:3000] if path.exists() else "removed"
        for command, arguments in SWEEP_COMMANDS.items():
            with tally(f"edits of {name} of a sweep"):
                try:
                    run_command([word.replace("RUNS", str(place / "runs")) for word in arguments], place)
                except BaseException as error:
                    raise AssertionError(f"{command}, {name}: {edited}") from error
        shutil.rmtree(place)


@pytest.mark.parametrize("attempts", [20, pytest.param(None, marks=pytest.mark.slow)])
def test_odd_values_of_a_plan(attempts: int | None, tmp_path: Path, tally: Tally) -> None:
    odd = [*VALUES, {"lr": "x"}, {"ERM": {"lr": [1, "x"]}}, {"lr": 10**400}, {"batch_size": 10**30}, ["a/" * 3000]]
    cases = [(key, value) for key in CHECKS for value in odd]
    for key, value in random.Random(0).sample(cases, attempts or len(cases)):
        plan = {"datasets": ["digits"], "algorithms": ["ERM"], "targets": ["chalk"], "steps": 6, key: value}
        (tmp_path / "plan.yaml").write_text(json.dumps(plan))
        with tally("odd values in a plan"):
            result = CliRunner().invoke(app, ["sweep", str(tmp_path / "plan.yaml"), "--dry-run"], standalone_mode=False)
            assert isinstance(result.exception, AidgnError | None), (key, value)


# Records --------------------------------------------------------------------------------------------------------------


def as_0_1_0(run: RunFolder) -> None:
    """Remove the copy of the records from the state."""
    import torch

    state = torch.load(run.state, weights_only=True)
    del state["results"]
    torch.save(state, run.state)


@pytest.mark.parametrize("damage", ["", "x\n", '{"step": 2}\n{"step": 4}\n', None])
def test_records_are_restored_from_the_state(damage: str | None, stopped: RunFolder, folder: Path) -> None:
    if damage is None:
        stopped.results.unlink()
    else:
        stopped.results.write_text(damage)
    train(SPEC, stopped.path.parent, device="cpu")
    assert numbers(stopped.path) == numbers(next((folder / "finished").iterdir()))


def test_records_of_0_1_0_are_kept_if_they_are_whole(stopped: RunFolder, folder: Path) -> None:
    as_0_1_0(stopped)
    train(SPEC, stopped.path.parent, device="cpu")
    assert numbers(stopped.path) == numbers(next((folder / "finished").iterdir()))


def test_a_removed_description_is_written_again(stopped: RunFolder, folder: Path) -> None:
    stopped.metadata_file.unlink()
    train(SPEC, stopped.path.parent, device="cpu")
    assert numbers(stopped.path) == numbers(next((folder / "finished").iterdir()))
    assert verify([stopped.path]).damaged == [] and RunFolder(stopped.path).identity


@pytest.mark.parametrize("edit", ["longer", "shorter", "removed", "first line removed"])
def test_lost_records_of_0_1_0_are_refused(edit: str, stopped: RunFolder, folder: Path) -> None:
    as_0_1_0(stopped)
    first, *rest = stopped.results.read_text().splitlines(keepends=True)
    changed = {
        "longer": first.replace('"step": 2', '"step": 20000') + "".join(rest) + "x",
        "shorter": first,
        "removed": None,
        "first line removed": "".join(rest) + " " * len(first),
    }[edit]
    if changed is None:
        stopped.results.unlink()
    else:
        stopped.results.write_text(changed)
    with pytest.raises(LostRecords, match=f"rm {stopped.state}"):
        train(SPEC, stopped.path.parent, device="cpu")
    stopped.state.unlink()  # as the message says
    train(SPEC, stopped.path.parent, device="cpu")
    assert numbers(stopped.path) == numbers(next((folder / "finished").iterdir()))


@pytest.mark.parametrize("lost", ["results.jsonl", "run.json", ".", "changed"])
def test_files_removed_while_training_are_noticed(lost: str, tmp_path: Path, folder: Path) -> None:
    def remove(phase: str, done: int, *_: object) -> None:
        if phase == "train" and done == 3:
            (run,) = tmp_path.iterdir()
            if lost.startswith("r"):
                (run / lost).unlink()
            elif lost == "changed":
                (run / "results.jsonl").write_text("")
            else:
                shutil.rmtree(run)

    with pytest.raises(LostRecords):
        train(SPEC, tmp_path, device="cpu", on_progress=remove)
    assert not any(RunFolder(run).finished for run in tmp_path.iterdir())
    run = train(SPEC, tmp_path, device="cpu")  # as the message says
    assert numbers(run) == numbers(next((folder / "finished").iterdir()))


def test_a_finished_run_without_its_last_record_says_so(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "finished", tmp_path / "runs")
    run = RunFolder(next((tmp_path / "runs").iterdir()))
    run.results.write_text("".join(run.results.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(LostRecords, match=f"rm {run.last}"):
        train(SPEC, tmp_path / "runs", device="cpu")
    run.last.unlink()  # as the message says
    train(SPEC, tmp_path / "runs", device="cpu")
    assert numbers(run.path) == numbers(next((folder / "finished").iterdir()))


def test_a_billion_threads_are_refused(stopped: RunFolder) -> None:
    values = json.loads(stopped.metadata_file.read_text())
    stopped.metadata_file.write_text(json.dumps({**values, "threads": 10**9}))
    with pytest.raises(AidgnError, match="threads"):
        train(SPEC, stopped.path.parent, device="cpu")


# What killed processes leave behind -----------------------------------------------------------------------------------


def test_a_finished_run_loses_what_a_killed_process_left(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "finished", tmp_path / "runs")
    run = RunFolder(next((tmp_path / "runs").iterdir()))
    left = [run.state, run.path / ".tmpAb3xYz", run.path / ".model.safetensors.123.tmp"]
    for path in left:
        path.write_text("x")
    kept = run.path / ".tmp-of-mine"
    kept.touch()
    train(SPEC, run.path.parent, device="cpu")
    assert not any(path.exists() for path in left) and kept.exists()


@pytest.mark.parametrize("where", ["objective", "<module>"])
def test_an_algorithm_that_exits_is_no_success(where: str, tmp_path: Path) -> None:
    body = {
        "objective": "    def objective(self, minibatches):\n        sys.exit(0)\n",
        "<module>": "    pass\nsys.exit(0)\n",
    }[where]
    file = tmp_path / "own.py"
    file.write_text(f"import sys\nfrom aidgn.algorithms.base import Algorithm\nclass Mine(Algorithm):\n{body}")
    arguments = [*TRAIN[:2], "--algorithm", f"{file}:Mine", *TRAIN[4:-4], "--out", str(tmp_path), "--device", "cpu"]
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    assert isinstance(result.exception, AidgnError) and str(file) in str(result.exception)
