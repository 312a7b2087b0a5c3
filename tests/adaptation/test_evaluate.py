"""Adapted runs against naive references in float64 on the run's features: the order of images, the last small batch,
the reset between domains, the choice of settings without target labels, and that the run itself stays as it is."""

import copy as copying
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aidgn.adaptation import T3A, Tent, TentBN, TentC
from aidgn.adaptation.common import batches
from aidgn.adaptation.evaluate import Streams, accuracy, adapt
from aidgn.adaptation.methods import METHODS, AdaptationMethod
from aidgn.algorithms import Algorithm
from aidgn.analysis.extraction import extract_features
from aidgn.analysis.features import Features
from aidgn.data.cache import prepare
from aidgn.data.loader import DeviceImageStore
from aidgn.data.splits import train_val_indices
from aidgn.errors import AidgnError
from aidgn.inference import load_model
from aidgn.runs.names import ADAPTATION
from aidgn.training import RunSpec, train

DigitsRun = Callable[..., Path]
DEFAULT = ("T3A", "Tent-C", "Tent-BN")
LONGER: Any = {"steps": 30, "eval_every": 30, "hyper_parameters": {"batch_size": 32}}


@pytest.fixture(scope="module")
def erm(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs"), "ERM", **LONGER)


@pytest.fixture(scope="module")
def aidgn(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs"), "AIDGN", **LONGER)


@pytest.fixture
def run(erm: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(erm, tmp_path / "run", ignore=lambda *_: {ADAPTATION}))


def digests(run: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in run.iterdir()}


# Naive references -----------------------------------------------------------------------------------------------------


def naive_batches(n: int) -> list[list[int]]:
    """32 at a time; a last single one joins the batch before it."""
    found = [list(range(start, min(start + 32, n))) for start in range(0, n, 32)]
    if len(found) > 1 and len(found[-1]) == 1:
        found[-2:] = [found[-2] + found[-1]]
    return found


def naive_t3a(classifier: nn.Module, z: Tensor, k: Any) -> Tensor:
    """Predicted labels; supports in one list, all of them sorted for each batch."""
    weight = classifier.weight.T if hasattr(classifier, "kappa") else classifier.weight
    classes = len(weight)
    supports: list[tuple[float, int, int, Tensor]] = []  # entropy, arrival, label, direction

    def add(values: Tensor) -> None:
        probabilities = classifier(values).softmax(1)
        entropies = -(probabilities * probabilities.log()).nan_to_num(0).sum(1)
        for value, p, entropy in zip(values, probabilities, entropies, strict=True):
            supports.append((entropy.item(), len(supports), int(p.argmax()), value / value.norm()))

    add(weight)
    predictions = []
    for batch in naive_batches(len(z)):
        add(z[batch])
        sums = []
        for label in range(classes):
            own = sorted((*s[:2], s[3]) for s in supports if s[2] == label)[: None if k == "all" else k]
            total = sum((direction for _, _, direction in own), torch.zeros_like(z[0]))
            sums.append(total / total.norm() if total.norm() > 0 else total)
        predictions.append((z[batch] @ torch.stack(sums).T).argmax(1))
    return torch.cat(predictions)


def naive_tent(
    toy: SimpleNamespace, classifier: nn.Module, z: Tensor, method: str, rate: float, updates: int, lr: float
) -> Tensor:
    classifier = copying.deepcopy(classifier)
    scale = torch.ones(z.shape[1], dtype=torch.float64, requires_grad=True)
    shift = torch.zeros(z.shape[1], dtype=torch.float64, requires_grad=True)
    adam = toy.Adam(list(classifier.parameters()) if method == "Tent-C" else [scale, shift], lr=rate * lr)
    predictions = []
    for batch in naive_batches(len(z)):
        x = z[batch]
        for _ in range(updates):
            seen = x
            if method == "Tent-BN":
                seen = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() * scale + shift
            logits = classifier(seen)
            p = logits.softmax(1)
            adam.step(-(p * p.clamp(min=1e-300).log()).sum(1).mean())
        predictions.append(logits.argmax(1))
    return torch.cat(predictions)


def naive_lines(toy: SimpleNamespace, features: Features, network: Algorithm, method: str) -> list[list[float]]:
    """[source accuracy, target accuracy] of every setting of a method."""
    classifier = copying.deepcopy(network.classifier).double().requires_grad_()
    lr = float(network.hyper_parameters["lr"])  # type: ignore[arg-type]
    found = []
    for settings in METHODS[method].settings:
        shares: dict[bool, list[float]] = {True: [], False: []}
        for number, name in enumerate(features.domain_names):
            everywhere = np.flatnonzero(features.domains == number)
            inside, outside = train_val_indices(len(everywhere), features.trial, number)
            target = name in features.targets
            where = everywhere[inside if target else outside]
            z = torch.from_numpy(features.features[where]).double()
            if method == "T3A":
                with torch.no_grad():
                    predicted = naive_t3a(classifier, z, settings["filter_k"])
            else:
                predicted = naive_tent(toy, classifier, z, method, settings["rate"], settings["updates"], lr)
            shares[target].append(float((predicted.numpy() == features.labels[where]).mean()))
        found.append([float(np.mean(shares[False])), float(np.mean(shares[True]))])
    return found


@pytest.mark.parametrize("name", ["erm", "aidgn"])
def test_like_naive(toy: SimpleNamespace, name: str, request: pytest.FixtureRequest) -> None:
    """All settings of all methods; in float32 an image or two may fall to the other side of a boundary."""
    run = request.getfixturevalue(name)
    lines = adapt(run, device="cpu")
    features, network = extract_features(run, device="cpu"), load_model(run, device="cpu").network
    for method in DEFAULT:
        ours = [line for line in lines if line["method"] == method]
        assert [line["settings"] for line in ours] == list(METHODS[method].settings)
        found = [[line["source_accuracy"], line["target_accuracy"]] for line in ours]
        np.testing.assert_allclose(found, naive_lines(toy, features, network, method), rtol=0, atol=2.5 / 360)
        assert [line["selected"] for line in ours].count(True) == 1
        assert next(line for line in ours if line["selected"])["source_accuracy"] == max(each[0] for each in found)
    moved = {line["target_accuracy"] for line in lines if line["method"] in ("Tent-C", "Tent-BN")}
    assert max(moved) - min(moved) > 0.05  # the settings matter, far beyond the tolerance
    (none,) = [line for line in lines if line["method"] == "none"]
    record = json.loads((run / "results.jsonl").read_text().splitlines()[-1])
    assert none["target_accuracy"] == pytest.approx(record["env1_in_acc"], abs=1e-12) and none["selected"]
    assert none["source_accuracy"] == pytest.approx(np.mean([record[f"env{i}_out_acc"] for i in (0, 2, 3)]), abs=1e-12)
    assert [json.loads(line) for line in (run / ADAPTATION).read_text().splitlines()] == lines
    assert list(lines[0]) == [
        "dataset",
        "algorithm",
        "target",
        "trial",
        "draw",
        "method",
        "settings",
        "source_accuracy",
        "target_accuracy",
        "selected",
        "model",
    ]
    assert (
        lines[0]["target"] == ["chalk"]
        and lines[0]["model"] == hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    )


class Recorder:
    """An adaptation that notes what it is given."""

    seen: list[Any]

    def __init__(self, algorithm: Algorithm, **settings: Any):
        self.classes = algorithm.num_classes

    def reset(self) -> None:
        Recorder.seen.append("reset")

    def predict_features(self, z: Tensor) -> Tensor:
        Recorder.seen.append(z)
        return torch.zeros(len(z), self.classes)


def test_order_batches_and_resets(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source's out split, then the target's in split, in the split's order, 32 at a time, fresh for each."""

    class Recorded(AdaptationMethod):
        adapter = Recorder  # type: ignore[assignment]

    monkeypatch.setitem(METHODS, "T3A", Recorded("T3A", "", "", "", ({"filter_k": 1},)))
    Recorder.seen = []
    (_, line) = adapt(run, ["T3A"], device="cpu")
    features = extract_features(run, device="cpu")
    wanted: list[Any] = []
    for number in (0, 2, 3, 1):
        everywhere = np.flatnonzero(features.domains == number)
        inside, outside = train_val_indices(len(everywhere), 0, number)
        rows = everywhere[inside if number == 1 else outside]
        wanted += ["reset", *(features.features[rows[start : start + 32]] for start in range(0, len(rows), 32))]
    assert [len(each) for each in wanted if each is not None and not isinstance(each, str)] == [
        32,
        32,
        26,
        32,
        32,
        25,
        32,
        32,
        25,
        *[32] * 11,
        8,
    ]
    assert len(Recorder.seen) == len(wanted)
    for ours, theirs in zip(Recorder.seen, wanted, strict=True):
        assert ours == theirs if isinstance(theirs, str) else np.array_equal(ours.numpy(), theirs)
    inside = features.split("chalk")[0]
    assert line["target_accuracy"] == pytest.approx(np.mean(features.labels[inside] == 0))


def test_target_labels_choose_nothing(run: Path, tmp_path: Path) -> None:
    features = extract_features(run, device="cpu")
    before = adapt(run, device="cpu")
    target = features.domains == 1
    features.labels[target] = (features.labels[target] + 3) % 10
    features.save(tmp_path / "other.npz")
    (run / ADAPTATION).unlink()
    after = adapt(run, device="cpu", features=tmp_path / "other.npz")
    for one, two in zip(before, after, strict=True):
        assert (one["method"], one["settings"], one["selected"], one["source_accuracy"]) == (
            two["method"],
            two["settings"],
            two["selected"],
            two["source_accuracy"],
        )
    assert sum(one["target_accuracy"] != two["target_accuracy"] for one, two in zip(before, after, strict=True)) > 15


def test_run_is_unchanged_and_not_measured_twice(run: Path) -> None:
    before = digests(run)
    seen: list[tuple[int, int]] = []
    parts: list[str] = []

    def note(what: str, done: int, total: int) -> None:
        parts.append(what)
        if what == "adapting":
            seen.append((done, total))

    (run / "features.npz").unlink(missing_ok=True)
    adapt(run, ["T3A"], device="cpu", on_progress=note)
    assert seen == [(done, 6) for done in range(7)]
    assert "adapting" not in parts[:-7]  # features come before: what is left is not guessed from their time
    assert {name: digest for name, digest in digests(run).items() if name in before} == before
    assert digests(run).keys() - before.keys() <= {ADAPTATION, f".{ADAPTATION}.lock", "features.npz"}
    first = (run / ADAPTATION).read_text().splitlines()
    seen.clear()
    adapt(run, ["T3A", "Tent-C"], device="cpu", on_progress=note)
    assert seen == [(done, 12) for done in range(6, 13)]
    text = (run / ADAPTATION).read_text()
    assert text.splitlines()[:7] == first and len(text.splitlines()) == 13
    seen.clear()
    lines = adapt(run, ["Tent-C", "T3A"], device="cpu", on_progress=note)
    assert seen == [(12, 12)] and (run / ADAPTATION).read_text() == text and len(lines) == 13
    (run / ADAPTATION).write_text(text.replace('"model": "', '"model": "0'))  # of a model that is no more
    seen.clear()
    assert adapt(run, ["T3A"], device="cpu", on_progress=note) == lines[:7] and len(seen) == 7
    (run / ADAPTATION).write_text("{")
    with pytest.raises(AidgnError, match=rf"{ADAPTATION} cannot be read .*Remove it"):
        adapt(run, device="cpu")
    assert {name: digest for name, digest in digests(run).items() if name in before} == before


def test_what_another_process_measures_meanwhile_is_kept(run: Path) -> None:
    def meanwhile(what: str, done: int, _: int) -> None:
        if (what, done) == ("adapting", 3):
            adapt(run, ["Tent-C"], device="cpu")

    lines = adapt(run, ["T3A"], device="cpu", on_progress=meanwhile)
    kept = [json.loads(line) for line in (run / ADAPTATION).read_text().splitlines()]
    assert kept == lines and [line["method"] for line in kept] == ["none"] + ["T3A"] * 6 + ["Tent-C"] * 6


def test_several_targets_are_adapted_to_one_by_one(digits_run: DigitsRun, tmp_path: Path) -> None:
    run = digits_run(tmp_path, "ERM", ("ink", "poster"), steps=3)
    lines = adapt(run, ["Tent-C"], device="cpu")
    features, model = extract_features(run, device="cpu"), load_model(run, device="cpu")
    streams = Streams(features, model, lambda: pytest.fail("no images are needed"))
    adaptation = TentC(model.network, **METHODS["Tent-C"].settings[4])
    shares = [accuracy(adaptation, streams.domain(name, "Tent-C", False)).item() for name in ("poster", "ink")]
    assert lines[5]["settings"] == METHODS["Tent-C"].settings[4] and lines[5]["target"] == ["ink", "poster"]
    assert lines[5]["target_accuracy"] == pytest.approx(np.mean(shares)) and shares[0] != shares[1]


def test_groups_of_images_are_those_of_the_batches(digits_run: DigitsRun, tmp_path: Path) -> None:
    """MTL describes a domain by the mean of 64 images; of a stream it sees 32 at a time, and no later ones."""
    run = digits_run(tmp_path, "MTL", steps=2, eval_every=2)
    features, model = extract_features(run, device="cpu"), load_model(run, device="cpu")
    images = DeviceImageStore(prepare(RunSpec("digits").load_dataset()), torch.device("cpu"))
    found = list(Streams(features, model, lambda: images).domain("chalk", "T3A", False).batches())
    plain = features.features[features.split("chalk")[0], :128]
    for ours, batch in zip(found, batches(len(plain)), strict=True):
        z = plain[batch.start : batch.stop]
        np.testing.assert_allclose(ours[:, :128], z, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(ours[:, 128:], np.broadcast_to(z.mean(0), z.shape), rtol=1e-3, atol=1e-4)
    lines = adapt(run, device="cpu")
    assert {line["method"] for line in lines} == {"none", *DEFAULT}


def test_tent_meets_images(tmp_path: Path) -> None:
    """The whole network adapts: like the library's Tent on images prepared by hand."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for shift, domain in enumerate(("a", "b", "c")):
        for level, label in ((60, "dark"), (180, "light")):
            (tmp_path / "photos" / domain / label).mkdir(parents=True)
            for number in range(22):
                pixels = np.clip(rng.normal(level + 25 * shift, 60, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / domain / label / f"{number:02}.png")
    run = train(
        RunSpec(
            str(tmp_path / "photos"),
            "ERM",
            "c",
            steps=2,
            eval_every=2,
            image_size=32,
            backbone="resnet10t",
            weights="none",
            hyper_parameters={"batch_size": 4},
        ),
        tmp_path,
        device="cpu",
    )
    before = digests(run)
    lines = adapt(run, ["Tent"], device="cpu")
    assert {name: digest for name, digest in digests(run).items() if name in before} == before
    features, network = extract_features(run, device="cpu"), load_model(run, device="cpu").network
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    inside = features.split("c")[0]
    x = (
        np.stack([(np.asarray(Image.open(tmp_path / "photos" / features.files[i])) / 255 - mean) / std for i in inside])
        .transpose(0, 3, 1, 2)
        .astype(np.float32)
    )
    for line in lines[1:]:
        tent = Tent(network, **line["settings"])
        right = [
            tent.predict(torch.from_numpy(x[rows])).argmax(1).numpy() == features.labels[inside[rows]]
            for rows in ([*range(32)], [*range(32, 36)])
        ]
        assert line["target_accuracy"] == pytest.approx(np.concatenate(right).mean(), abs=1.5 / 36)


def test_what_cannot_be_adapted_is_said(run: Path, aidgn: Path, digits_run: DigitsRun, tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match=r"Tent left out for .* this backbone has none"):
        adapt(run, ["Tent"], device="cpu")
    messages: list[str] = []
    lines = adapt(run, ["Tent", "T3A"], device="cpu", on_message=messages.append)
    assert len(messages) == 1 and "BatchNorm2d" in messages[0]
    assert {line["method"] for line in lines} == {"none", "T3A"}
    with pytest.raises(AidgnError, match=r"holds features of another model \(AIDGN on digits"):
        extract_features(aidgn, device="cpu").save(tmp_path / "aidgn.npz")
        adapt(run, device="cpu", features=tmp_path / "aidgn.npz")
    (run / "model.safetensors").unlink()
    with pytest.raises(AidgnError, match=r"not finished.*`aidgn report "):
        adapt(run, device="cpu")
    everywhere = digits_run(tmp_path, "ERM", (), steps=1, eval_every=1)
    with pytest.raises(AidgnError, match="all domains"):
        adapt(everywhere, device="cpu")


def test_a_prediction_of_its_own_is_not_adapted(digits_run: DigitsRun, own: str, tmp_path: Path) -> None:
    run = digits_run(tmp_path, own, steps=1)
    with pytest.raises(AidgnError, match="Mine overrides `predict`"):
        adapt(run, device="cpu", algorithm=own)


def test_all_methods_are_classes_of_the_library() -> None:
    for name, adapter in {"T3A": T3A, "Tent-C": TentC, "Tent-BN": TentBN, "Tent": Tent}.items():
        assert METHODS[name].adapter is adapter
    assert [each["filter_k"] for each in METHODS["T3A"].settings] == [1, 5, 20, 50, 100, "all"]
    for method in ("Tent-C", "Tent-BN", "Tent"):
        assert sorted((each["rate"], each["updates"]) for each in METHODS[method].settings) == [
            (0.1, 1),
            (0.1, 3),
            (1.0, 1),
            (1.0, 3),
            (10.0, 1),
            (10.0, 3),
        ]
