"""A loaded model predicts what the run's own evaluation predicted, from every kind of image, and refuses what does not
fit."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import interpolate

from aidgn import backbones
from aidgn.data import load_dataset
from aidgn.data.splits import train_val_indices
from aidgn.errors import AidgnError
from aidgn.inference import Model, find_images, load_model
from aidgn.inference import image_stream as streaming
from aidgn.inference.prediction import softmax
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import DamagedMetadata
from aidgn.training import RunSpec, train

DigitsRun = Callable[..., Path]
DIGITS = load_dataset("digits")
CHALK = DIGITS.domains.index("chalk")
INSIDE = DIGITS.indices(CHALK)[
    train_val_indices(len(DIGITS.indices(CHALK)), 0, CHALK)[0]
]  # the target's `in` split, trial 0
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def run(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return load_model(run, device="cpu")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def accuracy(model: Model, images: object, labels: np.ndarray) -> float:
    found = model.predict(images).labels  # type: ignore[arg-type]
    return float(np.mean([model.classes[label] == name for label, name in zip(labels, found, strict=True)]))


def recorded(folder: Path, domain: int) -> float:
    """env_in_acc of the step with the best mean accuracy on the sources' `out` splits; the first of equals."""
    records = RunFolder(folder).records
    targets = records[0]["args"]["test_envs"]
    sources = [i for i in range(len(records[0]["args"]["domains"])) if i not in targets]
    best = max(records, key=lambda record: np.mean([record[f"env{i}_out_acc"] for i in sources]))
    return best[f"env{domain}_in_acc"]


# The run's own evaluation --------------------------------------------------------------------------------------------


def test_accuracy_is_the_recorded_one_for_arrays_and_files(run: Path, model: Model, tmp_path: Path) -> None:
    assert (model.algorithm, model.classes, model.domains, model.image_size) == (
        "AIDGN",
        DIGITS.classes,
        DIGITS.domains,
        28,
    )
    wanted = recorded(run, CHALK)
    assert 0.05 < wanted < 0.99
    assert accuracy(model, DIGITS.pixels[INSIDE], DIGITS.labels[INSIDE]) == pytest.approx(wanted, abs=1e-9)
    paths = [tmp_path / f"{index}.png" for index in INSIDE]
    for path, index in zip(paths, INSIDE, strict=True):
        Image.fromarray(DIGITS.pixels[index]).save(path)
    assert accuracy(model, paths, DIGITS.labels[INSIDE]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    "changes",
    [{"algorithm": "ARM"}, {"algorithm": "MTL"}, {"algorithm": "SagNet"}, {"algorithm": "ERM", "average": "sma"}],
    ids=str,
)
def test_algorithms_of_every_kind(changes: dict[str, str], digits_run: DigitsRun, tmp_path: Path) -> None:
    folder = digits_run(tmp_path, steps=2, **changes)
    model = load_model(folder, device="cpu")
    assert model.algorithm == changes["algorithm"] + ("+SMA" if "average" in changes else "")
    assert accuracy(model, DIGITS.pixels[INSIDE], DIGITS.labels[INSIDE]) == pytest.approx(recorded(folder, CHALK))


def test_folder_of_images_larger_than_the_cache_stores(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    root = tmp_path / "photos"
    for domain in ("a", "b", "c"):
        for level, name in ((110, "dark"), (140, "light")):
            (root / domain / name).mkdir(parents=True)
            for number in range(8):
                noise = random.normal(level, 40, (5, 7, 3)).clip(0, 255).astype(np.uint8)
                size = (300 + 40 * number, 700 - 50 * number)
                Image.fromarray(noise).resize(size).save(root / domain / name / f"{number}.jpg")
    folder = train(
        RunSpec(str(root), "ERM", "c", steps=2, eval_every=1, backbone="small", hyper_parameters={"batch_size": 2}),
        tmp_path / "runs",
        device="cpu",
    )
    model, data = load_model(folder, device="cpu"), load_dataset(root)
    inside = data.indices(2)[train_val_indices(len(data.indices(2)), 0, 2)[0]]
    paths = [root / data.files[index] for index in inside]
    assert accuracy(model, paths, data.labels[inside]) == pytest.approx(recorded(folder, 2), abs=1e-9)

    # In memory they are shrunk once to 256 pixels and then to 224; close to one exact antialiased resizing.
    arrays = [np.asarray(Image.open(path)) for path in paths[:3]]
    exact = torch.cat(
        [
            interpolate(
                torch.from_numpy(array.copy()).permute(2, 0, 1)[None].float(),
                (224, 224),
                mode="bilinear",
                antialias=True,
            )
            for array in arrays
        ]
    )
    with torch.no_grad():
        x = (exact / 255 - MEAN[:, None, None]) / STD[:, None, None]
        wanted = model.network.predict(x).softmax(1)
    for images in (arrays, paths[:3]):
        np.testing.assert_allclose(model.predict(images).probabilities, wanted, atol=0.01)


def test_strides_are_those_of_the_initial_weights(digits_run: DigitsRun, tmp_path: Path) -> None:
    weights = tmp_path / "tiny.safetensors"
    plain = backbones.create("test_resnet", weights="none")
    save_file(plain.state_dict(), weights, {"architecture": "test_resnet", "downsample": "stride on the 1x1 conv"})
    folder = digits_run(tmp_path / "runs", "ERM", steps=1, backbone="test_resnet", weights=str(weights))
    weights.unlink()
    model = load_model(folder, device="cpu")
    strides = [net.get_submodule("layer3.0.conv1").stride for net in (plain, model.network.featurizer.network)]
    assert strides == [(1, 1), (2, 2)]
    assert accuracy(model, DIGITS.pixels[INSIDE], DIGITS.labels[INSIDE]) == pytest.approx(recorded(folder, CHALK))
    about = json.loads((folder / "run.json").read_text())
    del about["stride_first"]
    (folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(AidgnError, match="stride_first"):
        load_model(folder)


# Kinds of images -----------------------------------------------------------------------------------------------------


def test_every_kind_of_image_gives_the_same(model: Model, tmp_path: Path) -> None:
    pixels = DIGITS.pixels[INSIDE[0]]
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "turned.png", exif=exif(6))  # 6: turn by 90 degrees to the right
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    opaque = np.concatenate([pixels, np.full((28, 28, 1), 255, np.uint8)], axis=2)
    lazy = Image.open(tmp_path / "turned.png")
    images = [
        str(tmp_path / "a.png"),
        tmp_path / "turned.png",
        Image.fromarray(pixels),
        pixels,
        tensor,
        tensor / 255,
        (tensor / 255).double(),
        opaque,
        np.ascontiguousarray(pixels[::-1])[::-1],
        lazy,
        lazy,
    ]
    logits = model.logits(images)
    assert logits.shape == (len(images), 10) and logits.dtype == torch.float32
    with torch.no_grad():
        wanted = model.network.predict((((tensor / 255).permute(1, 2, 0) - MEAN) / STD).permute(2, 0, 1)[None])
    torch.testing.assert_close(logits, wanted.expand_as(logits), rtol=1e-5, atol=1e-5)

    grey = pixels[:, :, 0]
    logits = model.logits([grey, grey[:, :, None], torch.from_numpy(grey), np.stack([grey] * 3, axis=2)])
    torch.testing.assert_close(logits, logits[-1:].expand_as(logits), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[0], wanted[0], atol=1e-2)


def exif(orientation: int) -> Image.Exif:
    data = Image.Exif()
    data[0x0112] = orientation
    return data


def test_one_many_and_none(model: Model) -> None:
    many = DIGITS.pixels[INSIDE[:150]]  # more than a batch
    found = model.predict(many)
    assert len(found) == 150 and found.probabilities.shape == (150, 10)
    np.testing.assert_allclose(found.probabilities.sum(1), 1)
    logits = model.logits(iter(many)).double().numpy()
    np.testing.assert_allclose(found.probabilities, np.exp(logits) / np.exp(logits).sum(1, keepdims=True), atol=1e-6)
    one = model.predict(many[77])
    assert one.labels == [found.labels[77]] and one.probabilities[0] == pytest.approx(found.probabilities[77], abs=1e-5)
    best = found.top(3)[77]
    assert best[0] == (found.labels[77], found.probabilities[77].max())
    assert [p for _, p in best] == sorted(found.probabilities[77])[:-4:-1]
    assert len(model.predict([])) == 0 and model.predict([]).probabilities.shape == (0, 10)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((28, 28)) - 1, "from -1 to -1"),
        (np.zeros((28, 28, 3), np.int64), "int64"),
        (np.zeros((3, 28, 28), np.uint8), r"\[H, W, 3\]"),
        (np.zeros((0, 5, 3), np.uint8), "shape"),
        (torch.zeros(28, 28, 3, dtype=torch.uint8), r"\[3, H, W\]"),
        (torch.full((3, 4, 4), torch.nan), "nan"),
        (7, "int"),
        ("nowhere.png", r"nowhere\.png"),
    ],
)
def test_invalid_images(image: object, words: str, model: Model) -> None:
    with pytest.raises(AidgnError, match=words) as error:
        model.predict([np.zeros((5, 5), np.uint8), image])  # type: ignore[list-item]
    assert "nowhere" in words or "Image 1" in str(error.value)


@pytest.mark.parametrize(("given", "kind"), [(None, "NoneType"), (7, "int"), (b"a.png", "bytes")])
def test_neither_an_image_nor_several(given: object, kind: str, model: Model) -> None:
    with pytest.raises(AidgnError, match=rf"Image 0\b.* a {kind}"):
        model.predict(given)  # type: ignore[arg-type]


def test_broken_files_are_reported_and_skipped(model: Model, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.png") for number in range(200)]
    for number, path in enumerate(paths):
        Image.fromarray(DIGITS.pixels[INSIDE[number]]).save(path)
    for number in (0, 77, 199):
        Path(paths[number]).write_bytes(Path(paths[number]).read_bytes()[:100])
    broken: list[object] = []
    kept = [name for names, _ in model.batches(paths, lambda image, _: broken.append(image)) for name in names]
    assert broken == [paths[number] for number in (0, 77, 199)]
    assert kept == [path for path in paths if path not in broken]


def test_worker_processes_and_batches_in_flight_change_nothing(
    digits_run: DigitsRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An algorithm whose predictions depend on the other images of a batch."""
    model = load_model(digits_run(tmp_path / "runs", "ARM", steps=2), device="cpu")
    paths = [str(tmp_path / f"{number}.png") for number in range(260)]
    for number, path in enumerate(paths):
        Image.fromarray(DIGITS.pixels[INSIDE[number]]).resize((20 + number % 12, 30)).save(path)
    Path(paths[70]).write_bytes(b"")
    kept = [path for path in paths if path != paths[70]]
    wanted = model.logits([np.asarray(Image.open(path)) for path in kept])
    assert (wanted - model.logits(kept[1:2]))[1].abs().max() > 1e-4

    for kind, cores, in_flight in (("Threads", 1, 0), ("Workers", 2, 2)):
        used, submit = list[int](), getattr(streaming, kind).submit
        monkeypatch.setattr(streaming, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(
            getattr(streaming, kind),
            "submit",
            lambda self, part, submit=submit, used=used: (used.append(len(part)), submit(self, part))[1],
        )
        monkeypatch.setattr(model, "in_flight", in_flight)
        found = list(model.batches(paths, lambda *_: None))
        assert [path for names, _ in found for path in names] == kept and sum(used) == len(paths)
        torch.testing.assert_close(torch.cat([each.logits for _, each in found]), wanted, rtol=1e-5, atol=1e-5)


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.JPG", "a.webp", "b/notes.txt", ".hidden/x.png", "odd[1].png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    here = str(tmp_path)
    assert find_images([here]) == [f"{here}/{name}" for name in ("a.webp", "b/1.JPG", "b/2.png", "odd[1].png")]
    assert find_images([f"{here}/b/*", f"{here}/odd[1].png", f"{here}/b/notes.txt", f"{here}/no*"]) == [
        f"{here}/{name}" for name in ("b/1.JPG", "b/2.png", "odd[1].png", "b/notes.txt", "no*")
    ]
    assert find_images([f"{here}/**/1.JPG"])[0] == f"{here}/b/1.JPG"
    for name in ("c/1.jfif", "c/2.psd", "c/3.mov"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for given in (f"{here}/c", f"{here}/c/*", f"{here}/[c]/**"):
        ignored: list[str] = []
        assert find_images([given], ignored) == [f"{here}/c/1.jfif"]
        assert ignored == [f"{here}/c/2.psd", f"{here}/c/3.mov"]


# Loading --------------------------------------------------------------------------------------------------------------


def test_folder_and_files(run: Path, model: Model) -> None:
    image = DIGITS.pixels[INSIDE[:2]]
    assert torch.equal(load_model(str(run / "model.safetensors"), "cpu").logits(image), model.logits(image))
    last = load_model(run / "last.safetensors", "cpu")
    assert torch.equal(last.network.classifier.weight, load_file(run / "last.safetensors")["classifier.weight"])


def test_the_folder_of_fit_stands_for_the_model_in_it(run: Path, model: Model, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "fit-photos" / "model")
    image = DIGITS.pixels[INSIDE[:2]]
    assert torch.equal(load_model(tmp_path / "fit-photos", "cpu").logits(image), model.logits(image))
    with pytest.raises(AidgnError, match="fit-photos/model"):
        load_model(tmp_path, "cpu")


def test_paths_without_a_model(run: Path, copy: Path, tmp_path: Path) -> None:
    def refused(path: Path, words: str) -> None:
        with pytest.raises(AidgnError, match=words):
            load_model(path)

    refused(tmp_path / "nowhere", "nowhere")
    refused(tmp_path, "holds 1 run: .*copy")
    refused(run / "run.json", "not a model")
    (tmp_path / "model.onnx").touch()
    refused(tmp_path / "model.onnx", "give the model.safetensors")
    (tmp_path / "lone").mkdir()
    shutil.copy(run / "model.safetensors", tmp_path / "lone")
    refused(tmp_path / "lone", "no run.json")
    refused(tmp_path / "lone" / "model.safetensors", "no run.json")

    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(copy, "damaged")
    save_file({"a": torch.zeros(2)}, copy / "model.safetensors")
    refused(copy, "does not fit .*missing")
    save_file(load_file(run / "model.safetensors"), copy / "model.safetensors", {"aidgn": '{"algorithm": "ERM"}'})
    refused(copy, "ERM.*AIDGN")
    (copy / "model.safetensors").unlink()
    refused(copy, "not finished")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": None}, "classes"),
        ({"image_size": "28"}, "image_size"),
        ({"identity": {}}, "algorithm"),
        (None, "read"),
    ],
)
def test_damaged_run_json(change: dict[str, object] | None, words: str, copy: Path) -> None:
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text("{" if change is None else json.dumps({**about, **change}))
    with pytest.raises(DamagedMetadata, match=words) as caught:
        load_model(copy)
    assert caught.value.path == copy / "run.json"


def test_run_json_of_another_model(copy: Path) -> None:
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**about, "classes": ["0", "1", "2"]}))
    with pytest.raises(AidgnError, match=r"\[128, 10\] instead of \[128, 3\]"):
        load_model(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": ["ERM"]}, r"identity\.algorithm"),
        ({"hyper_parameters": {"featurizer": 1}}, "featurizer"),
    ],
)
def test_invalid_identity(change: dict[str, object], words: str, copy: Path) -> None:
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**about, "identity": {**about["identity"], **change}}))
    with pytest.raises(AidgnError, match=words):
        load_model(copy)


def test_custom_algorithm_must_be_named(
    digits_run: DigitsRun, own: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = digits_run(tmp_path / "runs", own, steps=1)
    with pytest.raises(AidgnError, match=r"file\.py:Mine"):
        load_model(folder)
    with pytest.raises(AidgnError, match="no file"):
        load_model(folder, algorithm="gone.py:Mine")
    with pytest.raises(AidgnError, match="not of ERM"):
        load_model(folder, algorithm="ERM")
    model = load_model(folder, "cpu", own)
    assert accuracy(model, DIGITS.pixels[INSIDE], DIGITS.labels[INSIDE]) == pytest.approx(recorded(folder, CHALK))
    assert not caplog.records
    with (tmp_path / "own.py").open("a") as file:
        file.write("    extra = 1\n")
    load_model(folder, "cpu", own)
    assert "has changed" in caplog.text


def test_loading_a_model_imports_no_compiler(run: Path) -> None:
    """It would take a second at the start of every prediction."""
    script = (
        f"import sys; from aidgn.inference import load_model; load_model({str(run)!r}, 'cpu'); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    "logits",
    [
        [1.0, 2.0, 3e38],
        [torch.inf, 0.0, 1.0],
        [torch.nan, 0.0, 1.0],
        [-torch.inf, -torch.inf, -torch.inf],
        [-torch.inf, 5.0, 5.0],
        [-1e3, 0.0, 1e3],
    ],
)
def test_probabilities_are_those_of_pytorch(logits: list[float]) -> None:
    given = torch.tensor([logits])
    torch.testing.assert_close(torch.from_numpy(softmax(given.numpy())), given.double().softmax(1), equal_nan=True)
    assert softmax(given[:0].numpy()).shape == (0, 3)
