"""Measure adaptation methods on trained runs, with settings chosen on source validation data.

RUN/adaptation.jsonl has a line for every method and setting; `selected` marks the setting with the highest accuracy on
source validation data. The target's labels only measure.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aidgn.adaptation.common import batches, check_classifier
from aidgn.adaptation.methods import DEFAULT, METHODS, ORDER
from aidgn.algorithms import Algorithm
from aidgn.analysis.extraction import (
    Progress,
    compute_features,
    extract_features,
    open_images,
)
from aidgn.analysis.features import Features
from aidgn.data.loader import DeviceImageStore
from aidgn.devices import single_thread
from aidgn.errors import AidgnError, UnknownNameError
from aidgn.files import FolderLock, write_text
from aidgn.inference import Model, load_model
from aidgn.runs.folder import RunFolder
from aidgn.runs.inputs import choose_custom_algorithm, open_run
from aidgn.runs.reader import read_adaptation
from aidgn.training.evaluation import predicts_by_classifier

BATCH_SIZE = 32

Line = dict[str, Any]
Measured = tuple[dict[str, Any], float, float]  # settings, source accuracy, target accuracy


def adapt(
    run: str | Path,
    methods: Sequence[str] = DEFAULT,
    *,
    data: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    algorithm: str | Sequence[str] | None = None,
    features: str | Path | None = None,
    on_progress: Progress | None = None,
    on_message: Callable[[str], None] | None = None,
) -> list[Line]:
    """Measure adaptation methods on a finished run, unless RUN/adaptation.jsonl has their results.

    Args:
        run: Folder of the run. Its model is not changed.
        methods: Names in `aidgn.adaptation.methods.METHODS`.
        data: The data set's folder, if it is no longer where the training found it.
        data_dir: Folder in which data sets are looked for.
        device: "auto", "cpu", "cuda" or "cuda:N".
        algorithm: FILE.py:CLASS of a custom algorithm, or several of which one is the run's.
        features: File of features of the run; by default RUN/features.npz, which is computed if it is missing.
        on_progress: Called with the part of the work, the number done and the total.
        on_message: Called with the reason if a method does not suit the run's algorithm.

    Returns:
        All lines of RUN/adaptation.jsonl.
    """
    report = on_progress or (lambda *_: None)
    folder = open_run(run)
    for method in methods:
        if method not in METHODS:
            raise UnknownNameError("adaptation method", method, METHODS)
    if not folder.identity["target"]:
        raise AidgnError(f"{run} was trained on all domains: there is no unseen one to adapt to.")
    loaded = None if features is None else Features.load(features, run)
    results = Results(folder)
    missing = [method for method in methods if not results.has(method)]
    total = sum(len(METHODS[method].settings) for method in methods)
    done = total - sum(len(METHODS[method].settings) for method in missing)
    if not missing and results.has("none"):
        report("adapting", done, total)
        return results.lines

    options: dict[str, Any] = {"data": data, "data_dir": data_dir, "device": device, "on_progress": report}
    known = loaded or extract_features(run, algorithm=algorithm, **options)
    report("adapting", done, total)  # the time left does not depend on that of computing features
    model = load_model(run, device, choose_custom_algorithm(folder.metadata, algorithm))
    streams = Streams(known, model, lambda: open_images(folder.metadata, **options))
    results.add("none", known, [({}, *_trained_accuracies(known))])
    refused = []
    for method in missing:
        settings = METHODS[method].settings
        try:
            _check_predictions(model.network)
            measured = []
            for number, values in enumerate(settings):
                measured.append((values, *_adapted_accuracies(model.network, method, values, streams)))
                report("adapting", done + number + 1, total)
            results.add(method, known, measured)
        except AidgnError as error:
            refused.append(f"{method} left out for {run}: {error}")
            report("adapting", done + len(settings), total)
        done += len(settings)
    if not any(results.has(method) for method in methods):
        raise AidgnError("\n".join(refused))
    if on_message:
        for message in refused:
            on_message(message)
    return results.lines


class Results:
    """The lines of RUN/adaptation.jsonl that were measured with this model."""

    def __init__(self, run: RunFolder):
        self.run = run
        self.model = run.model_digest
        self.lines = read_adaptation(run.path, self.model)

    def has(self, method: str) -> bool:
        """Return whether every setting of the method was measured."""
        known = [line["settings"] for line in self.lines if line["method"] == method]
        return all(settings in known for settings in (METHODS[method].settings if method in METHODS else [{}]))

    def add(self, method: str, features: Features, measured: Sequence[Measured]) -> None:
        """Write a method's results; the first setting of highest source accuracy is selected."""
        best = max(range(len(measured)), key=lambda i: round(measured[i][1], 9))
        new = [
            {
                "dataset": features.dataset,
                "algorithm": features.algorithm,
                "target": features.targets,
                "trial": features.trial,
                "draw": features.draw,
                "method": method,
                "settings": settings,
                "source_accuracy": source,
                "target_accuracy": target,
                "selected": number == best,
                "model": self.model,
            }
            for number, (settings, source, target) in enumerate(measured)
        ]
        with FolderLock(self.run.adaptation_lock):  # another process may have added other methods
            others = [line for line in read_adaptation(self.run.path, self.model) if line["method"] != method]
            order = {name: place for place, name in enumerate(ORDER)}  # a later version may know more methods
            self.lines = sorted(others + new, key=lambda line: order.get(line["method"], len(order)))
            write_text(self.run.adaptation, "".join(json.dumps(line) + "\n" for line in self.lines))


def _trained_accuracies(features: Features) -> tuple[float, float]:
    """Return the accuracy on the sources' validation images and on the targets' train split, without adaptation."""
    sources = [features.accuracy(features.split(name)[1]) for name in features.source_names]
    targets = [features.accuracy(features.split(name)[0]) for name in features.targets]
    return float(np.mean(sources)), float(np.mean(targets))


def _adapted_accuracies(
    network: Algorithm, method: str, settings: dict[str, Any], streams: "Streams"
) -> tuple[float, float]:
    """Return the same accuracies under adaptation, which starts from the trained weights in every domain."""
    names = streams.features.source_names, streams.features.targets
    with nullcontext() if METHODS[method].needs_images else single_thread():
        adapter = METHODS[method].adapter(network, **settings)
        sources = [accuracy(adapter, streams.domain(name, method, validation=True)) for name in names[0]]
        targets = [accuracy(adapter, streams.domain(name, method, validation=False)) for name in names[1]]
        source, target = torch.stack([torch.stack(sources).mean(), torch.stack(targets).mean()]).tolist()
    return source, target


@dataclass
class Domain:
    """The batches of a domain, images or features, and the labels to measure with, in the same order."""

    batches: Callable[[], Iterable[Tensor]]
    labels: Tensor
    has_images: bool


def accuracy(adapter: Any, domain: Domain) -> Tensor:
    """Reset the adapter and measure its predictions, each made when its batch comes; float64, on the device."""
    adapter.reset()
    predict = adapter.predict if domain.has_images else adapter.predict_features
    predicted = torch.cat([predict(batch).argmax(1) for batch in domain.batches()])
    hits = predicted == domain.labels
    return (hits.cpu() if hits.device.type == "mps" else hits).double().mean()  # mps has no float64


class Streams:
    """The domains of a run as batches of features, or of images for a method that adapts the network below them."""

    def __init__(self, features: Features, model: Model, images: Callable[[], DeviceImageStore]):
        self.features = features
        self.model = model
        self.network = model.network
        self.device = model.device
        self._open_images = images
        self._domains: dict[tuple[str, bool, bool], Domain] = {}

    @cached_property
    def images(self) -> DeviceImageStore:
        return self._open_images()

    def domain(self, name: str, method: str, validation: bool) -> Domain:
        """Return the validation or train split of a domain, in its shuffled order."""
        needs_images = METHODS[method].needs_images
        key = name, validation, needs_images
        if key not in self._domains:
            indices = self.features.split(name)[validation]
            labels = torch.from_numpy(self.features.labels[indices]).to(self.device)
            rows = [torch.from_numpy(indices[batch.start : batch.stop]) for batch in batches(len(indices), BATCH_SIZE)]
            if needs_images:
                self._domains[key] = Domain(lambda: self._image_batches(rows), labels, needs_images)
            else:
                values = list(self._feature_batches(rows))
                self._domains[key] = Domain(lambda: values, labels, needs_images)
        return self._domains[key]

    def _feature_batches(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        if BATCH_SIZE % self.network.group_size == 0:
            values = torch.from_numpy(self.features.features[torch.cat(list(rows)).numpy()]).to(self.device)
            yield from values.split([len(row) for row in rows])
        else:  # images that evaluation predicts together come in different batches here
            yield from (z for _, z, _ in compute_features(self.model, self.images, rows))

    def _image_batches(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        _, transform = self.images.transforms(self.model.preprocessing.transform_settings())
        for pixels, geometry, _ in self.images.batches(rows):
            yield transform(pixels, geometry)


def _check_predictions(network: Algorithm) -> None:
    check_classifier(network)
    if not predicts_by_classifier(network):
        raise AidgnError(
            f"{network.name()} overrides `predict`: adapting the classifier would not adapt its predictions."
        )
