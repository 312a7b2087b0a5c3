"""Training on the features of a frozen network: they are the network's, computed once, and the model is a whole one."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import aidgn
from aidgn import backbones
from aidgn.algorithms import ALGORITHMS
from aidgn.analysis.embedding import choose_images, tsne
from aidgn.analysis.extraction import extract_features
from aidgn.analysis.near_copies import find_near_copies
from aidgn.data import load_dataset
from aidgn.data.cache import cache_folder, prepare
from aidgn.data.loader import BatchSampler, DeviceImageStore
from aidgn.data.transforms import UNIFORMS
from aidgn.errors import AidgnError, Interrupted, ParameterError
from aidgn.files import StorageError
from aidgn.fitting.ahead import ReportAhead
from aidgn.runs import checkpoints
from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, frozen, train
from aidgn.training.evaluation import Splits
from aidgn.training.frozen import FeatureStore, FrozenNetwork, load_features

SIZE = 32
CAPABLE = ["ERM", "IRM", "GroupDRO", "Mixup", "CORAL", "MMD", "DANN", "CDANN", "MTL", "VREx", "AIDGN", "AIDGN-noR"]
CAPABLE += ["AIDGN-noD", "AIDGN-noRD", "AIDGN-release", "SD", "Fishr", "EQRM", "SAM", "SAGM", "AIDGN-SAGM"]
CAPABLE += ["SelfReg", "Fish", "URM", "CausIRL_CORAL", "CausIRL_MMD", "VNE", "AIDGN-VNE"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    network = backbones.create("test_resnet", weights="none", freeze_bn=False)
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):  # as if trained
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 2)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(network.state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos") / "photos"
    random = np.random.default_rng(0)
    for domain in range(3):
        for label in range(2):
            folder = root / f"site{domain}" / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, 120, (36, 34, 3)) + 100 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIDGN_CACHE", str(tmp_path / "cache"))
    from aidgn.training import setup

    monkeypatch.setattr(setup, "_loaded_features", {})


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Images of each pass through a frozen network."""
    sizes: list[int] = []
    compute = FrozenNetwork.__call__

    def count(network: FrozenNetwork, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return compute(network, x)

    monkeypatch.setattr(FrozenNetwork, "__call__", count)
    return sizes


def spec_of(photos: Path, weights: str, algorithm: str = "ERM", **options: object) -> RunSpec:
    settings = {"steps": 4, "eval_every": 2, "image_size": SIZE, "train_only": "head", **options}
    settings.setdefault("hyper_parameters", {"batch_size": 8})
    return RunSpec(
        str(photos), algorithm, settings.pop("target", "site2"), backbone="test_resnet", weights=weights, **settings
    )  # type: ignore[arg-type]


def images_of(photos: Path) -> DeviceImageStore:
    return DeviceImageStore(prepare(load_dataset(photos).with_image_size(SIZE)), torch.device("cpu"))


def network_of(weights: str) -> FrozenNetwork:
    network = backbones.create("test_resnet", weights=weights)
    backbones.fold(network)
    preprocessing = backbones.preprocessing("test_resnet", weights)
    return FrozenNetwork(network.to(memory_format=torch.channels_last), "float32", preprocessing)


def rows_of(store: FeatureStore) -> np.ndarray:
    """Features [views + 1, N, n]."""
    return store.features[store.rows]


def test_features_are_those_of_the_network(photos: Path, weights: str) -> None:
    """Against the network in float64, batch norm as PyTorch has it, on pictures that Pillow reads."""
    features = rows_of(load_features(images_of(photos), network_of(weights)))
    network = backbones.create("test_resnet", weights=weights, freeze_bn=False).double().eval()
    dataset = load_dataset(photos)
    pixels = np.stack([np.asarray(Image.open(photos / file)) for file in dataset.files])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).double()
    x = torch.nn.functional.interpolate(x, (SIZE, SIZE), mode="bilinear", antialias=True) / 255
    expects = backbones.preprocessing("test_resnet", weights)
    mean, std = (torch.tensor(values).double()[:, None, None] for values in (expects.mean, expects.std))
    with torch.no_grad():
        expected = network((x - mean) / std)
    np.testing.assert_allclose(features[0], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_views_differ_and_follow_from_the_image(photos: Path, weights: str, tmp_path: Path) -> None:
    copy = shutil.copytree(photos, tmp_path / "elsewhere")
    shutil.rmtree(copy / "site0")
    first = rows_of(load_features(images_of(photos), network_of(weights), views=2))
    part = rows_of(load_features(images_of(copy), network_of(weights), views=2))
    assert first.shape[0] == 3 and len(np.unique(first[:, 0], axis=0)) == 3
    np.testing.assert_allclose(part, first[:, 16:], rtol=1e-4, atol=1e-5)  # in other batches, so up to rounding


def test_a_run_is_gradient_descent_on_cached_rows(photos: Path, weights: str, tmp_path: Path) -> None:
    """Against Adam on softmax regression, written out in float64, with a random view of each image of a batch."""
    spec = spec_of(photos, weights, views=1, steps=6, eval_every=6, hyper_parameters={"batch_size": 8, "lr": 1e-3})
    folder = RunFolder(train(spec, tmp_path / "runs", device="cpu"))
    dataset = spec.load_dataset()
    resolved = spec.resolved(dataset)
    rows = rows_of(load_features(images_of(photos), network_of(weights), views=1)).astype(np.float64)
    sampler = BatchSampler(Splits.of(dataset, 0).train[:2], 8, resolved.seed(dataset))
    indices, uniforms = (tensor.numpy() for tensor in sampler.steps(0, 6))
    torch.manual_seed(resolved.seed(dataset))
    layer = torch.nn.Linear(rows.shape[2], 2)
    parameters = [layer.weight.detach().numpy().astype(np.float64), layer.bias.detach().numpy().astype(np.float64)]
    moments = [[np.zeros_like(value), np.zeros_like(value)] for value in parameters]
    for step in range(6):
        view = (uniforms[step, :, 0] * 2).astype(int)
        z, y = rows[view, indices[step]], dataset.labels[indices[step]]
        logits = z @ parameters[0].T + parameters[1]
        error = np.exp(logits - logits.max(1, keepdims=True))
        error = error / error.sum(1, keepdims=True) - np.eye(2)[y]
        for value, gradient, (m, v) in zip(parameters, (error.T @ z / len(z), error.mean(0)), moments, strict=True):
            m += 0.1 * (gradient - m)
            v += 0.001 * (gradient**2 - v)
            value -= 1e-3 * (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
    found = load_file(folder.last)
    assert set(found) == {"classifier.weight", "classifier.bias"}
    np.testing.assert_allclose(found["classifier.weight"], parameters[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["classifier.bias"], parameters[1], rtol=1e-4, atol=1e-6)


def test_which_algorithms_train_on_features() -> None:
    assert sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.trains_on_features) == sorted(CAPABLE)


@pytest.mark.parametrize("name", CAPABLE)
def test_algorithm_trains_on_features(name: str, photos: Path, weights: str, tmp_path: Path) -> None:
    run = RunFolder(train(spec_of(photos, weights, name), tmp_path / "runs", device="cpu"))
    model = aidgn.load_model(run.path, device="cpu")
    dataset = load_dataset(photos)
    group = model.network.group_size
    if group == 1:  # else images that are predicted together differ
        labels = model.predict([photos / file for file in dataset.files]).labels
        right = [label == dataset.classes[y] for label, y in zip(labels, dataset.labels, strict=True)]
        val = Splits.of(dataset, 0).val[0]
        assert np.mean([right[i] for i in val]) == run.selected["env0_out_acc"]


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - set(CAPABLE)))
def test_algorithm_that_needs_more_refuses(name: str, photos: Path, weights: str) -> None:
    spec = spec_of(photos, weights, name)
    with pytest.raises(AidgnError, match=f"^{name} works by training the network"):
        spec.resolved(spec.load_dataset())


def test_own_algorithm_declares_it(photos: Path, weights: str, own: str, tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match="trains_on_features = True"):
        train(spec_of(photos, weights, own), tmp_path / "runs", device="cpu")
    file = Path(own.partition(":")[0])
    file.write_text(file.read_text().replace("(Algorithm):\n", "(Algorithm):\n    trains_on_features = True\n"))
    assert RunFolder(train(spec_of(photos, weights, own), tmp_path / "runs", device="cpu")).finished


def test_runs_share_one_pass_and_one_file(photos: Path, weights: str, tmp_path: Path, passes: list[int]) -> None:
    runs = [
        RunFolder(train(spec_of(photos, weights, name, target=target, trial=trial), tmp_path / "runs", device="cpu"))
        for name in ("ERM", "AIDGN")
        for target in ("site0", "site2")
        for trial in (0, 1)
    ]
    assert sum(passes) == 48
    assert len({run.backbone.stat().st_ino for run in runs}) == 1
    assert all(run.model.stat().st_size < 20_000 for run in runs)
    features = extract_features(runs[0].path, device="cpu")
    assert sum(passes) == 48
    network = aidgn.load_model(runs[0].path, device="cpu")
    prediction = network.predict([photos / file for file in features.files])
    np.testing.assert_allclose(features.logits, prediction.logits, rtol=1e-3, atol=1e-4)


def test_findings_load_no_network_again(
    photos: Path, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [train(spec_of(photos, weights, name), tmp_path / "runs", device="cpu") for name in ("ERM", "AIDGN")]
    expected = [extract_features(shutil.copytree(run, tmp_path / run.name), device="cpu") for run in runs]
    monkeypatch.setattr(backbones, "create", lambda *_, **__: pytest.fail("the network was loaded again"))
    for run, features in zip(runs, expected, strict=True):
        found = extract_features(run, device="cpu")
        np.testing.assert_array_equal(found.features, features.features)
        np.testing.assert_array_equal(found.logits, features.logits)


def test_another_network_in_between(photos: Path, weights: str, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, other)
    runs = [train(spec_of(photos, str(file)), tmp_path / "runs", device="cpu") for file in (weights, other)]
    first, second = (extract_features(run, device="cpu").features for run in runs)
    np.testing.assert_array_equal(first, rows_of(load_features(images_of(photos), network_of(weights)))[0])
    np.testing.assert_array_equal(second, rows_of(load_features(images_of(photos), network_of(str(other))))[0])


def test_work_for_the_report_ahead(photos: Path, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ReportAhead.begin(20) is None
    photos = shutil.copytree(photos, tmp_path / "photos")
    blocks = np.random.default_rng(1).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    picture = Image.fromarray(blocks).resize((48, 48), Image.Resampling.BICUBIC)
    picture.save(photos / "site0/class1/original.png")
    picture.resize((60, 60), Image.Resampling.BICUBIC).save(photos / "site1/class1/copy.png")
    run = train(spec_of(photos, weights), tmp_path / "runs", device="cpu")
    ahead = ReportAhead.begin(20)
    assert ahead is not None
    ahead.join()
    decoded = prepare(load_dataset(photos).with_image_size(SIZE))
    features = extract_features(run, device="cpu")
    assert ahead.copies == find_near_copies(decoded, features.features)
    assert [(copy.first, copy.second) for copy in ahead.copies] == [
        ("site0/class1/original.png", "site1/class1/copy.png")
    ]
    monkeypatch.setattr("aidgn.analysis.embedding._compute", lambda *_: pytest.fail("t-SNE ran again"))
    shown = choose_images(features.domains, features.labels, 20)
    assert tsne(features.features[shown], seed=0).shape == (20, 2)


def test_a_model_without_its_network(photos: Path, weights: str, tmp_path: Path) -> None:
    run = RunFolder(train(spec_of(photos, weights), tmp_path / "runs", device="cpu"))
    tensors, metadata = checkpoints.read_weights(run.backbone)
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    run.backbone.unlink()
    with pytest.raises(AidgnError, match=r"backbone.* cannot be read"):
        aidgn.load_model(run.path, device="cpu")
    checkpoints.write_weights(run.backbone, other, {"backbone": "0" * 32})
    with pytest.raises(AidgnError, match="is not the network of"):
        aidgn.load_model(run.path, device="cpu")
    checkpoints.write_weights(run.backbone, tensors, metadata)
    content = bytearray(run.backbone.read_bytes())
    content[-1] ^= 1
    run.backbone.write_bytes(content)
    with pytest.raises(AidgnError, match="damaged"):
        aidgn.load_model(run.path, device="cpu")
    assert len(checkpoints.verify([run.path]).damaged) == 1


def test_interrupted_features_continue_to_the_same_bits(
    photos: Path, weights: str, passes: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frozen, "CPU_BATCH", 12)
    whole = rows_of(load_features(images_of(photos), network_of(weights), views=1, cache_dir=tmp_path / "a"))

    def stop(done: int, total: int) -> None:
        if done >= 32:
            raise Interrupted("stopped")

    passes.clear()
    with pytest.raises(Interrupted):
        load_features(images_of(photos), network_of(weights), views=1, cache_dir=tmp_path / "b", on_progress=stop)
    assert sum(passes) == 36
    again = rows_of(load_features(images_of(photos), network_of(weights), views=1, cache_dir=tmp_path / "b"))
    assert sum(passes) == 36 + 96 - 24  # the third batch, which was not stored whole, is computed again
    np.testing.assert_array_equal(whole, again)


def test_more_views_and_images_add_rows(photos: Path, weights: str, passes: list[int], tmp_path: Path) -> None:
    copy = shutil.copytree(photos, tmp_path / "growing")
    store = load_features(images_of(copy), network_of(weights))
    load_features(images_of(copy), network_of(weights), views=1)
    assert sum(passes) == 96
    Image.fromarray(np.full((36, 34, 3), 7, np.uint8)).save(copy / "site2" / "class1" / "z.png")
    more = load_features(images_of(copy), network_of(weights))
    np.testing.assert_array_equal(rows_of(more)[:, :48], rows_of(store))
    assert rows_of(more).shape[1] == 49


def test_damaged_features_are_computed_again(
    photos: Path, weights: str, caplog: pytest.LogCaptureFixture, passes: list[int]
) -> None:
    before = rows_of(load_features(images_of(photos), network_of(weights)))
    (path,) = cache_folder(load_dataset(photos)).glob("features-*.f32")
    with path.open("r+b") as file:
        file.seek(5)
        byte = file.read(1)
        file.seek(5)
        file.write(bytes([byte[0] ^ 64]))
    passes.clear()
    after = rows_of(load_features(images_of(photos), network_of(weights)))
    assert "1 of the features of photos" in caplog.text and "damaged" in caplog.text
    assert sum(passes) == 32  # the batch of the damaged row
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("harm", ["index", "cut", "removed"])
def test_features_whose_files_are_harmed(photos: Path, weights: str, harm: str) -> None:
    before = rows_of(load_features(images_of(photos), network_of(weights)))
    folder = cache_folder(load_dataset(photos))
    (path,) = folder.glob("features-*.f32")
    (index,) = folder.glob("features-index-*.jsonl")
    if harm == "index":
        index.write_bytes(b"\0" + index.read_bytes()[1:])
    elif harm == "cut":
        os.truncate(path, path.stat().st_size // 2 + 1)
    else:
        path.unlink()
    np.testing.assert_array_equal(rows_of(load_features(images_of(photos), network_of(weights))), before)


def test_full_disk_while_features_are_written(
    photos: Path, weights: str, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "CPU_BATCH", 12)
    write, calls = frozen.write_at, []

    def fail(*arguments: object) -> None:
        calls.append(1)
        if len(calls) > 24:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(frozen, "write_at", fail)
    with pytest.raises(StorageError, match="The disk is full"):
        load_features(images_of(photos), network_of(weights))
    monkeypatch.setattr(frozen, "write_at", write)
    passes.clear()
    load_features(images_of(photos), network_of(weights))
    assert sum(passes) == 24  # what was stored before is kept


def test_too_little_space_is_said_before(photos: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen.FeatureCache, "free", lambda cache: 1000)
    with pytest.raises(AidgnError, match="features of photos need"):
        load_features(images_of(photos), network_of(weights))


def test_changed_weights_make_other_features(photos: Path, weights: str, tmp_path: Path, passes: list[int]) -> None:
    file = str(shutil.copyfile(weights, tmp_path / "tiny.safetensors"))
    first = train(spec_of(photos, file), tmp_path / "runs", device="cpu")
    tensors = load_file(file)
    save_file({name: tensor * 1.5 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, file)
    second = train(spec_of(photos, file), tmp_path / "runs", device="cpu")
    assert first != second and sum(passes) == 96
    for run in (first, second):  # the first still has the network that it was trained with
        model = aidgn.load_model(run, device="cpu")
        features = extract_features(run, device="cpu")
        files = [photos / name for name in features.files]
        np.testing.assert_allclose(model.predict(files).logits, features.logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"train_only": None, "views": 2}, "views"),
        ({"train_only": "last-stage", "views": 0}, "views"),
        ({"warm_start": 2}, "warm_start"),
    ],
)
def test_options_that_do_not_fit(photos: Path, weights: str, options: dict[str, object], parameter: str) -> None:
    spec = spec_of(photos, weights, **options)
    with pytest.raises(ParameterError) as caught:
        spec.resolved(spec.load_dataset())
    assert caught.value.parameter == parameter


def test_digits_have_no_views(weights: str) -> None:
    spec = RunSpec("digits", "ERM", "ink", backbone="test_resnet", weights=weights, train_only="head", views=1)
    with pytest.raises(ParameterError):
        spec.resolved(spec.load_dataset())


def test_several_devices_are_refused(photos: Path, weights: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError):
        train(spec_of(photos, weights), tmp_path / "runs", device="cpu", devices=2)


def test_uniform_numbers_of_views() -> None:
    digests = ["00" * 16, "01" * 16]
    draws = np.stack([frozen.draw_uniforms(digest, view) for digest in digests for view in (1, 2)])
    assert draws.shape == (4, UNIFORMS) and len(np.unique(draws)) == draws.size
    assert 0.35 < draws.mean() < 0.65


def test_fit_without_a_gpu_passes_each_image_once(
    photos: Path, weights: str, passes: list[int], tmp_path: Path
) -> None:
    messages: list[str] = []
    settings = {"backbone": "test_resnet", "weights": weights, "image_size": SIZE, "steps": 20, "batch_size": 8}

    def fit_again() -> aidgn.FitResult:
        return aidgn.fit(
            photos,
            out=tmp_path / "fit",
            device="cpu",
            report=False,
            progress=False,
            on_message=messages.append,
            **settings,  # type: ignore[arg-type]
        )

    result = fit_again()
    assert sum(passes) == 48
    assert result.final.train_only == "head" and len(result.estimates) == 2
    assert "stays frozen" in messages[0] and "here: --train all" in messages[0]
    messages.clear()
    assert fit_again().estimates == result.estimates and sum(passes) == 48
    assert "here:" not in messages[0]  # nothing is measured for an answer that is there


def test_a_rate_for_heads(photos: Path, weights: str) -> None:
    spec = spec_of(photos, weights)
    rates = [replace(spec, draw=draw).resolved(spec.load_dataset()).hyper_parameters["lr"] for draw in range(40)]
    assert rates[0] == 3e-3
    assert 10**-3.5 < min(rates[1:]) < 6e-4 and 5e-3 < max(rates[1:]) < 1e-2
