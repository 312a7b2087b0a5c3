"""Compare the speed of the augmentation of a batch with torchvision's transforms of PIL images on one core.

    python benchmarks/augment.py --device cuda --batch 96 --size 224

Aim: on a GPU under 1 ms for 96 images; on one CPU core no slower than torchvision.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from aidgn.data.transforms import MEAN, STD, UNIFORMS, augment, clean


def milliseconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a step after three warm-up steps.

    On CUDA events measure the time, so that time of the host counts only if the device waits for the host.
    """
    times = []
    for repeat in range(3 + repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            step()
            elapsed = 1000 * (time.perf_counter() - start)
        if repeat >= 3:
            times.append(elapsed)
    return statistics.median(times)


def torchvision_step(images: Tensor, size: int) -> Callable[[], Tensor]:
    """Return a step with the usual transforms of a loader's worker, without decoding."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.7, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
            transforms.RandomGrayscale(0.1),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    pictures = [Image.fromarray(image.numpy()) for image in images.cpu()]
    return lambda: torch.stack([transform(picture) for picture in pictures])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--size", type=int, default=224, help="of the result")
    parser.add_argument("--slot", type=int, default=227, help="of the stored images")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    device, size, slot = torch.device(arguments.device), arguments.size, arguments.slot
    torch.set_num_threads(1)
    torch.manual_seed(0)

    coarse = torch.rand(arguments.batch, 3, slot // 8, slot // 8)
    images = torch.nn.functional.interpolate(coarse, (slot, slot), mode="bicubic").clamp(0, 1).mul(255).byte()
    images = images.permute(0, 2, 3, 1).contiguous().to(device)
    geometry = torch.full((arguments.batch, 4), slot, dtype=torch.int32, device=device)
    uniforms = torch.rand(arguments.batch, UNIFORMS, device=device)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "one core"
    print(f"{arguments.batch} images, {slot} to {size} pixels, {where}, torch {torch.__version__}")
    reference = milliseconds(torchvision_step(images, size), torch.device("cpu"), max(arguments.repeats // 5, 1))
    print(f"{'torchvision on PIL images, one core':<36}{reference:>10.2f} ms")
    steps: list[tuple[str, Callable[[], Tensor]]] = [
        ("augment", lambda: augment(images, geometry, uniforms, size)),
        ("clean", lambda: clean(images, geometry, size)),
    ]
    for name, step in steps:
        start = time.perf_counter()
        step()
        first = time.perf_counter() - start
        median = milliseconds(step, device, arguments.repeats)
        print(f"{name:<36}{median:>10.2f} ms {reference / median:>9.1f} x torchvision {first:>8.1f} s the first time")


if __name__ == "__main__":
    main()
