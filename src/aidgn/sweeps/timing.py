"""How long runs take: from runs of this sweep that finished on this machine, else from what was measured on an H200."""

import socket
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aidgn.data import Dataset
from aidgn.sweeps.store import PlannedRun, RunStatus

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

# Measured (benchmarks/algorithms.py): ResNet-50, bfloat16, batches of 3 x 32 images of 224 pixels, which lie ready.
GPU = "NVIDIA H200"
STEP_MS = {
    "ERM": 9.9,
    "IRM": 10.3,
    "GroupDRO": 10.1,
    "Mixup": 10.2,
    "MLDG": 36.1,
    "CORAL": 10.9,
    "MMD": 10.7,
    "DANN": 6.6,
    "CDANN": 6.8,
    "MTL": 10.2,
    "SagNet": 23.2,
    "VREx": 10.1,
    "RSC": 10.0,
    "AIDGN": 10.4,
    "AIDGN-noR": 10.4,
    "AIDGN-noD": 10.4,
    "AIDGN-noRD": 10.3,
    "AIDGN-release": 10.5,
    "SD": 10.0,
    "Fishr": 10.5,
    "EQRM": 10.5,
    "ARM": 17.6,
}
INPUT_MS = 0.4  # to gather and augment them (benchmarks/training.py)
STEP_IMAGES = 96
EVALUATION = 25000  # images per second: 0.16 s for the 3996 that selection needs on PACS, on average over the targets


def h200_seconds(spec: "RunSpec", dataset: Dataset, counts: Sequence[int]) -> float | None:
    """Of a run on one H200, compilation aside, one's own algorithm counted as ERM; None where the measured times say
    nothing about it.

    steps x time per image x images per step + evaluations x images evaluated / images per second."""
    from aidgn.algorithms import find

    if not str(spec.backbone).startswith("resnet50.") or spec.image_size != 224:
        return None
    step = (STEP_MS.get(find(spec.algorithm).name(), STEP_MS["ERM"]) + INPUT_MS) / 1e3
    targets = [dataset.domains.index(domain) for domain in spec.target]
    sources = [domain for domain in range(len(dataset.domains)) if domain not in targets]
    batch = len(sources) * int(spec.hyper_parameters["batch_size"])
    evaluated = sum(counts[domain] for domain in targets) + 0.2 * sum(counts[domain] for domain in sources)
    evaluations = -(-int(spec.steps or 0) // int(spec.eval_every or 1))
    return int(spec.steps or 0) * step * batch / STEP_IMAGES + evaluations * evaluated / EVALUATION


def image_counts(dataset: Dataset) -> list[int]:
    return np.bincount(dataset.domain_of, minlength=len(dataset.domains)).tolist()


class Speeds:
    """Seconds per step, evaluations included, of the finished runs of a sweep."""

    def __init__(self, items: Iterable[PlannedRun], states: Iterable[RunStatus], here: bool = True):
        measured: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for item, state in zip(items, states, strict=True):
            for one in state.history.attempts:
                if one.step_seconds and (not here or one.host == socket.gethostname()):
                    measured[item.dataset, item.algorithm].append(one.step_seconds)
                    measured[item.dataset,].append(one.step_seconds)
        self.medians = {key: statistics.median(values) for key, values in measured.items()}

    def step(self, item: PlannedRun) -> float | None:
        """Of the same algorithm on the same data set, or of others on it."""
        return self.medians.get((item.dataset, item.algorithm), self.medians.get((item.dataset,)))

    def total(self, items: Iterable[PlannedRun]) -> float | None:
        """Seconds that one worker needs for these runs; None if nothing is known of some."""
        seconds = 0.0
        for item in items:
            step = self.step(item)
            if step is None:
                return None
            seconds += item.steps * step
        return seconds


def in_words(seconds: float) -> str:
    """'45 s', '12 min', '3 h 20 min', '310 hours'."""
    if seconds < 99.5:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 3600:.0f} hours"
