"""A convolution and its ReLU in one kernel, against PyTorch's operations one after the other."""

import pytest
import torch
from torch.nn import functional as F

from aidgn.backbones.conv_relu import conv_relu, output_shape, pointwise_conv_relu


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [(1, 1, 0, 1), (1, 2, 0, 1), (3, 2, 1, 1), (3, 1, 2, 2), (2, 1, 0, 1)]
)
def test_shape_of_a_convolution(kernel: int, stride: int, padding: int, dilation: int) -> None:
    x, weight = torch.zeros(2, 3, 9, 10), torch.zeros(5, 3, kernel, kernel)
    pairs = [stride] * 2, [padding] * 2, [dilation] * 2
    assert output_shape(x, weight, *pairs) == F.conv2d(x, weight, None, *pairs).shape


def test_one_by_one_convolution_as_a_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((2, 5, 3, 4), (7, 5, 1, 1), (7,))
    )
    x = x.contiguous(memory_format=torch.channels_last)
    found = pointwise_conv_relu(x, weight, bias)
    torch.testing.assert_close(found, F.conv2d(x, weight, bias).relu())
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_kernel_ignores_uninitialised_memory() -> None:
    for channels, out, kernel, stride, shortcut in (
        (64, 64, 3, 1, False),
        (64, 64, 3, 2, False),
        (256, 64, 1, 1, False),
        (256, 128, 1, 2, False),
        (64, 256, 1, 1, True),
    ):
        x, weight, bias, added = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((8, channels, 28, 28), (out, channels, kernel, kernel), (out,), (8, out, 28, 28))
        )
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        del_me = [torch.full((1 << 22,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
        del del_me
        x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
        geometry = [stride] * 2, [kernel // 2] * 2, [1, 1]
        found = conv_relu(x, weight, bias, added if shortcut else None, *geometry)
        expected = F.conv2d(x.float(), weight.float(), bias.float(), stride=stride, padding=kernel // 2)
        expected = expected + (added if shortcut else 0)
        assert found.isfinite().all()
        assert (found - expected.relu()).norm() < 0.01 * expected.norm()
