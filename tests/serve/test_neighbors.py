"""The map holds training images only, of all kinds alike, and a picture's nearest are those with the smallest angle."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.analysis.extraction import extract_features
from aidgn.data import load_dataset
from aidgn.data.splits import train_val_indices
from aidgn.errors import AidgnError
from aidgn.inference import load_model
from aidgn.inference.export import export
from aidgn.progress import RunDisplay
from aidgn.serve.neighbors import LatentSpace, build_latent_space, sample_evenly
from aidgn.training import RunSpec, train

DIGITS = load_dataset("digits")
CHALK = DIGITS.domains.index("chalk")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RunSpec("digits", "ERM", "chalk", steps=3, eval_every=3, hyper_parameters={"batch_size": 8})
    return train(spec, tmp_path_factory.mktemp("runs"), device="cpu")


@pytest.fixture(scope="module")
def space(run: Path) -> LatentSpace:
    return build_latent_space(run, load_model(run, "cpu"), 120)


def test_nearest_have_the_smallest_angles(space: LatentSpace) -> None:
    feature = np.random.default_rng(0).random(space.directions.shape[1]).astype(np.float32)
    place, near = space.locate(feature)
    z = feature.astype(np.float64)
    distances = [
        1 - sum(a * b for a, b in zip(z, w, strict=True)) / np.sqrt((z**2).sum() * (w**2).sum())
        for w in space.directions.astype(np.float64)
    ]
    order = np.argsort(distances)[:6]
    assert [index for index, _ in near] == order.tolist()
    np.testing.assert_allclose([distance for _, distance in near], np.sort(distances)[:6], atol=1e-5)
    weights = np.array([1 / (distances[i] + 1e-6) for i in order[:5]])
    np.testing.assert_allclose(place, (weights[:, None] * space.positions[order[:5]]).sum(0) / weights.sum(), atol=1e-3)


def test_training_image_keeps_its_position(space: LatentSpace, run: Path) -> None:
    features = load_model(run, "cpu").predict(DIGITS.pixels[space.rows[:10]]).features.numpy()
    for index, feature in enumerate(features):
        place, near = space.locate(3 * feature)  # the norm plays no part
        assert near[0][1] < 1e-5
        if near[1][1] > 1e-3:
            assert near[0][0] == index
            np.testing.assert_allclose(place, space.positions[index], atol=0.02)


def test_training_images_of_all_classes_and_domains(space: LatentSpace) -> None:
    assert len(space.rows) == len(set(space.rows.tolist())) == 120 and space.positions.shape == (120, 2)
    assert space.positions.min() >= 0 and space.positions.max() <= 1
    inside = set()
    for domain in range(4):
        everywhere = DIGITS.indices(domain)
        inside |= (
            set(everywhere[train_val_indices(len(everywhere), 0, domain)[0]].tolist()) if domain != CHALK else set()
        )
    assert set(space.rows.tolist()) <= inside
    assert set(Counter(zip(space.domains.tolist(), space.labels.tolist(), strict=True)).values()) == {4}
    rare = sample_evenly(np.array([0] * 50 + [1] * 10), np.zeros(60, np.int64), [train_val_indices(60, 0, 0)[0]], 10)
    assert Counter((rare >= 50).tolist()) == {False: 5, True: 5}


def test_thumbnails(space: LatentSpace) -> None:
    import io

    found = space.thumbnail(7)
    assert found and np.array_equal(np.asarray(Image.open(io.BytesIO(found))), DIGITS.pixels[space.rows[7]])
    assert space.thumbnail(-1) is None and space.thumbnail(10**9) is None
    assert replace(space, dataset=None).thumbnail(0) is None


def test_saved_features_are_used_if_they_fit_the_model(run: Path, space: LatentSpace, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    kept = extract_features(copy, device="cpu")
    model = load_model(copy, "cpu")
    more = build_latent_space(copy, model, 50)
    assert len(more.rows) > 1000 and len(more.positions) == 50
    wanted = kept.features[more.rows] / np.linalg.norm(kept.features[more.rows], axis=1, keepdims=True)
    np.testing.assert_allclose(more.directions, wanted, atol=1e-6)
    replace(kept, model="0" * 64, features=kept.features * 0).save(copy / "features.npz")
    again = build_latent_space(copy, model, 120)
    np.testing.assert_allclose(again.directions, space.directions, atol=1e-5)


def test_folders_exported_files_and_missing_data(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for domain in ("a", "b", "c"):
        for name in ("dark", "light"):
            (tmp_path / "photos" / domain / name).mkdir(parents=True)
            for number in range(8):
                noise = random.integers(0, 256 if name == "light" else 99, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(noise).save(tmp_path / "photos" / domain / name / f"{number}.png")
    spec = RunSpec(
        str(tmp_path / "photos"),
        "ERM",
        "c",
        steps=1,
        eval_every=1,
        backbone="small",
        image_size=32,
        hyper_parameters={"batch_size": 2},
    )
    run = train(spec, tmp_path / "runs", device="cpu")
    file = tmp_path / "model.safetensors"
    shutil.move(export(run, tmp_path / "out", onnx=False).files[0], file)
    model = load_model(file, "cpu")
    with pytest.raises(AidgnError, match="not found"):
        build_latent_space(file, model, 100)
    space = build_latent_space(file, model, 100, tmp_path / "photos")
    assert len(space.rows) == 26 and set(space.domains.tolist()) == {0, 1}  # two sources, 16 less a fifth each
    assert space.thumbnail(3)
    (tmp_path / "photos").rename(tmp_path / "moved")
    with pytest.raises(AidgnError, match="--data"):
        build_latent_space(run, model, 100)
    display = RunDisplay(enabled=False)  # which knows the names of all work
    assert len(build_latent_space(run, model, 100, tmp_path / "moved", display.update).rows) == 26
    dark, light = tmp_path / "moved" / "a" / "dark", tmp_path / "moved" / "a" / "light"
    for folder, name in ((dark, "swap"), (light, "dark"), (dark.with_name("swap"), "light")):  # the names stay the same
        folder.rename(folder.with_name(name))
    with pytest.raises(AidgnError, match="not those that"):
        build_latent_space(run, model, 100, tmp_path / "moved")
    for folder, name in ((dark, "swap"), (light, "dark"), (dark.with_name("swap"), "light")):
        folder.rename(folder.with_name(name))
    assert len(build_latent_space(run, model, 100, tmp_path / "moved").rows) == 26
    (tmp_path / "moved" / "a" / "dark" / "0.png").unlink()
    with pytest.raises(AidgnError, match="not those that"):
        build_latent_space(run, model, 100, tmp_path / "moved")
