"""Measure the training step of a ResNet-50 and a pass of evaluation on a GPU, and the time of each kernel.

    python benchmarks/step.py --weights resnet50.safetensors
    python benchmarks/step.py --weights resnet50.safetensors --algorithm ERM --kernels 40

Images lie on the GPU. The step has forward, backward and optimizer; the pass has 512 images and no gradients.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS
from aidgn.devices import begin_pass, choose_device, choose_precision
from aidgn.training.featurizer import EVAL_BATCH, create_featurizer

DOMAINS, CLASSES = 3, 7
WARM_UP, BLOCK = 20, 50  # steps


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the seconds that a call takes, after all work before it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def show(name: str, work: Callable[[], object], repeats: int, kernels: int) -> None:
    """Print the median time of a call and the kernels that take most of it."""
    seconds(work, WARM_UP)
    times = [seconds(work, BLOCK) for _ in range(repeats)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        seconds(work, 10)
    rows = [(event.self_device_time_total / 1e4, event.count / 10, event.key) for event in profiled.key_averages()]
    print(f"{name}: {1e3 * statistics.median(times):.2f} ms, of it {sum(row[0] for row in rows):.2f} ms in kernels")
    for milliseconds, count, kernel in sorted(rows, reverse=True)[:kernels]:
        print(f"  {milliseconds:.3f} ms x{count:.0f}  {kernel[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="any file of a ResNet-50, so that batch norm is frozen")
    parser.add_argument("--algorithm", default="AIDGN", choices=list(ALGORITHMS))
    parser.add_argument("--backbone", default=backbones.DEFAULT)
    parser.add_argument("--batch-size", type=int, default=32, help="images of each of three domains")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=15, help="lines of the profile")
    options = parser.parse_args()
    device = choose_device("cuda")
    precision = choose_precision("auto", device)
    kind = ALGORITHMS[options.algorithm]
    network = create_featurizer(options.backbone, options.weights, 3 + kind.extra_channels, precision, device)
    algorithm = kind(network, CLASSES, DOMAINS, batch_size=options.batch_size).to(device).train()

    def draw(count: int) -> torch.Tensor:
        images = torch.randn(count, 3, options.image_size, options.image_size, device=device)
        return images.contiguous(memory_format=torch.channels_last)

    batch = [
        (draw(options.batch_size), torch.randint(CLASSES, (options.batch_size,), device=device)) for _ in range(DOMAINS)
    ]

    def step() -> None:
        begin_pass()
        algorithm.update(batch)

    show(f"{options.algorithm}, step of {DOMAINS * options.batch_size} images", step, options.repeats, options.kernels)
    algorithm.eval()
    images = draw(EVAL_BATCH)
    with torch.no_grad():
        evaluation = f"evaluation of {EVAL_BATCH} images"
        show(evaluation, lambda: algorithm.predict(images), options.repeats, options.kernels)


if __name__ == "__main__":
    main()
