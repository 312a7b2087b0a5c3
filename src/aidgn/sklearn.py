"""A scikit-learn classifier for data from several domains, on pictures or on features."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from numbers import Integral
from os.path import commonpath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from aidgn.algorithms import Algorithm, find
from aidgn.algorithms.optimization import Optimization
from aidgn.data import Dataset, read_image
from aidgn.data.cache import DecodedDataset
from aidgn.data.registry import DatasetInfo, short_names
from aidgn.devices import choose_device
from aidgn.errors import AidgnError, ParameterError
from aidgn.fitting.plan import HEAD_STEPS, choose_image_size, plan_fit
from aidgn.inference.image_stream import upright
from aidgn.inference.loading import load_model
from aidgn.inference.prediction import softmax
from aidgn.results import RunResult
from aidgn.runs.options import HEAD, MAX_NUMBER
from aidgn.runs.spec import RunSpec
from aidgn.training import train
from aidgn.training.frozen import FeatureInput, FeatureStore
from aidgn.training.random_state import random_state, seed_generators, set_random_state
from aidgn.training.trainer import Trainer

IMAGE_OPTIONS = ("image_size", "backbone", "weights", "train_only", "views", "batch_norm", "layer_decay", "skip_broken")


class InputError(AidgnError, ValueError):
    """The data or a parameter cannot be used; scikit-learn expects a ValueError."""


class DomainGeneralizationClassifier(ClassifierMixin, BaseEstimator):
    """A classifier for domains that it never saw, such as another hospital, camera or shop.

    `fit` takes the domain of each sample as `groups`. A fifth of every domain validates, and `fit` keeps the weights of
    the step that classifies these samples best, like a run on all domains. So `LeaveOneGroupOut` measures the same
    accuracies as `aidgn fit` and a sweep.

    X is either features, numbers [N, n], on which the algorithm trains its classifier, or pictures: a list of paths,
    PIL images or arrays, or an array [N, H, W] or [N, H, W, 3]. Pictures train a network with the settings that
    `aidgn fit` would choose.

    Args:
        algorithm: Name of an algorithm, or path/to/file.py:Class.
        steps: Training steps. By default 500 on features; on pictures the number that `aidgn fit` would choose.
        hyper_parameters: Hyper-parameters of the algorithm by name, such as {"lr": 1e-3}.
        options: Options of a run by name (fields of `aidgn.RunSpec`), such as {"backbone": "resnet50.tv_in1k"}.
        random_state: Seed of splits, batches and initial weights.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: Arithmetic of a network on pictures: auto, bfloat16, tf32 or float32.
        out: Folder that keeps runs on pictures, so that an interrupted `fit` continues. By default none is kept.

    Attributes:
        classes_: The classes, sorted.
        domains_: The domains, sorted.
        n_features_in_: Number of features; only after a fit on features.
        validation_score_: Mean accuracy on the samples that were set aside, over the domains.

    Example:
        >>> from aidgn.sklearn import DomainGeneralizationClassifier
        >>> from sklearn.datasets import make_blobs
        >>> X, y = make_blobs(120, centers=[[4, 0], [0, 4], [-4, -4]], random_state=0)
        >>> site = [i % 3 for i in range(120)]
        >>> classifier = DomainGeneralizationClassifier(steps=60).fit(X, y, groups=site)
        >>> bool(classifier.score(X, y) > 0.9)
        True
    """

    def __init__(
        self,
        algorithm: str = "AIDGN",
        *,
        steps: int | None = None,
        hyper_parameters: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        random_state: Any = 0,
        device: str = "auto",
        precision: str = "auto",
        out: str | Path | None = None,
    ):
        self.algorithm = algorithm
        self.steps = steps
        self.hyper_parameters = hyper_parameters
        self.options = options
        self.random_state = random_state
        self.device = device
        self.precision = precision
        self.out = out

    def fit(self, X: Any, y: Any, groups: Any = None) -> "DomainGeneralizationClassifier":
        """Train on all domains.

        Args:
            X: Features or pictures.
            y: Class of each sample.
            groups: Domain of each sample. Without it all belong to one, and some algorithms need two.
        """
        on_pictures = is_pictures(X)
        if on_pictures:
            X = list(X)
            if y is None or len(X) != len(y):
                raise InputError(f"X has {len(X)} pictures and y has {0 if y is None else len(y)} classes.")
        else:
            X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"y has {len(self.classes_)} class; a classifier needs samples of at least 2 classes.")
        self.domains_, domains = encode_groups(groups, len(labels))
        try:
            with global_state_kept(choose_device(self.device)):
                if on_pictures:
                    self._fit_pictures(X, labels, domains)
                else:
                    self._fit_features(X, labels, domains)
        except ValueError:
            raise
        except AidgnError as error:
            raise InputError(str(error)) from error
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each sample."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, float64 [N, C] in the order of `classes_`."""
        check_is_fitted(self, "model_")
        on_pictures = is_pictures(X)
        if on_pictures != (not isinstance(self.model_, Algorithm)):
            other = ("features", "pictures") if on_pictures else ("pictures", "features")
            raise InputError(f"This classifier was fitted on {other[0]}, X has {other[1]}.")
        if on_pictures:
            probabilities: np.ndarray = self.model_.predict(X).probabilities
            return probabilities
        X = validate_data(self, X, dtype=np.float64, reset=False)
        with torch.inference_mode():
            return softmax(self.model_.predict(torch.from_numpy(np.ascontiguousarray(X))).numpy())

    # Training --------------------------------------------------------------------------------------------------------

    def _fit_features(self, X: np.ndarray, labels: np.ndarray, domains: np.ndarray) -> None:
        options = {"eval_every": max((self.steps or HEAD_STEPS) // 5, 20), **(self.options or {})}
        if unused := [name for name in IMAGE_OPTIONS if name in options]:
            raise InputError(f"The option {unused[0]} is for pictures, and X has features.")
        dataset = self._describe("features", labels, domains, [f"{group}/{i}" for i, group in enumerate(domains)])
        spec = self._spec(dataset, steps=self.steps or HEAD_STEPS, train_only=HEAD, **options)
        device = choose_device(self.device)
        rows = np.arange(len(X))
        empty = np.empty((len(X), 4), np.int32)
        decoded = DecodedDataset(dataset, np.empty((0, 1, 1, 3), np.uint8), rows, empty, "", [])
        store = FeatureStore(decoded, device, X.astype(np.float32), rows[None])
        torch.set_num_threads(1)  # steps are too short to share
        seed_generators(spec.seed(dataset))
        create = find(spec.algorithm)
        algorithm = create(
            FeatureInput(X.shape[1]), len(dataset.classes), len(dataset.domains), **spec.hyper_parameters
        )
        algorithm.optimization = Optimization(spec.optimizer or "adam", spec.layer_decay or 1.0, spec.accumulate)
        trainer = Trainer(spec, algorithm.to(device).train(), store)
        for minibatches in trainer.batches():
            trainer.train_step(minibatches)
            if trainer.is_evaluation_due():
                record = trainer.evaluate()
                if trainer.best.step == trainer.step:
                    self.validation_score_ = trainer.evaluator.mean_validation(record)
        algorithm.load_state_dict(trainer.best.weights)
        algorithm.__dict__.pop("optimizers", None)  # a cached property: prediction needs none, and pickles stay small
        algorithm.zero_grad()
        self.model_: Any = deepcopy(algorithm).cpu().double().eval()

    def _fit_pictures(self, X: list[Any], labels: np.ndarray, domains: np.ndarray) -> None:
        with tempfile.TemporaryDirectory(prefix="aidgn-") as temporary:
            cache_dir = None
            if not all(isinstance(picture, str | Path) for picture in X):
                X, cache_dir = save_pictures(X, Path(temporary, "pictures")), Path(temporary, "cache")
            files = [str(Path(picture).absolute()) for picture in X]
            root = Path(commonpath([str(Path(file).parent) for file in files]))
            dataset = self._describe("pictures", labels, domains, [str(Path(f).relative_to(root)) for f in files], root)
            size = (self.options or {}).get("image_size") or choose_image_size(dataset)
            dataset = dataset.with_image_size(size)
            options = {"device": self.device, "hyper_parameters": self.hyper_parameters, "steps": self.steps}
            plan = plan_fit(dataset, dataset.name, self.algorithm, **options, **(self.options or {}))  # type: ignore[arg-type]
            skip_broken = bool((self.options or {}).get("skip_broken"))
            spec = replace(plan.final, trial=self._trial(), skip_broken=skip_broken)
            folder = train(
                spec,
                self.out or Path(temporary, "runs"),
                device=self.device,
                precision=self.precision,
                cache_dir=cache_dir,
                dataset=dataset,
            )
            self.model_ = load_model(folder, self.device, self.algorithm if ":" in self.algorithm else None)
            self.validation_score_ = RunResult(folder).best.validation

    def _describe(
        self, name: str, labels: np.ndarray, domains: np.ndarray, files: Sequence[str], root: Path | None = None
    ) -> Dataset:
        names = tuple(map(str, self.domains_))
        info = DatasetInfo(name, names, short_names(names), len(self.classes_), eval_every=100)
        return Dataset(info, list(map(str, self.classes_)), list(files), labels, domains, root)

    def _spec(self, dataset: Dataset, **options: Any) -> RunSpec:
        values = dict(self.hyper_parameters or {})
        spec = RunSpec(dataset.name, self.algorithm, (), self._trial(), hyper_parameters=values, **options)
        return spec.resolved(dataset)

    def _trial(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(MAX_NUMBER))


def is_pictures(X: Any) -> bool:
    """Return whether X holds pictures; everything else is checked as features."""
    if isinstance(X, str | bytes | Path):
        raise InputError("X is one path; expected a list of paths, or features [N, n].")
    if isinstance(X, torch.Tensor | np.ndarray) and X.ndim > 2:
        return True
    if not hasattr(X, "__len__") or not hasattr(X, "__getitem__") or getattr(X, "ndim", 1) != 1 or not len(X):
        return False
    first = next(iter(X))
    return isinstance(first, str | Path | Image.Image) or getattr(first, "ndim", 1) > 1


def encode_groups(groups: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the names of the domains, sorted, and the number of each sample's domain."""
    if groups is None:
        return np.array(["all"]), np.zeros(count, np.int64)
    groups = column_or_1d(groups)
    if len(groups) != count:
        raise ParameterError("groups", f"of length {len(groups)}", f"one domain for each of {count} samples")
    names, codes = np.unique(groups, return_inverse=True)
    return names, codes.astype(np.int64)


def save_pictures(pictures: Sequence[Any], folder: Path) -> list[str]:
    """Write pictures from memory as files without loss, and return their paths."""
    folder.mkdir()
    files = []
    for number, picture in enumerate(pictures):
        file = folder / f"{number:08}.png"
        try:
            image = read_image(picture)[0] if isinstance(picture, str | Path) else upright(picture)
            image.save(file, compress_level=1)
        except AidgnError as error:
            raise InputError(f"Picture {number} of X cannot be used: {error}") from None
        files.append(str(file))
    return files


@contextmanager
def global_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the global random generators and the number of threads at the end of the context."""
    state, threads = random_state(device), torch.get_num_threads()
    try:
        yield
    finally:
        set_random_state(state, device)
        torch.set_num_threads(threads)
