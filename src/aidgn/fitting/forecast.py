"""How long a fit would take on this machine, from a few measured passes through the network."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from aidgn.algorithms import find
from aidgn.data import Dataset
from aidgn.devices import choose_device, choose_precision
from aidgn.fitting.plan import FitPlan
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.timing import in_words
from aidgn.training.featurizer import create_featurizer

SAMPLE = 8  # images of a measured training step
FORWARD_SAMPLE = 32  # images of a measured pass without gradients, which takes less memory and is quicker
FORWARD_SHARE = 1 / 3  # of a training step, the rest is the backward pass


class ImageTimes(NamedTuple):
    """Seconds per image.

    Args:
        step: Of a training step of the whole network.
        forward: Of a pass without gradients.
    """

    step: float
    forward: float


def describe_frozen(plan: FitPlan, whole: FitPlan, dataset: Dataset, device: str, measured: bool) -> str:
    """Say that the network stays frozen, and how long that and the alternative take.

    Args:
        plan: The plan with a frozen network.
        whole: The plan that trains the whole network.
        dataset: The images.
        device: Where the runs will be trained.
        measured: Whether to measure the times, which takes a second or more.
    """
    final = plan.final
    passes = (final.views or 0) + 1
    forward = alternative = ""
    if measured:
        seconds = seconds_per_image(whole.final, dataset, device)
        forward = f", about {in_words(seconds.forward * passes * len(dataset))}"
        alternative = f" would take about {in_words(seconds.step * count_images(whole, dataset))} here:"
    times = "once" if passes == 1 else f"{passes} times"
    return (
        f"No GPU, so {final.backbone} stays frozen: each image passes through it {times}{forward}, and classifiers are "
        f"trained on its features. Training the whole network{alternative or ':'} --train all."
    )


def count_images(plan: FitPlan, dataset: Dataset) -> float:
    """Count the images in all training steps of a plan and, by their share of the time, in all evaluations."""
    counts = dataset.count_images().sum(1)
    total = 0.0
    for spec in [*plan.estimates, plan.final]:
        targets = [dataset.domains.index(name) for name in spec.target]
        steps, every = int(spec.steps or 0), int(spec.eval_every or 1)
        sources = len(dataset.domains) - len(targets)
        evaluated = counts.sum() / 5 + 4 / 5 * counts[targets].sum()  # validation images, and all of the unseen domain
        total += steps * sources * int(spec.hyper_parameters["batch_size"])
        total += FORWARD_SHARE * evaluated * -(-steps // every)
    return total


def seconds_per_image(spec: RunSpec, dataset: Dataset, device: str) -> ImageTimes:
    """Measure a training step of the whole network, and a pass without gradients, on random pixels."""
    place = choose_device(device)
    algorithm_class = find(spec.algorithm)
    channels = 3 + algorithm_class.extra_channels
    featurizer = create_featurizer(
        str(spec.backbone), spec.weights, channels, choose_precision("auto", place), place, spec.train_only
    )
    sources = len(dataset.domains) - len(spec.target)
    algorithm = algorithm_class(featurizer, len(dataset.classes), sources, **spec.hyper_parameters).to(place).train()
    size = max(SAMPLE // sources, algorithm.min_batch)
    side = spec.image_size or dataset.image_size
    x = torch.randn(size, 3, side, side, device=place)
    y = torch.arange(size, device=place) % len(dataset.classes)
    minibatches = [(x, y)] * sources
    algorithm.update(minibatches)  # the first is slower: it gets memory and chooses kernels
    step = measure(lambda: algorithm.update(minibatches)) / (size * sources)
    pixels = torch.randn(FORWARD_SAMPLE, 3 + algorithm_class.extra_channels, side, side, device=place)
    algorithm.eval()
    with torch.no_grad():
        algorithm.featurizer(pixels)
        forward = measure(lambda: algorithm.featurizer(pixels)) / len(pixels)
    return ImageTimes(step, forward)


def measure(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
