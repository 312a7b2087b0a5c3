"""The Triton kernels of the transforms against the same transforms in PyTorch, which other tests compare with
torchvision's; without a GPU, Triton's interpreter runs the kernels."""

import pytest
import torch
from torch import Tensor

from aidgn.data import transforms

SIZES = [(40, 40, 40, 40), (30, 40, 60, 80), (40, 33, 40, 33), (20, 40, 20, 40), (40, 40, 400, 400), (17, 19, 17, 19)]
SIZE = 24


@pytest.fixture
def batch(triton_device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (len(SIZES), 40, 40, 3), generator=generator, dtype=torch.uint8)
    uniforms = torch.rand(len(SIZES), transforms.UNIFORMS, generator=generator)
    uniforms[:2, -1] = 0.01  # these become grey
    return (
        images.to(triton_device),
        torch.tensor(SIZES, dtype=torch.int32, device=triton_device),
        uniforms.to(triton_device),
    )


def levels(found: Tensor, expected: Tensor) -> Tensor:
    """Return the differences in grey levels."""
    assert found.is_contiguous(memory_format=torch.channels_last) and found.dtype == torch.float32
    std = torch.tensor(transforms.STD, device=found.device)
    return (found - expected).abs() * std[:, None, None] * 255


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_augmented_images(
    batch: tuple[Tensor, Tensor, Tensor], interpolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aidgn.data import transform_kernels

    orders = transforms.jitter_steps(batch[2].split(transforms.SHARES, dim=1)[2])[transforms.CONTRAST]
    assert len(set(orders.tolist())) == 2  # both steps of contrast occur
    found = transform_kernels.augment(*batch, SIZE, transforms.MEAN, transforms.STD, interpolation)
    monkeypatch.setattr(transforms, "has_triton", lambda: False)
    off = levels(found, transforms.augment(*batch, SIZE, interpolation=interpolation))
    assert off.mean() < 0.05 and off.max() < 0.6  # products in float16


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_clean_images(
    batch: tuple[Tensor, Tensor, Tensor], interpolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aidgn.data import transform_kernels

    images, geometry, _ = batch
    stored = geometry[:, :2].float()
    boxes = torch.cat([torch.zeros_like(stored), stored], dim=1)
    upright = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    found = transform_kernels.resize(images, boxes, upright, SIZE, interpolation, transforms.MEAN, transforms.STD)
    monkeypatch.setattr(transforms, "has_triton", lambda: False)
    off = levels(found, transforms.clean(images, geometry, SIZE, interpolation=interpolation))
    assert off.mean() < 0.05 and off.max() < 0.3
