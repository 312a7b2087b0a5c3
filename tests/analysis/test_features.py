"""Features against the run's own records, single images through the network, and classifiers written out in float64."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

from aidgn.analysis.extraction import extract_features
from aidgn.analysis.features import Features
from aidgn.cli import app
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.inference import load_model
from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, train

DigitsRun = Callable[..., Path]
DIGITS = load_dataset("digits")
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def run(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs"), trial=1, steps=6, eval_every=3)


@pytest.fixture(scope="module")
def features(run: Path) -> Features:
    return extract_features(run, device="cpu")


@pytest.fixture
def copy(run: Path, features: Features, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def selected_record(run: Path) -> dict[str, float]:
    records = RunFolder(run).records
    sources = [i for i in range(4) if i not in records[0]["args"]["test_envs"]]
    return max(records, key=lambda record: np.mean([record[f"env{i}_out_acc"] for i in sources]))


def accuracies(features: Features) -> dict[str, float]:
    """Of every domain and split, by `domains`, `outside`, `logits` and `labels` alone."""
    found = {}
    for i, _ in enumerate(features.domain_names):
        for which, name in ((features.validation, "out"), (~features.validation, "in")):
            here = (features.domains == i) & which
            found[f"env{i}_{name}_acc"] = float(np.mean(features.logits[here].argmax(1) == features.labels[here]))
    return found


@pytest.mark.parametrize(
    ("algorithm", "hyper_parameters"),
    [("AIDGN", {}), ("MTL", {}), pytest.param("ARM", {"batch_size": 7}, marks=pytest.mark.slow)],
)
def test_they_reproduce_the_recorded_accuracies_exactly(
    algorithm: str, hyper_parameters: dict[str, float], digits_run: DigitsRun, tmp_path: Path
) -> None:
    """Also of algorithms whose prediction depends on the other images of a batch."""
    run = digits_run(
        tmp_path,
        algorithm,
        steps=6,
        eval_every=3,
        evaluate_source_in=True,
        hyper_parameters={"batch_size": 8, **hyper_parameters},
    )
    record, found = selected_record(run), accuracies(extract_features(run, device="cpu"))
    wanted = {key: value for key, value in record.items() if key.endswith("_acc")}
    assert len(wanted) == 8 and len({*wanted.values()}) > 4
    assert found == pytest.approx(wanted, abs=1e-12)


def test_what_they_say_about_the_images(run: Path, features: Features) -> None:
    assert features.files == DIGITS.files and features.class_names == DIGITS.classes
    assert features.domain_names == DIGITS.domains and features.targets == ["chalk"]
    assert (features.dataset, features.algorithm, features.trial, features.draw) == ("digits", "AIDGN", 1, 0)
    np.testing.assert_array_equal(features.labels, DIGITS.labels)
    np.testing.assert_array_equal(features.domains, DIGITS.domain_of)
    assert [features.validation[features.domains == i].sum() for i in range(4)] == [
        int(0.2 * np.sum(DIGITS.domain_of == i)) for i in range(4)
    ]
    inside, outside = features.split("poster")
    assert features.validation[outside].all() and not features.validation[inside].any()
    assert sorted([*inside, *outside]) == np.flatnonzero(DIGITS.domain_of == 2).tolist()
    assert inside.tolist() != sorted(inside)  # shuffled, as the splits are


def test_single_images_through_the_network(run: Path, features: Features) -> None:
    network = load_model(run, device="cpu").network
    assert DIGITS.pixels is not None and features.weight is not None and features.kappa == 10
    for i in (0, 700, 1796):
        x = ((DIGITS.pixels[i] / 255 - MEAN) / STD).transpose(2, 0, 1)[None]
        with torch.no_grad():
            z = network.features(torch.from_numpy(x).float())[0].numpy()
        np.testing.assert_allclose(features.features[i], z, rtol=1e-4, atol=1e-4)
        z, weight = features.features[i].astype(np.float64), features.weight.astype(np.float64)
        cosine = z @ weight / np.linalg.norm(weight, axis=0) / np.linalg.norm(z)
        np.testing.assert_allclose(features.logits[i], 10 * cosine, rtol=1e-4, atol=1e-5)


def test_the_weight_of_a_linear_classifier(digits_run: DigitsRun, tmp_path: Path) -> None:
    run = digits_run(tmp_path, "ERM", steps=2, eval_every=2)
    found, tensors = extract_features(run, device="cpu"), load_file(run / "model.safetensors")
    bias = tensors["classifier.bias"].double().numpy()
    assert found.kappa is None and found.weight is not None and found.weight.shape == (128, 10)
    logits = found.features[:50].astype(np.float64) @ found.weight.astype(np.float64) + bias
    np.testing.assert_allclose(found.logits[:50], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["a.npz", "a.parquet"])
def test_files(features: Features, name: str, tmp_path: Path) -> None:
    again = Features.load(features.save(tmp_path / name))
    for key in ("features", "logits", "labels", "domains", "validation", "weight"):
        np.testing.assert_array_equal(getattr(again, key), getattr(features, key))
        assert getattr(again, key).dtype == getattr(features, key).dtype
    assert again.files == features.files and again._metadata() == features._metadata()
    if name == "a.npz":  # open to anyone, without unpickling
        with np.load(tmp_path / name, allow_pickle=False) as file:
            assert file["class_names"].tolist() == DIGITS.classes and file["files"].dtype.kind == "U"
    else:
        from pyarrow import parquet

        row = parquet.read_table(tmp_path / name).slice(700, 1).to_pylist()[0]
        assert row["file"] == DIGITS.files[700] and row["domain"] == "chalk" and row["split"] in ("in", "out")
        assert row["class"] == DIGITS.classes[DIGITS.labels[700]]
        np.testing.assert_array_equal(np.float32(row["features"]), features.features[700])


def test_kept_features_are_read_back_while_the_model_is_theirs(copy: Path, features: Features) -> None:
    np.savez(copy / "features.npz", **{**dict(np.load(copy / "features.npz")), "logits": features.logits + 1})
    assert (extract_features(copy, device="cpu").logits == features.logits + 1).all()
    tensors = load_file(copy / "model.safetensors")
    tensors["classifier.weight"] = -tensors["classifier.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"aidgn": json.dumps({"algorithm": "AIDGN", "step": 3})})
    with pytest.raises(AidgnError, match=r"features of another model \(AIDGN on digits, chalk unseen, trial 1"):
        Features.load(copy / "features.npz", copy)
    found = extract_features(copy, device="cpu")
    np.testing.assert_allclose(found.logits, -features.logits, rtol=1e-5, atol=1e-5)
    assert found.model != features.model and Features.load(copy / "features.npz", copy).model == found.model


def test_damaged_kept_features_are_computed_anew(copy: Path, features: Features) -> None:
    (copy / "features.npz").write_bytes((copy / "features.npz").read_bytes()[:5000])
    np.testing.assert_array_equal(extract_features(copy, device="cpu").logits, features.logits)


def test_features_that_cannot_be_kept_are_said_not_to_be(copy: Path, features: Features, tmp_path: Path) -> None:
    (copy / "features.npz").unlink(missing_ok=True)
    (copy / "features.npz").mkdir()  # in the way, as a full disk or a folder of someone else's is
    found = CliRunner().invoke(app, ["features", str(copy)])
    assert (
        isinstance(found.exception, AidgnError)
        and str(copy / "features.npz") in str(found.exception)
        and not found.output
    )
    elsewhere = CliRunner().invoke(app, ["features", str(copy), "--out", str(tmp_path / "z.npz")])
    assert elsewhere.exit_code == 0
    np.testing.assert_array_equal(Features.load(tmp_path / "z.npz").features, features.features)


def test_wrong_files(features: Features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AidgnError, match=r"no feature file .*missing\.npz"):
        Features.load(tmp_path / "missing.npz")
    for name in ("text.npz", "text.parquet"):
        (tmp_path / name).write_text("hello")
        with pytest.raises(AidgnError, match=f"{name} is not a feature file"):
            Features.load(tmp_path / name)
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(AidgnError, match=r"other\.npz is not a feature file"):
        Features.load(tmp_path / "other.npz")
    for change in (
        {"labels": features.labels + 1},
        {"domains": features.domains - 1},
        {"targets": ["elsewhere"]},
        {"logits": features.logits[:, 1:]},
    ):
        replace(features, **change).save(tmp_path / "own.npz")  # type: ignore[arg-type]
        with pytest.raises(AidgnError, match=r"own\.npz is not a feature file"):
            Features.load(tmp_path / "own.npz")
    np.savez(tmp_path / "pickled.npz", features=np.array([{}], dtype=object))
    with pytest.raises(AidgnError, match=r"pickled\.npz is not a feature file"):
        Features.load(tmp_path / "pickled.npz")
    with pytest.raises(AidgnError, match=r"a\.csv should end in \.npz or \.parquet"):
        features.save(tmp_path / "a.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(AidgnError, match=r"pip install .aidgn\[parquet\]"):
        features.save(tmp_path / "b.parquet")
    assert not (tmp_path / "b.parquet").exists()


def test_a_run_that_is_not_finished_or_none(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(AidgnError, match=r"not finished.*`aidgn report .*`aidgn train`"):
        extract_features(copy, device="cpu")
    (copy / "results.jsonl").write_text("")
    with pytest.raises(AidgnError, match=r"not finished.*no records.*`aidgn train`"):
        extract_features(copy, device="cpu")
    with pytest.raises(AidgnError, match="does not exist"):
        extract_features(tmp_path / "nowhere")
    with pytest.raises(AidgnError, match="holds 1 run: give one, such as"):
        extract_features(copy.parent)
    with pytest.raises(AidgnError, match="is a file: give the folder"):
        extract_features(copy / "run.json")


# Own images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for domain in ("a", "b", "c"):
        for level, name in ((60, "dark"), (200, "light")):
            (tmp_path / "photos" / domain / name).mkdir(parents=True)
            for number in range(5):
                pixels = np.clip(rng.normal(level, 25, (30, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / domain / name / f"{number}.png")
    return tmp_path / "photos"


def photos_run(photos: Path, **changes: object) -> Path:
    return train(
        RunSpec(
            str(photos),
            target="c",
            steps=1,
            eval_every=1,
            image_size=28,
            backbone="small",
            hyper_parameters={"batch_size": 2},
            **changes,
        ),  # type: ignore[arg-type]
        photos.parent / "runs",
        device="cpu",
    )


def test_the_folder_of_the_images_is_remembered_and_can_be_told(photos: Path) -> None:
    run = photos_run(photos)
    assert json.loads((run / "run.json").read_text())["root"] == str(photos)
    first = extract_features(run, device="cpu")
    assert first.files[0] == "a/dark/0.png" and len(first) == 30
    (run / "features.npz").unlink()
    moved = photos.rename(photos.with_name("moved"))
    with pytest.raises(AidgnError, match=r"photos.* --data DIR"):
        extract_features(run, device="cpu")
    np.testing.assert_array_equal(extract_features(run, data=moved, device="cpu").logits, first.logits)
    (run / "features.npz").unlink()
    Image.new("RGB", (30, 40)).save(moved / "a" / "dark" / "0.png")
    with pytest.raises(AidgnError, match=r"moved .*--data DIR"):
        extract_features(run, data=moved, device="cpu")
    shutil.rmtree(moved)
    (run / "features.npz").write_bytes(b"")
    with pytest.raises(AidgnError, match="moved does not exist"):
        extract_features(run, data=moved, device="cpu")


def test_a_published_data_set_is_found_by_name_wherever_it_lies(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of runs that do not say where their images were."""
    pacs = photos.rename(photos.with_name("PACS"))
    for old, new in (("a", "art_painting"), ("b", "cartoon"), ("c", "photo")):
        (pacs / old).rename(pacs / new)
    shutil.copytree(pacs / "photo", pacs / "sketch")
    run = train(
        RunSpec(
            "PACS",
            target="C",
            steps=1,
            eval_every=1,
            image_size=28,
            backbone="small",
            hyper_parameters={"batch_size": 2},
        ),
        pacs.parent / "runs",
        data_dir=pacs.parent,
        device="cpu",
    )
    about = json.loads((run / "run.json").read_text())
    del about["root"]
    (run / "run.json").write_text(json.dumps(about))
    monkeypatch.chdir(run)
    with pytest.raises(AidgnError, match=r"PACS is not on this disk.* with --data or"):
        extract_features(run, device="cpu")
    for ways in ({"data_dir": pacs.parent}, {"data": pacs.parent}, {"data": pacs}):
        found = extract_features(run, device="cpu", **ways)  # type: ignore[arg-type]
        assert found.targets == ["cartoon"] and len(found) == 40
        (run / "features.npz").unlink()
    elsewhere = pacs.rename(pacs.with_name("pictures"))
    assert extract_features(run, device="cpu", data=elsewhere).domain_names[0] == "art_painting"
    (run / "features.npz").unlink()
    monkeypatch.setenv("AIDGN_DATA", str(pacs.parent))
    elsewhere.rename(pacs)
    assert len(extract_features(run, device="cpu")) == 40


def test_images_that_the_run_left_out_stay_out(photos: Path) -> None:
    (photos / "b" / "light" / "3.png").write_text("broken")
    run = photos_run(photos, skip_broken=True)
    assert len(extract_features(run, device="cpu")) == 29


def test_an_algorithm_that_predicts_by_its_own_way(photos: Path, own: str) -> None:
    run = photos_run(photos, algorithm=own)
    with pytest.raises(AidgnError, match="--algorithm"):
        extract_features(run, device="cpu")
    found = extract_features(run, device="cpu", algorithm=own)
    bias = load_file(run / "model.safetensors")["classifier.bias"].numpy()
    assert found.weight is not None
    np.testing.assert_allclose(found.logits, -(found.features @ found.weight + bias), rtol=1e-4, atol=1e-5)


def test_short_passes_take_one_thread_as_in_training(tmp_path: Path) -> None:
    run = train(RunSpec("digits", "ERM", "chalk", steps=2, hyper_parameters={"batch_size": 8}), tmp_path, device="cpu")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(2)
    threads = []
    try:
        extract_features(run, device="cpu", on_progress=lambda *_: threads.append(torch.get_num_threads()))
        assert set(threads) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads_before)
