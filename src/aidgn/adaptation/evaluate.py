"""Adaptation of trained runs, measured: settings chosen on source validation data, results kept beside the run.

RUN/adaptation.jsonl has a line for every method and setting; `selected` marks the setting that the accuracy on source
validation data chose. The labels of the target only ever measure.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aidgn.adaptation.common import batches, check
from aidgn.adaptation.t3a import T3A
from aidgn.adaptation.tent import Tent, TentBN, TentC
from aidgn.algorithms import Algorithm
from aidgn.analysis.features import (
    Features,
    Progress,
    clean_transform,
    compute,
    extract,
    open_images,
    open_run,
    own_algorithm,
)
from aidgn.data.loader import DeviceImageStore
from aidgn.errors import AidgnError
from aidgn.files import lock, open_no_link, storage_error, write_text
from aidgn.inference.model import load_model
from aidgn.novelty import predicts_by_classifier
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import read_adaptation

BATCH = 32
TENT = [{"rate": rate, "updates": updates} for rate in (0.1, 1.0, 10.0) for updates in (1, 3)]
KINDS: dict[str, type] = {"T3A": T3A, "Tent-C": TentC, "Tent-BN": TentBN, "Tent": Tent}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "T3A": [{"filter_k": k} for k in (1, 5, 20, 50, 100, "all")],
    "Tent-C": TENT,
    "Tent-BN": TENT,
    "Tent": TENT,
}
DEFAULT = ("T3A", "Tent-C", "Tent-BN")

Line = dict[str, Any]
Stream = Callable[[], Iterable[Tensor]]  # the batches of one domain, in the split's shuffled order


@dataclass
class Domain:
    """What an adaptation meets of one domain: batches without labels, and the labels to measure with, in order."""

    batches: Stream
    labels: Tensor


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
    """The lines of RUN/adaptation.jsonl, after measuring what of `methods` it lacks.

    A method that this algorithm cannot have is told to `on_message` and left out; an error if none is left."""
    folder = open_run(Path(run))
    run = folder.path
    if not folder.identity["target"]:
        raise AidgnError(f"{run} was trained on all domains: there is no unseen one to adapt to.")
    report = on_progress or (lambda *_: None)
    given = None if features is None else Features.load(features, run)
    lines = read_adaptation(run, folder.model_digest)
    todo = [method for method in methods if not _complete(lines, method)]
    total = sum(len(SETTINGS[method]) for method in methods)
    done = total - sum(len(SETTINGS[method]) for method in todo)
    if not todo and _complete(lines, "none"):
        report("adapting", done, total)
        return lines

    known = given or extract(run, data=data, data_dir=data_dir, device=device, algorithm=algorithm, on_progress=report)
    report("adapting", done, total)  # from here on, as its time left is no matter of computing features
    model = load_model(run, device, own_algorithm(folder.metadata, algorithm))
    streams = Streams(
        known,
        model.network,
        model.device,
        lambda: open_images(folder.metadata, data=data, data_dir=data_dir, device=device, on_progress=report),
    )
    front = {
        "dataset": known.dataset,
        "algorithm": known.algorithm,
        "target": known.targets,
        "trial": known.trial,
        "draw": known.draw,
    }

    def keep(method: str, measured: list[tuple[dict[str, Any], float, float]]) -> None:
        best = max(range(len(measured)), key=lambda i: round(measured[i][1], 9))  # the first of equals
        with locked(run):  # another process may have measured other methods meanwhile
            lines[:] = [line for line in read_adaptation(run, known.model) if line["method"] != method] + [
                {
                    **front,
                    "method": method,
                    "settings": settings,
                    "source_accuracy": source,
                    "target_accuracy": target,
                    "selected": i == best,
                    "model": known.model,
                }
                for i, (settings, source, target) in enumerate(measured)
            ]
            order = ["none", *KINDS]  # then those of a later version
            lines.sort(key=lambda line: order.index(line["method"]) if line["method"] in order else len(order))
            write_text(RunFolder(run).adaptation, "".join(json.dumps(line) + "\n" for line in lines))

    sources = [name for name in known.domain_names if name not in known.targets]
    keep(
        "none",
        [
            (
                {},
                float(np.mean([known.accuracy(known.split(name)[1]) for name in sources])),
                float(np.mean([known.accuracy(known.split(name)[0]) for name in known.targets])),
            )
        ],
    )
    refused = []
    for method in todo:
        measured = []
        try:
            _check(model.network)
            for settings in SETTINGS[method]:
                adaptation = KINDS[method](model.network, **settings)
                found = [
                    torch.stack([accuracy(adaptation, streams.of(name, method, outside)) for name in names]).mean()
                    for names, outside in ((sources, True), (known.targets, False))
                ]
                measured.append((settings, *torch.stack(found).tolist()))
                done += 1
                report("adapting", done, total)
        except AidgnError as error:
            refused.append(f"{method} left out for {run}: {error}")
            done += len(SETTINGS[method]) - len(measured)
            report("adapting", done, total)
            continue
        keep(method, measured)
    if not any(_complete(lines, method) for method in methods):
        raise AidgnError("\n".join(refused))
    for message in refused:
        (on_message or (lambda _: None))(message)
    return lines


def accuracy(adaptation: Any, domain: Domain) -> Tensor:
    """The share of right predictions, each made when its batch comes; float64 on the device, so that nobody waits."""
    adaptation.reset()
    predict = adaptation.predict if isinstance(adaptation, Tent) else adaptation.predict_features
    found = torch.cat([predict(batch).argmax(1) for batch in domain.batches()])
    return (found == domain.labels).double().mean()


class Streams:
    """The domains of a run as streams of features, or of images for Tent, which adapts the network below them."""

    def __init__(
        self, features: Features, network: Algorithm, device: torch.device, images: Callable[[], DeviceImageStore]
    ):
        self.features, self.network, self.device, self._images = features, network, device, images
        self.made: dict[tuple[str, bool, bool], Domain] = {}

    @cached_property
    def images(self) -> DeviceImageStore:
        return self._images()

    def of(self, name: str, method: str, outside: bool) -> Domain:
        """A domain's `in` or `out` split in its shuffled order."""
        key = name, outside, method == "Tent"
        if key not in self.made:
            where = self.features.split(name)[outside]
            labels = torch.from_numpy(self.features.labels[where]).to(self.device)
            rows = [torch.from_numpy(where[batch.start : batch.stop]) for batch in batches(len(where), BATCH)]
            if method == "Tent":
                self.made[key] = Domain(lambda: self._transformed(rows), labels)
            else:
                found = list(self._features(rows))
                self.made[key] = Domain(lambda: found, labels)
        return self.made[key]

    def _features(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        if BATCH % self.network.group_size == 0:
            values = torch.from_numpy(self.features.features[torch.cat(list(rows)).numpy()]).to(self.device)
            yield from values.split([len(row) for row in rows])
        else:  # images that evaluation predicts together come in different batches here
            yield from (z for _, z, _ in compute(self.network, self.images, rows))

    def _transformed(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        transform = clean_transform(self.images)
        for pixels, geometry, _ in self.images.batches(rows):
            yield transform(pixels, geometry)


def _check(network: Algorithm) -> None:
    check(network)
    if not predicts_by_classifier(network):
        raise AidgnError(
            f"{network.name()} has a `predict` of its own: adapting the classifier behind its `features` "
            "would not adapt its predictions."
        )


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """While the lines of a run are read and written."""
    path = RunFolder(run).adaptation
    try:
        file = open_no_link(path.with_name(f".{path.name}.lock"), "a")
    except OSError as error:
        raise storage_error(path, error) from None
    with file:
        lock(file, run, wait=True)
        yield


def _complete(lines: Iterable[Line], method: str) -> bool:
    known = [line["settings"] for line in lines if line["method"] == method]
    return all(settings in known for settings in SETTINGS.get(method, [{}]))
