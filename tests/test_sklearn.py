"""The scikit-learn classifier: scikit-learn's own checks, pictures of every kind, and the estimate of a run."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from aidgn.algorithms import create
from aidgn.data import load_dataset
from aidgn.data.cache import DecodedDataset
from aidgn.errors import AidgnError
from aidgn.runs.spec import RunSpec
from aidgn.sklearn import DomainGeneralizationClassifier
from aidgn.training.frozen import FeatureInput, FeatureStore
from aidgn.training.random_state import seed_generators
from aidgn.training.trainer import Trainer


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pictures, classes and sites of some of the embedded digits."""
    dataset = load_dataset("digits")
    assert dataset.pixels is not None
    kept = np.flatnonzero(dataset.labels < 4)
    sites = np.array(dataset.domains)[dataset.domain_of[kept]]
    return dataset.pixels[kept], dataset.labels[kept], sites


def to_features(pictures: np.ndarray) -> np.ndarray:
    """Average 4 x 4 pixels and take the distance from the median: ink may be darker or lighter than paper."""
    side = pictures.shape[1] // 4
    small = pictures[:, : 4 * side, : 4 * side, 0].reshape(-1, side, 4, side, 4).mean((2, 4)).reshape(len(pictures), -1)
    return np.abs(small - np.median(small, 1, keepdims=True)) / 50


def small(**options: Any) -> DomainGeneralizationClassifier:
    return DomainGeneralizationClassifier(device="cpu", **options)


def test_check_estimator() -> None:
    results = check_estimator(small(steps=100, hyper_parameters={"lr": 0.03}), on_fail=None, on_skip=None)
    assert len(results) > 40
    assert [result["check_name"] for result in results if result["status"] == "failed"] == []


def test_leave_one_group_out_gives_the_estimate_of_runs(
    digits: tuple[np.ndarray, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has the last site as target draws the same numbers as a fit without that site, given its seed."""
    monkeypatch.setattr(RunSpec, "seed", lambda self, dataset: 5)
    pictures, labels, sites = digits
    features = to_features(pictures).astype(np.float32)
    names, domains = np.unique(sites, return_inverse=True)
    scores = cross_val_score(
        small(steps=200, options={"eval_every": 50}),
        features,
        labels,
        groups=sites,
        cv=LeaveOneGroupOut(),
        params={"groups": sites},
    )
    estimates = [run_estimate(features, labels, domains, names.tolist(), site) for site in names]
    assert scores[-1] == pytest.approx(estimates[-1], abs=1e-9)
    assert np.mean(scores) > 0.4 and np.mean(scores) == pytest.approx(np.mean(estimates), abs=0.04)


def run_estimate(features: np.ndarray, labels: np.ndarray, domains: np.ndarray, names: list[str], site: str) -> float:
    """Accuracy on an unseen site by the trainer of runs, at the step that validation selects."""
    reference = small()
    reference.classes_, reference.domains_ = np.unique(labels), np.array(names)
    files = [f"{domain}/{i}" for i, domain in enumerate(domains)]
    dataset = reference._describe("features", labels, domains, files)
    spec = RunSpec("features", "AIDGN", site, steps=200, eval_every=50, train_only="head").resolved(dataset)
    seed_generators(5)
    algorithm = create("AIDGN", FeatureInput(features.shape[1]), 4, len(names) - 1, **spec.hyper_parameters)
    decoded = DecodedDataset(
        dataset, np.empty((0, 1, 1, 3), np.uint8), np.arange(len(labels)), np.empty((len(labels), 4), int), "", []
    )
    rows = np.arange(len(labels))[None]
    trainer = Trainer(spec, algorithm.train(), FeatureStore(decoded, torch.device("cpu"), features, rows))
    for minibatches in trainer.batches():
        trainer.train_step(minibatches)
        if trainer.is_evaluation_due():
            trainer.evaluate()
    algorithm.load_state_dict(trainer.best.weights)
    unseen = domains == names.index(site)
    with torch.no_grad():
        predicted = algorithm.eval().predict(torch.from_numpy(features[unseen])).argmax(1).numpy()
    return float((predicted == labels[unseen]).mean())


def test_text_classes_pipeline_and_grid(digits: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    pictures, labels, sites = digits
    features, words = to_features(pictures), np.array(["zero", "one", "two", "three"])[labels]
    pipeline = make_pipeline(StandardScaler(), small(steps=200))
    name = "domaingeneralizationclassifier"
    search = GridSearchCV(pipeline, {f"{name}__algorithm": ["ERM", "AIDGN"]}, cv=LeaveOneGroupOut())
    search.fit(features, words, groups=sites, **{f"{name}__groups": sites})
    assert set(search.predict(features)) <= {"zero", "one", "two", "three"} and search.best_score_ > 0.4
    assert search.predict_proba(features).sum(1) == pytest.approx(1)


def test_clone_and_pickle(digits: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    pictures, labels, sites = digits
    features = to_features(pictures)
    classifier = small(steps=20, hyper_parameters={"lr": 0.01}).fit(features, labels, groups=sites)
    again = clone(classifier).fit(features, labels, groups=sites)
    loaded = pickle.loads(pickle.dumps(classifier))
    for other in (again, loaded):
        assert np.array_equal(other.predict_proba(features), classifier.predict_proba(features))
    assert classifier.get_params()["hyper_parameters"] == {"lr": 0.01}
    assert list(classifier.domains_) == sorted(set(sites))


def test_pictures_in_memory_and_files_agree(
    digits: tuple[np.ndarray, np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIDGN_CACHE", str(tmp_path / "cache"))
    pictures, labels, sites = (part[::9] for part in digits)
    files = []
    for number, picture in enumerate(pictures):
        files.append(tmp_path / f"{number:08}.png")
        Image.fromarray(picture).save(files[-1], compress_level=1)
    threads = torch.get_num_threads()
    arrays = small(steps=15).fit(pictures, labels, groups=sites)
    paths = small(steps=15, out=tmp_path / "runs").fit(files, labels, groups=sites)
    assert torch.get_num_threads() == threads
    expected = arrays.predict_proba(pictures)
    assert expected.shape == (len(pictures), 4)
    assert np.array_equal(paths.predict_proba(files), expected)
    assert np.array_equal(arrays.predict_proba([Image.fromarray(picture) for picture in pictures]), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(arrays)).predict_proba(pictures), expected)
    assert len(list((tmp_path / "runs").glob("*/model.safetensors"))) == 1
    with pytest.raises(ValueError, match="fitted on pictures"):
        arrays.predict(to_features(pictures))


def test_errors_are_value_errors(digits: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    pictures, labels, sites = digits
    features = to_features(pictures)
    for classifier, groups in (
        (small(algorithm="VREx"), None),
        (small(options={"backbone": "resnet18"}), sites),
        (small(hyper_parameters={"lr": -1}), sites),
    ):
        with pytest.raises(ValueError) as caught:
            classifier.fit(features, labels, groups=groups)
        assert isinstance(caught.value, AidgnError)
    with pytest.raises(AidgnError, match="groups"):
        small().fit(features, labels, groups=sites[1:])
    with pytest.raises(ValueError, match="one path"):
        small().fit("photos", labels)


def test_import_is_lazy() -> None:
    code = "import aidgn, sys; assert not {'torch', 'sklearn', 'aidgn.sklearn'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
