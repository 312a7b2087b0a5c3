"""Compile the Triton kernels in other processes, while a run still imports modules and reads images.

Triton takes seconds for them and keeps the result on disk, where the run finds it.
"""

import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from aidgn.devices import has_triton

IMAGE_SIZE, SLOT = 224, 227  # Triton tells apart whether sizes are multiples of 16; these are those of PACS
BATCH = 16

_processes: list[subprocess.Popen[bytes]] = []


def compile_ahead(device: torch.device) -> None:
    """Start a process for each of `JOBS`, unless a run did so before on this machine.

    If these processes fail, the run compiles the kernels that it does not find.

    Args:
        device: Where the run computes.
    """
    if device.type == "cuda" and has_triton() and (os.cpu_count() or 1) > len(JOBS) and claim():
        for name in JOBS:
            command = [sys.executable, "-m", "aidgn.training.kernel_cache", name, str(device)]
            quiet = subprocess.DEVNULL
            _processes.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))


def claim() -> bool:
    """Create a file in Triton's cache for these kernels, and return whether it is new."""
    import triton

    from aidgn.backbones import resnet_kernels
    from aidgn.data import transform_kernels

    digest = hashlib.sha256(triton.__version__.encode())
    for module in (resnet_kernels, transform_kernels):
        digest.update(inspect.getsource(module).encode())
    folder = Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"aidgn-{digest.hexdigest()[:16]}").touch(exist_ok=False)
    except OSError:
        return False
    return True


def run_blocks(device: torch.device) -> None:
    """Run the kernels that residual blocks need."""
    from aidgn.backbones.resnet_kernels import relu_gradient

    x = torch.zeros(BATCH, 64, 4, 4, dtype=torch.bfloat16, device=device)
    relu_gradient(x, x)
    relu_gradient(x, x, x)


def run_stem_and_weights(device: torch.device) -> None:
    """Run the kernels that pool the output of the stem and fold weights."""
    from aidgn.backbones.resnet_kernels import Fold, PoolShiftReLU

    for size in ((3, 7, 7), (64, 1, 1)):
        weight = torch.zeros(64, *size, device=device, requires_grad=True)
        scale, shift, mean, variance = torch.zeros(4, 64, device=device).unbind()
        folded, moved = Fold.apply(weight, scale, shift, mean, variance, 1e-5)
        (folded.sum() + moved.sum()).backward()
    side = IMAGE_SIZE // 2
    x = torch.zeros(1, 64, side, side, dtype=torch.bfloat16, device=device, requires_grad=True)
    PoolShiftReLU.apply(x, torch.zeros(64, device=device)).sum().backward()


def run_transforms(device: torch.device) -> None:
    """Run the kernels that augment and resize images."""
    from aidgn.data import transform_kernels
    from aidgn.data.transforms import MEAN, STD, UNIFORMS

    images = torch.zeros(BATCH, SLOT, SLOT, 3, dtype=torch.uint8, device=device)
    geometry = torch.full((BATCH, 4), SLOT, dtype=torch.int32, device=device)
    uniforms = torch.full((BATCH, UNIFORMS), 0.5, device=device)
    transform_kernels.augment(images, geometry, uniforms, IMAGE_SIZE, MEAN, STD, "bilinear")
    boxes, upright = geometry.float(), torch.zeros(BATCH, dtype=torch.bool, device=device)
    transform_kernels.resize(images, boxes, upright, IMAGE_SIZE, "bilinear", MEAN, STD)


JOBS: dict[str, Callable[[torch.device], None]] = {
    "blocks": run_blocks,
    "stem-and-weights": run_stem_and_weights,
    "transforms": run_transforms,
}


def main(name: str, device: str) -> None:
    """Run a job on a device."""
    chosen = torch.device(device)
    if chosen.index is not None:
        torch.cuda.set_device(chosen)
    JOBS[name](chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
