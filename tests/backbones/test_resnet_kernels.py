"""The Triton kernels of a ResNet against PyTorch's operations; without a GPU, Triton's interpreter runs them."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


@pytest.fixture
def kernels(triton_device: str) -> ModuleType:
    from aidgn.backbones import resnet_kernels

    return resnet_kernels


def draw(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Multiples of 1/16, which bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-32, 33, shape, generator=generator) / 16
    values = values.to(device)
    return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


@pytest.mark.parametrize("channels", [64, 40, 256])
@pytest.mark.parametrize("with_second", [False, True])
def test_relu_gradient(kernels: ModuleType, triton_device: str, channels: int, with_second: bool) -> None:
    shape = (3, channels, 5, 7)
    output = draw(*shape, seed=1, device=triton_device).relu().bfloat16()
    gradient, second = (draw(*shape, seed=seed, device=triton_device) for seed in (2, 3))
    masked, sums = kernels.relu_gradient(
        output, gradient.bfloat16().contiguous(), second.bfloat16() if with_second else None
    )
    expected = torch.where(output > 0, gradient + (second if with_second else 0), 0.0)
    assert torch.equal(masked, expected.bfloat16()) and masked.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(sums, expected.sum((0, 2, 3)))


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (5, 16, 1, 1), (2, 150, 3, 3)])
def test_fold_and_its_gradients(kernels: ModuleType, triton_device: str, shape: tuple[int, ...]) -> None:
    channels = shape[0]
    parameters = [
        draw(*size, seed=seed, device=triton_device).requires_grad_()
        for seed, size in enumerate([shape, (channels,), (channels,)])
    ]
    mean, variance = draw(channels, seed=3, device=triton_device), draw(channels, seed=4, device=triton_device).abs()
    to_weight = draw(*shape, seed=5, device=triton_device)
    to_shift = draw(channels, seed=6, device=triton_device)
    folded, moved = kernels.Fold.apply(*parameters, mean, variance, 0.5)
    found = torch.autograd.grad([folded, moved], parameters, [to_weight.bfloat16(), to_shift])
    weight, scale, shift = parameters
    factor = scale / (variance + 0.5).sqrt()
    expected_weight, expected_shift = weight * factor[:, None, None, None], shift - mean * factor
    expected = torch.autograd.grad([expected_weight, expected_shift], parameters, [to_weight, to_shift])
    torch.testing.assert_close(folded.float(), expected_weight, rtol=0.008, atol=1e-6)
    torch.testing.assert_close(moved, expected_shift)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("height", "width"), [(8, 12), (7, 9)])
def test_pooling_shift_and_relu(kernels: ModuleType, triton_device: str, height: int, width: int) -> None:
    drawn = draw(2, 64, height, width, device=triton_device)  # with equal neighbours, of which the first wins
    shift = draw(64, seed=1, device=triton_device).requires_grad_()
    x, y = drawn.bfloat16().requires_grad_(), drawn.clone().requires_grad_()
    found = kernels.PoolShiftReLU.apply(x, shift)
    expected = F.relu(F.max_pool2d(y, 3, 2, 1) + shift[:, None, None])
    assert torch.equal(found.float(), expected)
    direction = draw(*expected.shape, seed=2, device=triton_device)
    of_x, of_shift = torch.autograd.grad(found, [x, shift], direction.bfloat16())
    of_y, of_plain_shift = torch.autograd.grad(expected, [y, shift], direction)
    torch.testing.assert_close(of_x.float(), of_y)
    torch.testing.assert_close(of_shift, of_plain_shift)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("with_shortcut", [False, True])
def test_convolution_with_relu_and_two_readers(
    kernels: ModuleType, triton_device: str, stride: int, with_shortcut: bool
) -> None:
    from aidgn.backbones.conv_relu import ConvReLU

    def leaf(*shape: int, seed: int) -> Tensor:
        return draw(*shape, seed=seed, device=triton_device).requires_grad_()

    x, weight, bias = leaf(2, 3, 6, 6, seed=0), leaf(4, 3, 3, 3, seed=1), leaf(4, seed=2)
    shortcut = leaf(2, 4, 6 // stride, 6 // stride, seed=3) if with_shortcut else None
    leaves = [x, weight, bias] + ([shortcut] if shortcut is not None else [])
    main, side = ConvReLU.apply(x, weight, bias, shortcut, [stride] * 2, [1, 1], [1, 1])
    expected = F.conv2d(x, weight, bias, stride, 1)
    expected = (expected if shortcut is None else expected + shortcut).relu()
    torch.testing.assert_close(main, expected)
    first, second = (draw(*expected.shape, seed=seed, device=triton_device) for seed in (4, 5))
    for read, directions in (([main, side], [first, second]), ([main], [first]), ([side], [second])):
        found = torch.autograd.grad(read, leaves, directions, retain_graph=True)
        wanted = torch.autograd.grad(expected, leaves, sum(directions), retain_graph=True)
        torch.testing.assert_close(found, wanted)
