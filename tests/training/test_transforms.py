"""Images are prepared by compiled code on a GPU; here it is any code that says it is that."""

import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aidgn.data import transforms
from aidgn.training.compile import VerifiedCompile, build_transforms, compiled_transforms

SIZE = 16


def batch(images: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(images)
    return (
        torch.randint(0, 256, (images, 20, 20, 3), generator=generator, dtype=torch.uint8),
        torch.full((images, 4), 20),
        torch.rand(images, transforms.UNIFORMS, generator=generator),
    )


def checked(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor, int], Tensor]
) -> tuple[VerifiedCompile, list[int]]:
    """A transform whose compiler makes `fault` of what should come out, by the number of the call; the batch sizes that
    the code as written ran with."""
    written: list[int] = []

    def plain(pixels: Tensor, geometry: Tensor, uniforms: Tensor, size: int) -> Tensor:
        written.append(len(pixels))
        return transforms.augment(pixels, geometry, uniforms, size)

    calls = iter(range(100))
    monkeypatch.setattr(
        "aidgn.training.compile.compiled_by_shape",
        lambda _function: lambda *tensors, **settings: fault(transforms.augment(*tensors, **settings), next(calls)),
    )
    return VerifiedCompile(plain), written


def test_the_first_calls_of_every_shape_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    transform, written = checked(monkeypatch, lambda x, _: x + 0.01)
    for images in (12, 12, 5, 12, 12, 12, 5, 5, 5):
        torch.testing.assert_close(
            transform(*batch(images), size=SIZE), transforms.augment(*batch(images), SIZE) + 0.01
        )
    assert written == [12, 12, 5, 12, 5, 5]


def test_large_batches_are_compared_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    transform, written = checked(monkeypatch, lambda x, _: x)
    for size in (SIZE, SIZE, SIZE, SIZE, 12, 12):
        transform(*batch(40), size=size)
    assert written == [8] * 5


def test_one_image_may_differ_as_a_crop_may_be_rounded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    transform, _ = checked(monkeypatch, lambda x, _: torch.cat([x[:3], x[3:4].roll(1, 2), x[4:]]))
    for _ in range(4):
        assert not torch.equal(transform(*batch(), size=SIZE), transforms.augment(*batch(), SIZE))
    assert transform.compiled is not None


def late(x: Tensor, call: int) -> Tensor:
    return x.flip(0) if call == 2 else x


@pytest.mark.parametrize(
    "fault",
    [
        lambda x, _: x * torch.nan,
        lambda x, _: torch.cat([x[:3], x[2:3] * torch.nan, x[4:]]),
        lambda x, _: x.roll(1, 2),
        lambda x, _: torch.cat([x[:9], x[9:].flip(2)]),
        lambda x, _: torch.cat([x[:, :, :8], x[:, :, :8]], 2),
        late,
    ],
)
def test_wrong_code_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Callable[[Tensor, int], Tensor]
) -> None:
    transform, _ = checked(monkeypatch, fault)
    with caplog.at_level(logging.WARNING, "aidgn"):
        for _ in range(5):
            assert torch.equal(transform(*batch(), size=SIZE), transforms.augment(*batch(), SIZE))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert re.match(r"Compiled code prepared \d+ of 12 images wrongly", warning)


def test_on_a_gpu_both_transforms_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aidgn.training.compile.compiled_by_shape", lambda function: function)
    compiled_transforms.cache_clear()
    try:
        train, clean = build_transforms(SIZE, augmented=True, exact_fit=False, compiled=True)
        for transform, function in ((train, transforms.augment), (clean, transforms.clean)):
            inner = transform.func  # type: ignore[attr-defined]
            assert isinstance(inner, VerifiedCompile) and inner.eager is function
        pixels, geometry, uniforms = batch()
        torch.testing.assert_close(
            train(pixels, geometry, uniforms), transforms.augment(pixels, geometry, uniforms, SIZE)
        )
        torch.testing.assert_close(clean(pixels, geometry), transforms.clean(pixels, geometry, SIZE))
    finally:
        compiled_transforms.cache_clear()
