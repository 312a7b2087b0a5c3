"""A run: same numbers whatever interrupts it, records in DomainBed's shape, and clear words when something is wrong."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from aidgn.devices import describe_cpu
from aidgn.errors import AidgnError
from aidgn.runs.checkpoints import DamagedFile, read_weights
from aidgn.runs.folder import RunFolder, RunWriter
from aidgn.runs.record_log import records_digest
from aidgn.training import RunSpec, train
from tests.conftest import Tally

Start = Callable[..., Any]
STEPS, EVERY = 12, 4


def spec(**changes: object) -> RunSpec:
    values = {
        "dataset": "digits",
        "algorithm": "AIDGN",
        "target": "chalk",
        "steps": STEPS,
        "eval_every": EVERY,
        "hyper_parameters": {"batch_size": 8, "resnet_dropout": 0.1},
    }
    return RunSpec(**{**values, **changes})  # type: ignore[arg-type]


def without_times(folder: Path) -> list[dict]:
    return [
        {key: value for key, value in record.items() if not key.endswith("_time")}
        for record in RunFolder(folder).records
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(spec(), tmp_path_factory.mktemp("undisturbed"), save_seconds=0.0, device="cpu")


def test_records_have_domainbeds_shape(undisturbed: Path) -> None:
    records = without_times(undisturbed)
    assert [record["step"] for record in records] == [4, 8, 12]
    for record in records:
        assert record["args"]["dataset"] == "digits" and record["args"]["algorithm"] == "AIDGN"
        assert record["args"]["test_envs"] == [1] and record["args"]["trial_seed"] == 0
        assert record["args"]["hparams_seed"] == 0 and record["hparams"]["batch_size"] == 8
        accuracies = {key for key in record if key.endswith("_acc")}
        assert accuracies == {"env0_out_acc", "env1_in_acc", "env1_out_acc", "env2_out_acc", "env3_out_acc"}
        assert all(0 <= record[key] <= 1 for key in accuracies)
        assert record["loss"] == pytest.approx(record["classification"] + record["regularizer"], rel=1e-5)
    assert sorted(path.name for path in undisturbed.iterdir() if not path.name.startswith(".")) == [
        "last.safetensors",
        "log.txt",
        "model.safetensors",
        "novelty.json",
        "results.jsonl",
        "run.json",
    ]


def test_selected_model_is_the_best_on_source_validation(undisturbed: Path) -> None:
    validation = [np.mean([record[f"env{i}_out_acc"] for i in (0, 2, 3)]) for record in without_times(undisturbed)]
    assert read_weights(undisturbed / "model.safetensors")[1]["step"] == (4, 8, 12)[int(np.argmax(validation))]
    digest = records_digest((undisturbed / "results.jsonl").read_bytes())
    machine = ("root", "threads", "device", "cpu", "aidgn", "torch", "python")
    values = json.loads((undisturbed / "run.json").read_text())
    described = json.dumps({key: values[key] for key in values if key not in machine}, sort_keys=True)
    metadata = hashlib.sha256(described.encode()).hexdigest()
    wanted = {"algorithm": "AIDGN", "step": STEPS, "records": digest, "metadata": metadata}
    assert read_weights(undisturbed / "last.safetensors")[1] == wanted


@pytest.mark.parametrize(
    "moments",
    [
        ("train 4", "train 6", "train 12"),
        pytest.param(("train 1", "train 5", "train 8", "train 11"), marks=pytest.mark.slow),
    ],
)
def test_killed_and_continued_equals_undisturbed(
    moments: tuple[str, ...], undisturbed: Path, start: Start, tmp_path: Path
) -> None:
    for moment in moments:
        process = start(spec(), tmp_path)
        process.wait_for(moment)
        time.sleep(0.003 * len(moment))  # into the saving of the state, the writing of a record, or the next step
        process.send_signal(signal.SIGKILL)
        process.wait()
    folder = train(spec(), tmp_path, device="cpu")
    assert folder.name == undisturbed.name
    assert without_times(folder) == without_times(undisturbed)
    for name in ("model.safetensors", "last.safetensors"):
        ours, theirs = load_file(folder / name), load_file(undisturbed / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


KILLS = """
import itertools, os, random, signal, sys, time
from aidgn.training import RunSpec, train

dice, killed, long = random.Random(0), 0, float("inf")
for number in itertools.count():
    for attempt in itertools.count():
        began, process = time.monotonic(), os.fork()  # this process has imported everything already
        if not process:
            train(eval(sys.argv[1]), f"{sys.argv[2]}/{number}", save_seconds=0.0, device="cpu")
            os._exit(0)
        moment = began + (dice.uniform(0, long) if number and killed < 20 else float("inf"))
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            time.sleep(0.002)
            if time.monotonic() > moment:
                os.kill(process, signal.SIGKILL)
        if not ended[1]:
            break
        assert ended[1] == signal.SIGKILL
        killed += 1
    if not attempt:
        long = min(long, time.monotonic() - began)  # the first run, undisturbed, says how long one takes
    if killed == 20:
        break
"""


@pytest.mark.slow
def test_killed_at_random_moments(undisturbed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, repr(spec()), str(tmp_path)], timeout=900, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    folders = list(tmp_path.glob(f"*/{undisturbed.name}"))
    assert len(folders) == len(list(tmp_path.iterdir())) > 1
    for folder in folders:
        assert without_times(folder) == without_times(undisturbed)
        for name in ("model.safetensors", "last.safetensors"):
            assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()


def test_ctrl_c_saves_and_the_same_command_goes_on(undisturbed: Path, start: Start, tmp_path: Path) -> None:
    process = start(spec(), tmp_path)
    process.wait_for("train 5")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0 and "The same command continues" in errors
    assert without_times(train(spec(), tmp_path, device="cpu")) == without_times(undisturbed)


def test_another_processor_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = interrupted(tmp_path)
    before = folder.metadata.to_dict()
    assert before["cpu"] == describe_cpu()
    (folder.path / "run.json").write_text(json.dumps({**before, "cpu": "AVX9, Another"}))
    train(spec(), tmp_path, device="cpu")
    (warning,) = caplog.messages
    assert "AVX9, Another" in warning and describe_cpu() in warning
    assert "AVX9, Another" in folder.log_file.read_text()


@pytest.mark.parametrize("cpu", ["", None])
def test_the_same_processor_or_none_known_is_silent(
    cpu: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = interrupted(tmp_path)
    if cpu is not None:  # as version 0.1.0 wrote it
        (folder.path / "run.json").write_text(json.dumps({**folder.metadata.to_dict(), "cpu": cpu}))
    train(spec(), tmp_path, device="cpu")
    assert not caplog.messages


def test_a_run_from_the_beginning_describes_this_processor(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    (folder.path / "run.json").write_text(json.dumps({**folder.metadata.to_dict(), "cpu": "AVX9, Another"}))
    folder.state.unlink()
    assert RunFolder(train(spec(), tmp_path, device="cpu")).metadata.cpu == describe_cpu()


def shapes(*folders: Path) -> None:
    """The same little images in every folder."""
    rng = np.random.default_rng(0)
    for domain in "ab":
        for name in ("dark", "light"):
            for number in range(6):
                pixels = rng.integers(0, 128, (24, 24, 3)) + (128 if name == "light" else 0)
                for folder in folders:
                    (folder / domain / name).mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / domain / name / f"{number}.png")


def on(folder: Path) -> RunSpec:
    return RunSpec(
        str(folder),
        "ERM",
        "b",
        steps=2,
        eval_every=2,
        backbone="small",
        image_size=28,
        hyper_parameters={"batch_size": 2},
    )


def test_same_numbers_from_another_folder_of_the_same_images(tmp_path: Path) -> None:
    folders = [tmp_path / "here" / "shapes", tmp_path / "elsewhere" / "shapes", tmp_path / "renamed"]
    shapes(*folders)
    runs = [
        train(on(folder), tmp_path / f"out{number}", device="cpu", workers=1 + number)
        for number, folder in enumerate(folders)
    ]
    assert runs[0].name == runs[1].name
    assert without_times(runs[0]) == without_times(runs[1])
    renamed = [{**record, "args": {**record["args"], "dataset": "shapes"}} for record in without_times(runs[2])]
    assert renamed == without_times(runs[0])


def test_other_images_under_the_same_names_are_another_run(tmp_path: Path) -> None:
    shapes(tmp_path / "shapes")
    first = train(on(tmp_path / "shapes"), tmp_path / "out", device="cpu")
    Image.new("RGB", (24, 24), "red").save(tmp_path / "shapes" / "a" / "dark" / "0.png")
    second = train(on(tmp_path / "shapes"), tmp_path / "out", device="cpu")
    assert first != second and RunFolder(first).finished and RunFolder(second).finished


def test_finished_by_another_process_meanwhile(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process that looked before the first was done finds the finished run once it has the lock."""
    folder = tmp_path / undisturbed.name
    shutil.copytree(undisturbed, folder)
    (folder / ".state.pt.1.tmp").write_text("half written by a process that was killed")
    answers = iter([False])
    finished = RunFolder.finished
    monkeypatch.setattr(
        RunFolder, "finished", property(lambda self: next(answers, None) is not False and finished.fget(self))
    )
    assert train(spec(), tmp_path, device="cpu") == folder
    assert without_times(folder) == without_times(undisturbed)
    assert not (folder / ".state.pt.1.tmp").exists()


def test_a_finished_run_is_left_as_it_is(undisturbed: Path) -> None:
    before = (undisturbed / "results.jsonl").stat().st_mtime_ns
    assert train(spec(), undisturbed.parent, device="cpu") == undisturbed
    assert (undisturbed / "results.jsonl").stat().st_mtime_ns == before


def test_what_identifies_a_run() -> None:
    from aidgn.data import load_dataset
    from aidgn.runs.run_id import folder_name

    dataset = load_dataset("digits")

    def name(one: RunSpec) -> str:
        return folder_name(one.resolved(dataset).identity(dataset, ""))

    assert name(spec(target="C")) == name(spec())  # the letter of chalk
    assert name(spec(balance="none")) == name(spec())
    assert name(spec(hyper_parameters={"batch_size": "8", "resnet_dropout": 0.1})) == name(spec())
    others = [
        spec(algorithm="ERM"),
        spec(target="ink"),
        spec(trial=1),
        spec(draw=1),
        spec(steps=13),
        spec(hyper_parameters={"batch_size": 9}),
        spec(target=("chalk", "ink")),
    ]
    assert len({name(spec()), *map(name, others)}) == 1 + len(others)


def test_learning_rate_is_halved_at_the_milestones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With milestones (2, 4) the third step is the first at half the rate, the fifth the first at a quarter."""
    from aidgn.training.trainer import Trainer

    rates, train_step = [], Trainer.train_step

    def noted(self: Trainer, minibatches: list) -> None:
        train_step(self, minibatches)
        rates.append(self.algorithm.optimizers["main"].param_groups[0]["lr"])

    monkeypatch.setattr(Trainer, "train_step", noted)
    train(spec(steps=6, lr_milestones=(2, 4), hyper_parameters={"lr": 0.01, "batch_size": 2}), tmp_path, device="cpu")
    assert rates == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]


def test_the_catalogue_sets_evaluation_frequency_and_milestones() -> None:
    from dataclasses import replace

    from aidgn.data import DATASETS, load_dataset

    digits = load_dataset("digits")
    pacs = replace(digits, info=replace(DATASETS["PACS"], domains=digits.info.domains))
    aidgn = RunSpec("PACS", "AIDGN", "chalk").resolved(pacs)
    assert (aidgn.steps, aidgn.eval_every, aidgn.lr_milestones) == (5000, 50, (2000, 4000))
    assert RunSpec("PACS", "ERM", "chalk").resolved(pacs).lr_milestones == ()  # the paper's schedule is for its model
    assert aidgn.backbone == "resnet50.tv_in1k" and aidgn.hyper_parameters["lr"] == 2.5e-5


# What can go wrong ------------------------------------------------------------------------------------------------


def test_two_processes_on_one_folder(start: Start, tmp_path: Path) -> None:
    process = start(spec(steps=2000), tmp_path)
    process.wait_for("train 1")
    with pytest.raises(AidgnError, match="Another process"):
        train(spec(steps=2000), tmp_path, device="cpu")
    process.kill()
    process.wait()


def test_what_never_begins_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, told in (
        ("Fishr", "Fishr begins after step 1500, this run has 12"),
        ("EQRM", "--set eqrm_burnin_iters=N"),
        ("ERM", ""),
    ):
        caplog.clear()
        train(spec(algorithm=name), tmp_path, device="cpu")
        assert told in caplog.text if told else not caplog.text
    settings = {"batch_size": 8, "penalty_anneal_iters": 4}
    train(spec(algorithm="Fishr", hyper_parameters=settings), tmp_path, device="cpu")
    assert not caplog.text
    falling = spec(algorithm="ERM", average="swad", steps=40, eval_every=10, hyper_parameters={"batch_size": 16})
    train(falling, tmp_path, device="cpu")  # to the end
    assert "--average swad averaged nothing: the validation loss had no valley" in caplog.text
    caplog.clear()
    train(spec(algorithm="ERM", average="sma"), tmp_path, device="cpu")
    (told,) = caplog.messages
    assert "--average sma begins after step 100 at the earliest, this run has 12" in told


def test_records_of_averaged_weights_have_domainbeds_names_too(tmp_path: Path) -> None:
    for average in (None, "sma"):
        *_, record = without_times(train(spec(algorithm="DANN", average=average), tmp_path, device="cpu"))
        assert record["hparams"]["lambda"] == 1.0 and "dann_lambda" not in record["hparams"]


@pytest.mark.parametrize("save_seconds", [0.0, 60.0])  # before a record and with it
def test_a_term_that_is_not_finite_is_named(save_seconds: float, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
            from aidgn.algorithms.erm import ERM
            class Mine(ERM):
                def objective(self, m):
                    loss = super().objective(m)['loss']
                    return {'loss': loss, 'entropy': loss.detach() / 0}
            """)
    )
    with pytest.raises(AidgnError, match=r"entropy.* Mine .* step 1\."):
        train(spec(algorithm=f"{tmp_path}/own.py:Mine"), tmp_path / "runs", device="cpu", save_seconds=save_seconds)


def test_nan_stops_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""
                from aidgn.algorithms.erm import ERM
                class Breaks(ERM):
                    def objective(self, minibatches):
                        factor = float("nan") if self.updates == 7 else 1
                        return {"loss": super().objective(minibatches)["loss"] * factor}
                """)
    )
    broken = spec(algorithm=f"{tmp_path / 'own.py'}:Breaks")
    with pytest.raises(AidgnError, match=r"step 7\..*lr="):
        train(broken, tmp_path / "out", device="cpu", save_seconds=0.0)
    folder = RunFolder(next((tmp_path / "out").iterdir()))
    assert not folder.finished and [record["step"] for record in folder.records] == [4]
    state = torch.load(folder.state, weights_only=True)
    assert state["step"] == 6
    assert all(torch.isfinite(tensor).all() for tensor in state["algorithm"]["weights"].values())


def test_an_own_update_may_give_numbers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""
                from aidgn.algorithms.erm import ERM
                class Numbers(ERM):
                    def update(self, minibatches):
                        return {"loss": super().update(minibatches)["loss"].item(), "updates": self.updates}
                """)
    )
    folder = train(spec(algorithm=f"{tmp_path / 'own.py'}:Numbers", steps=2), tmp_path / "out", device="cpu")
    plain = train(spec(algorithm="ERM", steps=2), tmp_path / "out", device="cpu")
    (numbers,), (tensors,) = RunFolder(folder).records, RunFolder(plain).records
    assert numbers["updates"] == 1.5 and numbers["loss"] == pytest.approx(tensors["loss"])


class Malicious:
    def __reduce__(self) -> tuple:
        return os.system, ("touch pwned",)


def interrupted(out: Path, **changes: object) -> RunFolder:
    def stop(what: str, done: int, total: int, record: dict | None) -> None:
        if what == "train" and done == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(spec(**changes), out, save_seconds=0.0, device="cpu", on_progress=stop)
    return RunFolder(next(out.iterdir()))


@pytest.mark.parametrize("balance", ["sampling", "weights"])
def test_a_balanced_run_continues_where_it_stopped(balance: str, undisturbed: Path, tmp_path: Path) -> None:
    stopped = interrupted(tmp_path / "stopped", balance=balance)
    folders = [train(spec(balance=balance), out, device="cpu") for out in (stopped.path.parent, tmp_path / "whole")]
    assert folders[0] == stopped.path and without_times(folders[0]) == without_times(folders[1])
    assert without_times(folders[0]) != without_times(undisturbed) and folders[0].name != undisturbed.name
    assert stopped.identity["balance"] == balance and "balance" not in RunFolder(undisturbed).identity


def test_malicious_and_damaged_states_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = interrupted(tmp_path / "out")
    good = folder.state.read_bytes()
    torch.save({"step": Malicious()}, folder.state)
    with pytest.raises(DamagedFile):
        train(spec(), tmp_path / "out", device="cpu")
    assert not Path("pwned").exists()
    folder.state.write_bytes(good[: len(good) // 2])
    with pytest.raises(DamagedFile):
        train(spec(), tmp_path / "out", device="cpu")


def lock(folder: RunWriter) -> None:
    with folder.locked():
        pass


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (".lock", lock),
        ("log.txt", lambda folder: folder.log("text")),
        ("results.jsonl", lambda folder: folder.append({"step": 1})),
        ("results.jsonl", RunWriter.load),
    ],
)  # cuts the records back to the state
def test_links_in_a_run_folder_are_not_followed(
    name: str, write: Callable[[RunWriter], object], tmp_path: Path
) -> None:
    folder, victim = RunWriter(tmp_path / "run"), tmp_path / "victim"
    folder.path.mkdir()
    victim.write_text("of the user")
    folder.save({"step": 0})  # when there were no records
    (folder.path / name).symlink_to(victim)
    with pytest.raises(AidgnError, match="symbolic link"):
        write(folder)
    assert victim.read_text() == "of the user"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("log.txt", lambda folder: folder.log("text")),
        ("results.jsonl", lambda folder: folder.append({"step": 1})),
        ("results.jsonl", RunWriter.load),
    ],
)
def test_a_file_with_a_second_name_is_not_written(
    name: str, write: Callable[[RunWriter], object], tmp_path: Path
) -> None:
    folder, victim = RunWriter(tmp_path / "run"), tmp_path / "victim"
    folder.path.mkdir()
    victim.write_text("of the user")
    folder.save({"step": 0})
    (folder.path / name).hardlink_to(victim)
    with pytest.raises(AidgnError, match="hard link"):
        write(folder)
    assert victim.read_text() == "of the user"


def test_a_link_of_a_temporary_name_is_replaced(tmp_path: Path) -> None:
    folder, victim = RunWriter(tmp_path / "run"), tmp_path / "victim"
    folder.path.mkdir()
    victim.write_text("of the user")
    (folder.path / f".state.pt.{os.getpid()}.tmp").symlink_to(victim)
    folder.save({"step": 3})
    assert victim.read_text() == "of the user"
    state = folder.load()
    assert state and state["step"] == 3


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "Input/output error")])
def test_unreadable_sound_state_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    folder = RunWriter(tmp_path)
    folder.save({"step": 1})

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises((MemoryError, AidgnError)) as caught:
        folder.load()
    assert "Remove" not in str(caught.value) and folder.state.exists()


def test_a_folder_of_another_specification(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    text = json.loads((folder.path / "run.json").read_text())
    text["identity"]["trial"] = 7
    (folder.path / "run.json").write_text(json.dumps(text))
    with pytest.raises(AidgnError, match=r"another specification.*trial"):
        train(spec(), tmp_path, device="cpu")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk where no small file system can be mounted."""
    import resource

    folder = interrupted(tmp_path)
    state = folder.state.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(AidgnError, match="could not be written"):
            train(spec(), tmp_path, device="cpu", save_seconds=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.state.read_bytes() == state
    assert [path.name for path in folder.path.iterdir() if path.name.endswith(".tmp")] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_really_full_disk(undisturbed: Path, tmp_path: Path, tally: Tally) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system here")
    try:
        for size in range(100, 1300, 150):  # kB: ends at another stage of the run each time
            subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
            with tally("full disks"), pytest.raises(AidgnError, match="The disk is full"):
                train(spec(), disk, save_seconds=0.0, device="cpu")
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        with tally("full disks"):
            train(spec(), disk, device="cpu")
            assert without_times(next(disk.glob("digits*"))) == without_times(undisturbed)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "AIDNG"}, "Did you mean AIDGN"),
        ({"hyper_parameters": {"gama": 1}}, "Did you mean gamma"),
        ({"hyper_parameters": {"lr": "fast"}}, "lr=fast is not a number"),
        ({"hyper_parameters": {"lr": -1}}, "out of range"),
        ({"hyper_parameters": {"batch_size": 2.5}}, "not a whole number"),
        (
            {"algorithm": "CORAL", "hyper_parameters": {"batch_size": 1}},
            "batch_size is 1; expected at least 2 for CORAL",
        ),
        ({"hyper_parameters": {"ratio": "exactly"}}, "one of linear, exact"),
        ({"target": "chark"}, "Did you mean chalk"),
        ({"target": ("ink", "chalk", "poster", "outline")}, "none is left to train on"),
        ({"steps": 0}, "steps is 0"),
        ({"backbone": "resnet5O.tv_in1k"}, "resnet50"),
        ({"dataset": "digts"}, "Did you mean digits"),
        ({"dataset": "/no/such/folder"}, "does not exist"),
    ],
)
def test_mistakes_are_named(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match=message):
        train(spec(**changes), tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_batch_that_does_not_fit(tmp_path: Path) -> None:
    """In a process whose memory is limited to little more than it has."""
    script = """
import resource, sys
from pathlib import Path
from aidgn.training import RunSpec, train
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))
train(RunSpec("digits", "ERM", "chalk", steps=2, hyper_parameters={"batch_size": 200_000}), sys.argv[1], device="cpu")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert "OutOfMemory: Out of memory with 3 x 200000 images of 28 pixels" in done.stderr
    assert "Try --batch-size 100000" in done.stderr


def test_an_average_of_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(spec(average="sma", steps=2, eval_every=2), tmp_path, device="cpu")
    assert "this run has 2 steps: nothing is averaged" in caplog.text
    caplog.clear()
    train(spec(average="swad", steps=4, eval_every=2), tmp_path, device="cpu")  # two evaluations are no valley
    assert "swad begins after step 4 at the earliest, this run has 4 steps: nothing is averaged" in caplog.text
    caplog.clear()
    train(spec(average="swad", steps=5, eval_every=2), tmp_path, device="cpu")
    assert "begins" not in caplog.text
