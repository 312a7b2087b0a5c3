"""Damage in the files of a run is refused: single flipped bits, lost bytes, NaN; files of version 0.1.0 are read."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aidgn.cli import app
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.inference import load_model
from aidgn.inference.export import export
from aidgn.runs.checkpoints import (
    DamagedFile,
    read_state,
    read_values,
    read_weights,
    verify,
    write_state,
    write_values,
    write_weights,
)
from aidgn.runs.folder import RunFolder
from aidgn.sweeps.status import read_status
from aidgn.sweeps.store import SweepFolder
from aidgn.training import RunSpec, train
from tests.conftest import Tally

DigitsRun = Callable[..., Path]
FLIPS = 400
SPEC = RunSpec("digits", "ERM", "chalk", steps=6, eval_every=2, hyper_parameters={"batch_size": 8})
READERS: dict[str, Callable[[Path], Any]] = {
    "state.pt": read_state,
    "model.safetensors": read_weights,
    "last.safetensors": read_weights,
    "export.safetensors": read_weights,
    "novelty.json": read_values,
}


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped at step 5 of 6."""

    def stop(what: str, done: int, *_: object) -> None:
        if what == "train" and done == 5:
            raise Stop

    out = tmp_path_factory.mktemp("begun")
    with pytest.raises(Stop):
        train(SPEC, out, device="cpu", save_seconds=0.0, on_progress=stop)
    return next(out.iterdir())


@pytest.fixture(scope="module")
def run(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def files(run: Path, begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind of file."""
    folder = tmp_path_factory.mktemp("files")
    export(run, tmp_path_factory.mktemp("export"), onnx=False)
    shutil.copy(begun / "state.pt", folder)
    for name in ("model.safetensors", "last.safetensors", "novelty.json"):
        shutil.copy(run / name, folder)
    (exported,) = export(run, folder / "export", onnx=False).files[:1]
    shutil.copy(exported, folder / "export.safetensors")
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "runs" / run.name))


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal to the bit, of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        )
    return bool(one == other)


def flip(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip_one(path: Path) -> None:
    """Flip the lowest bit of the last byte, which belongs to a tensor."""
    path.write_bytes(flip(path.read_bytes(), 8 * (path.stat().st_size - 1)))


def as_0_1_0(path: Path) -> None:
    """Write the weights as version 0.1.0 did."""
    tensors, metadata = read_weights(path)
    for digest in ("records", "metadata"):
        metadata.pop(digest, None)
    save_file(tensors, path, metadata={"aidgn": json.dumps(metadata)})


# Flipped bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READERS)
def test_flipped_bits_are_refused_or_harmless(name: str, files: Path, tmp_path: Path, tally: Tally) -> None:
    content, read, dice = (files / name).read_bytes(), READERS[name], random.Random(name)
    wanted, path, size = read(files / name), tmp_path / name, 8 * len(content)
    bits = [dice.randrange(size) for _ in range(FLIPS)]
    bits += [dice.randrange(min(size, 8 * 4096)) for _ in range(FLIPS)]  # a safetensors file's header
    bits += [size - 1 - dice.randrange(min(size, 8 * 4096)) for _ in range(FLIPS)]  # an archive's directory
    refused, payload = 0, [0, 0]
    for number, bit in enumerate(bits):
        path.write_bytes(flip(content, bit))
        with tally(f"flipped bits in {name}"):
            try:
                found = read(path)
            except DamagedFile as error:
                assert str(path) in str(error)
                refused += 1
                payload[0] += number < FLIPS
            else:
                assert same(found, wanted), f"bit {bit} changed what is read"
        payload[1] += number < FLIPS
    print(f"{name}: {len(content)} bytes, {len(bits)} flips, {refused} refused, {len(bits) - refused} harmless")
    if name == "state.pt":  # the archive has padding and fields that nobody reads
        assert payload[0] > 0.9 * FLIPS
    else:
        assert refused == len(bits)


def test_a_state_with_the_attribute_of_a_folder_is_refused(files: Path, tmp_path: Path) -> None:
    content = bytearray((files / "state.pt").read_bytes())
    entry = content.rindex(b"PK\x01\x02")  # of the archive's directory; at byte 38 are the attributes
    content[entry + 38] ^= 0x10
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(DamagedFile):
        read_state(tmp_path / "state.pt")


def test_a_flipped_state_is_not_continued(begun: Path, tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(begun, tmp_path / begun.name)))
    content = folder.state.read_bytes()
    folder.state.write_bytes(flip(content, 4 * len(content)))
    with pytest.raises(DamagedFile, match="Remove it"):
        train(SPEC, tmp_path, device="cpu")
    folder.state.unlink()
    assert RunFolder(train(SPEC, tmp_path, device="cpu")).finished


@pytest.mark.parametrize(
    "command",
    [
        ["predict", "MODEL", "x.png"],
        ["export", "MODEL"],
        ["features", "MODEL"],
        ["diagnose", "MODEL"],
        ["adapt", "MODEL"],
        ["serve", "MODEL"],
    ],
    ids=lambda c: c[0],
)
def test_commands_refuse_a_damaged_model(command: list[str], copy: Path) -> None:
    flip_one(copy / "model.safetensors")
    result = CliRunner().invoke(app, [str(copy) if word == "MODEL" else word for word in command])
    assert isinstance(result.exception, AidgnError), result.output
    assert f"{copy / 'model.safetensors'} is damaged" in str(result.exception)


# The checksums --------------------------------------------------------------------------------------------------------


def test_the_checksum_of_weights(tmp_path: Path) -> None:
    """Against a sha256 of the same made with NumPy; whatever the order of the tensors."""
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(3), "c": torch.zeros(0, dtype=torch.bfloat16)}
    write_weights(tmp_path / "x.safetensors", tensors, {"step": 1, "algorithm": "ERM"})
    digest = hashlib.sha256(b'{"algorithm": "ERM", "step": 1}')
    for front, values in (
        (b'["a", "torch.int64", []]', np.array(3)),
        (b'["b", "torch.float32", [2, 3]]', np.arange(6, dtype=np.float32)),
        (b'["c", "torch.bfloat16", [0]]', np.zeros(0)),
    ):
        digest.update(front + values.tobytes())
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["aidgn"])["sha256"] == digest.hexdigest()
    assert same(load_file(tmp_path / "x.safetensors")["b"], tensors["b"])  # it is a plain safetensors file
    found, metadata = read_weights(tmp_path / "x.safetensors")
    assert metadata == {"step": 1, "algorithm": "ERM"} and all(same(found[name], tensors[name]) for name in tensors)


def test_a_state_is_a_plain_file_of_pytorch(tmp_path: Path) -> None:
    state = {"step": 3, "weights": {"a": torch.randn(100)}, "random": (1, [2.5, None])}
    write_state(tmp_path / "state.pt", state)
    assert same(torch.load(tmp_path / "state.pt", weights_only=True), state)
    assert same(read_state(tmp_path / "state.pt"), state)


def test_the_checksum_of_novelty(tmp_path: Path) -> None:
    path, values = tmp_path / "novelty.json", {"version": 1, "norms": [0.1, 2e-9], "angles": [3.0, 1.5]}
    write_values(path, values)
    digest = hashlib.sha256(b'{"angles": [3.0, 1.5], "norms": [0.1, 2e-09], "version": 1}').hexdigest()
    assert json.loads(path.read_text()) == {**values, "sha256": digest} and read_values(path) == values
    text = path.read_text()
    for changed in (text.replace("0.1", "0.2"), text.replace("sha256", "sha257"), ""):
        path.write_text(changed)
        with pytest.raises(DamagedFile):
            read_values(path)


def test_files_of_0_1_0_are_read(copy: Path, tmp_path: Path) -> None:
    pixels = load_dataset("digits").pixels[:20]
    wanted = load_model(copy, "cpu").predict(pixels)
    (exported,) = export(copy, tmp_path / "export", onnx=False).files[:1]
    for path in (copy / "model.safetensors", copy / "last.safetensors", exported):
        as_0_1_0(path)
    novelty = read_values(copy / "novelty.json")
    (copy / "novelty.json").write_text(json.dumps(novelty) + "\n")
    for path in (copy, exported):
        found = load_model(path, "cpu").predict(pixels)
        assert torch.equal(found.logits, wanted.logits) and found.warnings == wanted.warnings
    assert RunFolder(copy).finished
    found = verify([tmp_path])
    assert (found.files, found.unchecked, found.damaged) == (6, 6, [])


# Whether a run is finished --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, "one more"])
def test_a_shortened_last_file_is_not_finished(size: int | str, run: Path, copy: Path) -> None:
    content = (copy / "last.safetensors").read_bytes()
    (copy / "last.safetensors").write_bytes(content + b"\0" if isinstance(size, str) else content[:size])
    assert not RunFolder(copy).finished and RunFolder(run).finished
    counts = read_status(SweepFolder(copy.parent)).counts
    assert (counts["done"], counts["left"]) == (0, 1)


@pytest.mark.parametrize("content", [b"[]", b'{"a": 1}', b"{}", b"no JSON", b'{"a": {"data_offsets": []}}'])
def test_a_last_file_with_another_header_is_not_finished(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "last.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    assert not RunFolder(tmp_path).finished


def test_an_emptied_run_is_trained_again(run: Path, copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copy / "last.safetensors").write_bytes(b"")
    spec = RunSpec("digits", "AIDGN", "chalk", steps=4, eval_every=2, hyper_parameters={"batch_size": 8})
    assert train(spec, copy.parent, device="cpu") == copy
    assert "last.safetensors is damaged" in caplog.text
    for name in ("last.safetensors", "model.safetensors", "novelty.json"):
        assert (copy / name).read_bytes() == (run / name).read_bytes()


# NaN ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["checked", "0.1.0"])
def test_weights_that_are_no_numbers_are_refused(form: str, value: float, copy: Path) -> None:
    path = copy / "model.safetensors"
    tensors, metadata = read_weights(path)
    tensors["classifier.weight"][3, 2] = value
    if form == "checked":
        write_weights(path, tensors, metadata)
    else:
        save_file(tensors, path, metadata={"aidgn": json.dumps(metadata)})
    with pytest.raises(AidgnError, match=r"classifier\.weight holds NaN"):
        load_model(copy, "cpu")


def test_outputs_that_are_no_numbers_are_refused(copy: Path) -> None:
    """Finite weights of a damaged file of 0.1.0 may still overflow."""
    path = copy / "model.safetensors"
    tensors, metadata = read_weights(path)
    first = next(name for name, tensor in tensors.items() if tensor.ndim == 4)
    tensors[first] = torch.full_like(tensors[first], 3e38)
    save_file(tensors, path, metadata={"aidgn": json.dumps(metadata)})
    with pytest.raises(AidgnError, match="NaN or infinite outputs"):
        load_model(copy, "cpu").predict(load_dataset("digits").pixels[:2])


# aidgn status --verify ------------------------------------------------------------------------------------------------


def test_verify_names_every_damaged_file(copy: Path, begun: Path) -> None:
    runs = copy.parent
    shutil.copytree(begun, runs / "begun")
    done: list[tuple[int, int]] = []
    sound = verify([runs], lambda *numbers: done.append(numbers))
    assert (sound.files, sound.unchecked, sound.damaged) == (6, 0, []) and done[-1] == (6, 6)
    result = CliRunner().invoke(app, ["status", str(runs), "--verify"])
    assert result.exit_code == 0 and "6 files read, 0 damaged" in result.output

    as_0_1_0(copy / "model.safetensors")
    flip_one(copy / "last.safetensors")
    content = (runs / "begun" / "state.pt").read_bytes()
    (runs / "begun" / "state.pt").write_bytes(content[:-100])
    (copy / "novelty.json").write_bytes(b"")
    found = verify([runs])
    assert (found.files, found.unchecked) == (6, 1)
    assert {str(error).split(" is damaged")[0] for error in found.damaged} == {
        str(copy / "last.safetensors"),
        str(copy / "novelty.json"),
        str(runs / "begun" / "state.pt"),
    }
    result = CliRunner().invoke(app, ["status", str(runs), "--verify"])
    assert result.exit_code == 1
    assert "6 files read, 3 damaged, 1 unchecked (written by an earlier version)" in result.output
    assert all(str(error) in result.output for error in found.damaged)
    with pytest.raises(AidgnError):
        verify([runs / "nowhere"])


@pytest.mark.parametrize("edit", [("0.", "0.9"), ("{", "["), ('"step": 2', '"step": 1')])
def test_verify_notices_edited_records(edit: tuple[str, str], copy: Path) -> None:
    results = copy / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    times = [json.dumps({**json.loads(line), "step_time": 1.0, "eval_time": 2.0}) + "\n" for line in lines]
    results.write_text("".join(times))  # equal runs differ so
    assert verify([copy]).damaged == []
    results.write_text(lines[0].replace(*edit, 1) + "".join(lines[1:]))
    assert [str(error).split(" is damaged")[0] for error in verify([copy]).damaged] == [str(results)]


@pytest.mark.parametrize(
    "edit", [("AIDGN", "ERM"), ("chalk", "chak"), ('"3"', '"x"'), ('"steps": 4', '"steps": 5'), ("{", "[")]
)
def test_verify_notices_an_edited_description(edit: tuple[str, str], copy: Path) -> None:
    description = copy / "run.json"
    text = description.read_text()
    values = json.loads(text)
    description.write_text(json.dumps({**values, "cpu": "another", "root": "/elsewhere", "torch": "1"}))  # the machine
    assert verify([copy]).damaged == []
    description.write_text(text.replace(*edit, 1))
    assert [str(error).split(" is damaged")[0] for error in verify([copy]).damaged] == [str(description)]


@pytest.mark.parametrize("name", ["features.npz", "predictions.npz"])
def test_verify_notices_damaged_arrays(name: str, copy: Path) -> None:
    """The checksums do not cover all of the archive's directory; a flipped name there is missing to every reader."""
    arrays = {"features": np.random.default_rng(0).normal(size=(20, 8)), "files": np.array(["a", "b"])}
    np.savez(copy / name, **arrays)
    content = (copy / name).read_bytes()
    assert verify([copy]).damaged == []
    dice = random.Random(0)
    for _ in range(300):
        (copy / name).write_bytes(flip(content, dice.randrange(8 * len(content))))
        if [str(error).split(" is damaged")[0] for error in verify([copy]).damaged] != [str(copy / name)]:
            with suppress(KeyError), np.load(copy / name) as file:
                assert all(np.array_equal(file[key], value) for key, value in arrays.items())
    for size in (0, 10, len(content) // 2):
        (copy / name).write_bytes(content[:size])
        assert len(verify([copy]).damaged) == 1
