"""Compiled code of a featuriser, on the CPU: the compiler of PyTorch's graphs alone needs a GPU to be worth it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aidgn import backbones
from aidgn.training.featurizer import EVAL_BATCH, Featurizer


@pytest.fixture
def compiled_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The batch sizes that compiled code has run with; the code is what PyTorch traced, as it is."""
    torch._dynamo.reset()
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            sizes.append(max(len(each) for each in inputs if each.ndim == 4 and each.shape[1] == 3))
            return graph(*inputs)

        return run

    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, *, mode=None, **options: real(function, backend=backend, **options)
    )
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):  # PyTorch's, put back
        yield sizes
    torch._dynamo.reset()


def test_batches_of_every_size_run_compiled_code(compiled_shapes: list[int]) -> None:
    """A worker of a sweep meets a batch size per draw of the hyper-parameters: none may be computed otherwise than in a
    process of its own."""
    featurizer = Featurizer(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), "float32", compiled=True)
    for size in range(8, 46):
        x = torch.randn(size, 3, 8, 8)
        assert torch.equal(featurizer(x), featurizer.runner.compute(x.contiguous(memory_format=torch.channels_last)))
    assert [size for size in compiled_shapes if size > 4] == list(range(8, 46))


def test_evaluation_runs_code_for_one_size(compiled_shapes: list[int]) -> None:
    featurizer = Featurizer(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), "float32", compiled=True).eval()
    with torch.no_grad():
        for size in (1, EVAL_BATCH, EVAL_BATCH + 7):
            x = torch.randn(size, 3, 8, 8)
            torch.testing.assert_close(featurizer(x), featurizer.runner.compute(x))
    assert [size for size in compiled_shapes if size > 4] == [EVAL_BATCH] * 4


def test_stages_of_compiled_code_are_those_of_eager(compiled_shapes: list[int]) -> None:
    """Compiled code serves a second run: its frozen copy then has that run's initial weights."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten())
    featurizer = Featurizer(network, "float32", compiled=True)
    x = torch.randn(6, 3, 8, 8)
    for _ in range(2):
        runner = featurizer.compare_stages()
        assert not featurizer.run(runner, x)[:, 80:].any()
        with torch.no_grad():
            network[0].weight.add_(0.1 * torch.randn_like(network[0].weight))
        rows = featurizer.run(runner, x)
        torch.testing.assert_close(rows, runner.compute(x))
        torch.testing.assert_close(rows[:, :80], featurizer(x))
        assert rows[:, 80:].mean(0).min() > 0
        rows[:, 80:].sum().backward()
        assert network[2].weight.grad.any()
        assert not any(weight.requires_grad for weight in runner.network.oracle.parameters())
    assert set(compiled_shapes) == {6}


def test_other_tensors_receive_the_gradients_of_parameters() -> None:
    """A recording uses them, because two passes of an update may share the parameters' nodes of autograd."""
    network = backbones.create("resnet18", weights="none", freeze_bn=True)
    assert backbones.fold(network) == 20
    runner = Featurizer(network, "float32").runner
    x = torch.randn(2, 3, 32, 32)
    runner.compute(x).square().sum().backward()
    others = {name: each.detach().requires_grad_() for name, each in network.named_parameters()}
    features = runner.compute(x, others)
    found = torch.autograd.grad(features.square().sum(), list(others.values()))
    torch.testing.assert_close(list(found), [each.grad for each in network.parameters()])
