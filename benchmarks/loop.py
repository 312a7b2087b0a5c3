"""Measure the cost of the training loop without the network, on the CPU, as ratios within one process.

    python benchmarks/loop.py

1. A step of the loop (sampling, gathering, augmentation, update, bookkeeping) against the bare forward, backward and
   optimizer step on a batch that is ready.
2. A step on 1,000 images against one on 100,000: it must not grow with the data set.
"""

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch

from aidgn.algorithms import create
from aidgn.data import Dataset, DatasetInfo
from aidgn.data.cache import prepare
from aidgn.data.loader import DeviceImageStore
from aidgn.runs.spec import RunSpec
from aidgn.training.featurizer import create_featurizer
from aidgn.training.trainer import Trainer


def dataset(images: int, size: int) -> Dataset:
    """Return a data set of random pixels in four domains and five classes."""
    domain_of = np.sort(np.arange(images) % 4)
    labels = np.arange(images) % 5
    pixels = np.random.default_rng(0).integers(0, 256, (images, size, size, 3), dtype=np.uint8)
    info = DatasetInfo(
        "random", tuple("abcd"), tuple("ABCD"), 5, image_size=224 if size > 64 else size, augment=size > 64
    )
    return Dataset(info, list("vwxyz"), [str(i) for i in range(images)], labels, domain_of, pixels=pixels)


def create_trainer(data: Dataset, backbone: str, batch_size: int) -> Trainer:
    device = torch.device("cpu")
    spec = RunSpec(
        "random",
        "AIDGN",
        "a",
        steps=10**9,
        eval_every=10**9,
        backbone=backbone,
        weights="none",
        hyper_parameters={"batch_size": batch_size},
    ).resolved(data)
    featurizer = create_featurizer(backbone, "none", 3, "float32", device)
    algorithm = create("AIDGN", featurizer, 5, 3, **spec.hyper_parameters)
    return Trainer(spec, algorithm, DeviceImageStore(prepare(data), device))


def steps_of(trainer: Trainer) -> Iterator[None]:
    """Train one step for each item."""
    for minibatches in trainer.batches():
        trainer.train_step(minibatches)
        yield


def seconds(action, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - began) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="resnet50.tv_in1k")
    parser.add_argument("--batch-size", type=int, default=4, help="images per domain, of 227 x 227 pixels")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()

    trainer = create_trainer(dataset(200, 227), arguments.backbone, arguments.batch_size)
    steps = steps_of(trainer)
    x = torch.randn(3 * arguments.batch_size, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    y = torch.arange(len(x)) % 5
    batch = list(zip(x.split(arguments.batch_size), y.split(arguments.batch_size), strict=True))
    next(steps)
    trainer.algorithm.update(batch)
    pairs = [
        (seconds(lambda: next(steps), 1), seconds(lambda: trainer.algorithm.update(batch), 1))
        for _ in range(arguments.rounds)
    ]
    ours, bare = np.median(pairs, axis=0)
    print(
        f"{arguments.backbone}, 3 x {arguments.batch_size} images: a step of the loop takes {ours / bare:.3f} times "
        f"the bare step (median of {arguments.rounds} rounds, alternating)"
    )

    small, large = (steps_of(create_trainer(dataset(images, 28), "small", 32)) for images in (1_000, 100_000))
    pairs = [(seconds(lambda: next(small), 20), seconds(lambda: next(large), 20)) for _ in range(arguments.rounds)]
    few, many = np.median(pairs[1:], axis=0)
    print(f"small network, 3 x 32 images: a step on 100,000 images takes {many / few:.3f} times one on 1,000")


if __name__ == "__main__":
    main()
