"""Compare the speed of predicting from files, with warnings and CSV rows, with bare decoding and the bare network.

    python benchmarks/predict.py --backbone resnet18 --images 600
    python benchmarks/predict.py --backbone none --images 8000      # the work around a GPU, without one
    python benchmarks/predict.py --backbone resnet50 --images 6000 --times 10 --repeats 1   # on a GPU

Aim: at least 0.90 of the speed of the slower of the two. On a CPU both need the same cores, so that the sum of the two
times is the least possible there; the share of that is printed too. With `none` the device has nothing to do, neither
to resize images nor to compute features: decoding, collecting batches, warnings and rows remain.

Bare decoding is by threads or by processes that store nothing, whichever is faster at first. The start of processes
counts, there as in predicting: for the speed of many images, measure with many.

To see what holds predicting up there are two more figures: the speed from pixels in memory, without any decoding, and
how long the thread that feeds the network works for a batch.
"""

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from prepare import clocks, decode_only, generate
from torch import Tensor, nn

from aidgn import backbones
from aidgn.algorithms import find
from aidgn.data.images import read_shrunk
from aidgn.data.row_cache import usable_cores
from aidgn.devices import choose_device, choose_precision
from aidgn.inference import find_images
from aidgn.inference import model as inference_model
from aidgn.inference.image_stream import Pixels, pin
from aidgn.inference.model import Model
from aidgn.inference.output import format_csv, make_rows
from aidgn.novelty import CALIBRATION_IMAGES, Novelty
from aidgn.objective import class_vectors
from aidgn.training.featurizer import EVAL_BATCH, Featurizer


class Nothing(nn.Module):
    """A network without work: returns stored features."""

    num_features = 2048

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Parameter(torch.randn(EVAL_BATCH, self.num_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.features[: len(x)]


def make_model(backbone: str, size: int, device: torch.device) -> Model:
    """Make a network of random weights, with as many random calibration features as a real model has."""
    if backbone == "none":
        torch.set_num_threads(1)
        net: nn.Module = Nothing()
        inference_model.clean = lambda images, *_, **__: images[:, :1, :1].permute(0, 3, 1, 2)
    else:
        net = backbones.create(backbone, weights="none")
        backbones.fold(net)
    featurizer = Featurizer(net.to(memory_format=torch.channels_last), choose_precision("auto", device), compiled=False)
    network = find("AIDGN")(featurizer, 7, 3)
    features = torch.randn(CALIBRATION_IMAGES, network.num_features)
    predicted = torch.zeros(CALIBRATION_IMAGES, dtype=torch.long)
    novelty = Novelty.from_features(features, predicted, class_vectors(network.classifier))
    return Model(network, "AIDGN", list("abcdefg"), ["x", "y", "z"], size, device, novelty)


def in_memory(stack: ExitStack, model: Model, files: list[str]) -> Pixels:
    """Decode the files into memory, in the layout that worker processes write."""
    memory = np.zeros((len(files), model.slot, model.slot, 3), np.uint8)
    pixels = [np.asarray(read_shrunk(file, model.slot)[0]) for file in files]
    places = [slot[: image.shape[0], : image.shape[1]] for slot, image in zip(memory, pixels, strict=True)]
    for place, image in zip(places, pixels, strict=True):
        place[:] = image
    if model.device.type == "cuda":
        pin(stack, memory)
    return Pixels(places, memory, range(len(files)))


def seconds(work: Callable[[], object], device: torch.device) -> np.ndarray:
    start = clocks()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clocks() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--times", type=int, default=1, help="predict them so many times in a row")
    parser.add_argument("--pixels", type=int, default=227, help="side of the image files")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--image-size", type=int, default=224, help="side of the network's input")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many, taken in turns, counts")
    options = parser.parse_args()
    device = choose_device(options.device)
    model = make_model(options.backbone, options.image_size, device)
    side = 1 if options.backbone == "none" else options.image_size
    batch = torch.randn(model.batch_size, 3, side, side, device=device)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        generate(Path(folder), options.images, options.pixels)
        files = find_images([folder]) * options.times
        images = len(files)
        pixels = in_memory(stack, model, files[: model.batch_size])

        decoded = partial(decode_only, model.slot)

        def threads() -> None:
            with ThreadPoolExecutor(usable_cores()) as pool:
                assert all(pool.map(decoded, paths))

        def processes() -> None:
            with ProcessPoolExecutor(usable_cores(), mp_context=get_context("fork")) as pool:
                assert all(pool.map(decoded, paths, chunksize=16))

        @torch.no_grad()
        def network() -> None:
            for start in range(0, images, model.batch_size):
                model.network.predict(batch[: images - start]).cpu()

        def from_memory() -> None:
            launched: deque[Callable[[], object]] = deque()
            for _ in range(0, images, model.batch_size):
                launched.append(model.launch(pixels))
                if len(launched) > model.in_flight:
                    launched.popleft()()

        def everything() -> None:
            nonlocal feeding
            began = time.thread_time()
            for names, prediction in model.batches(files):
                format_csv(make_rows(names, prediction, 1), False)
            feeding = min(feeding, time.thread_time() - began)

        paths = files[: options.images]
        decoding = {seconds(work, device)[0]: work for work in (threads, processes)}
        paths = files
        works = {
            "bare decoding": decoding[min(decoding)],
            "bare network": network,
            "pixels in memory": from_memory,
            "predict": everything,
        }
        feeding = np.inf
        for work in (network, from_memory):
            work()  # cuDNN's choices
        times = {name: np.full(2, np.inf) for name in works}
        began = time.perf_counter()
        for _ in range(options.repeats):
            for name, work in works.items():
                times[name] = np.minimum(times[name], seconds(work, device))
    print(
        f"{images} JPEGs of {options.pixels} pixels, {options.backbone} at {options.image_size} on "
        f"{device.type}, {usable_cores()} cores, fastest of {options.repeats} in {time.perf_counter() - began:.0f} s"
    )
    for name, (wall, cores) in times.items():
        print(f"  {name:<21} {images / wall:>8.1f} images/s, {cores / images * 1e3:.2f} ms of a core")
    taken, worked = (each / images * model.batch_size * 1e3 for each in (wall, feeding))
    print(
        f"  a batch of {model.batch_size} takes {taken:.1f} ms, {worked:.1f} of them work of the thread that "
        "feeds the network"
    )
    wall, cores = (dict(zip(times, each, strict=True)) for each in zip(*times.values(), strict=True))
    slower = {
        name: max(each["bare decoding"], each["bare network"]) / each["predict"]
        for name, each in (("clock", wall), ("work", cores))
    }
    print(f"  predict has {slower['clock']:.2f} of the speed of the slower of the two by the clock")
    if device.type == "cpu":  # says where time goes on a busy machine; the aim is by the clock
        both = cores["bare decoding"] + cores["bare network"]
        print(f"  and {slower['work']:.2f} by the work of the cores, {cores['predict'] / both:.2f} times that of both")
    return 0 if slower["clock"] >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
