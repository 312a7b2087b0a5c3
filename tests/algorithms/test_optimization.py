"""Optimizers of a run: AdamW, rates by layer and batches in parts, against timm, PyTorch and the whole batch."""

import pytest
import timm
import torch
from torch import Tensor, nn

from aidgn.algorithms import create, find
from aidgn.algorithms.base import Algorithm
from aidgn.algorithms.optimization import Optimization, layer_factors
from aidgn.errors import AidgnError


class Network(nn.Sequential):
    num_features = 5


def make(name: str, optimization: Optimization, **hyper_parameters: object) -> Algorithm:
    torch.manual_seed(0)
    network = Network(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    algorithm = create(name, network, 3, 2, **hyper_parameters).double()
    algorithm.optimization = optimization
    return algorithm


def batches(sizes: tuple[int, ...] = (5, 5)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


# Learning rates by layer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_vit", "vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_rates_by_layer_are_those_of_timm(name: str) -> None:
    from timm.optim import param_groups_layer_decay

    with torch.device("meta"):
        network = timm.create_model(name, num_classes=0)
    ours = layer_factors(network, 0.75)
    exempt = network.no_weight_decay() if hasattr(network, "no_weight_decay") else ()
    groups = param_groups_layer_decay(network, 0.05, exempt, layer_decay=0.75)
    theirs = {
        id(parameter): (group["lr_scale"], group["weight_decay"]) for group in groups for parameter in group["params"]
    }
    assert ours == pytest.approx({key: scale for key, (scale, _) in theirs.items()})
    assert min(ours.values()) < 0.5 and max(ours.values()) == 1
    made = Optimization("adamw", 0.75).group(network, list(network.parameters()), 1e-3, 0.05)
    settings = {id(parameter): (group["lr"], group["weight_decay"]) for group in made for parameter in group["params"]}
    assert settings == {key: (pytest.approx(1e-3 * scale), decay) for key, (scale, decay) in theirs.items()}


def test_a_schedule_keeps_the_rates_apart() -> None:
    network = timm.create_model("test_vit", num_classes=0)
    algorithm = create("ERM", network, 3, 2, lr=1e-3)
    algorithm.optimization = Optimization(layer_decay=0.5)
    rates = {group["lr"] for group in algorithm.optimizers["main"].param_groups}
    algorithm.scale_lr(0.1)
    scaled = {group["lr"] for group in algorithm.optimizers["main"].param_groups}
    assert len(rates) > 3 and max(rates) == 1e-3
    assert sorted(scaled) == pytest.approx([0.1 * rate for rate in sorted(rates)])


# AdamW ----------------------------------------------------------------------------------------------------------------


def test_adamw_shrinks_weights_and_no_biases() -> None:
    algorithm = make("ERM", Optimization("adamw"), lr=0.01, weight_decay=0.5)
    expected = make("ERM", Optimization(), lr=0.01, weight_decay=0.5)
    parameters = list(expected.parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    for _ in range(3):
        algorithm.update(batches())
        reference.zero_grad()
        x, y = (torch.cat(tensors) for tensors in zip(*batches(), strict=True))
        nn.functional.cross_entropy(expected.predict(x), y).backward()
        reference.step()
    for ours, theirs in zip(algorithm.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_default_is_plain_adam() -> None:
    algorithm = make("AIDGN", Optimization())
    (group,) = algorithm.optimizers["main"].param_groups
    assert type(algorithm.optimizers["main"]) is torch.optim.Adam and len(group["params"]) == 5


def test_optimizers_of_others_are_refused() -> None:
    class Own(find("ERM")):  # type: ignore[misc]
        def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
            return {"main": torch.optim.SGD(self.parameters(), lr=0.1)}

    algorithm = Own(Network(nn.Linear(6, 5)), 3, 2)
    assert list(algorithm.optimizers) == ["main"]
    algorithm = Own(Network(nn.Linear(6, 5)), 3, 2)
    algorithm.optimization = Optimization("adamw")
    with pytest.raises(AidgnError, match=r"self\.adam"):
        algorithm.optimizers  # noqa: B018


# Batches in parts -----------------------------------------------------------------------------------------------------

MEANS = ("ERM", "SD", "AIDGN-noRD")


def trained(name: str, parts: int, sizes: tuple[int, ...]) -> tuple[Algorithm, dict[str, Tensor]]:
    algorithm = make(name, Optimization(parts=parts), lr=0.01)
    for _ in range(3):
        terms = algorithm.update(batches(sizes))
    return algorithm, terms


@pytest.mark.parametrize(("parts", "sizes"), [(2, (4, 4)), (3, (5, 5)), (5, (5, 5))])
@pytest.mark.parametrize("name", MEANS)
def test_gradients_of_parts_add_up(name: str, parts: int, sizes: tuple[int, ...]) -> None:
    """Adam's steps follow, in float64, and so do the reported terms but for norms of single domains."""
    whole, expected = trained(name, 1, sizes)
    ours, terms = trained(name, parts, sizes)
    for (key, parameter), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, msg=key)
    assert terms.keys() == expected.keys()
    torch.testing.assert_close(terms["loss"], expected["loss"])


@pytest.mark.parametrize("name", ["AIDGN", "CORAL", "VREx", "GroupDRO"])
def test_others_would_train_something_else(name: str) -> None:
    """Why they are refused: their loss is no mean over samples."""
    assert not vars(find(name)).get("mean_over_samples", False)
    whole, _ = trained(name, 1, (4, 4))
    ours, _ = trained(name, 2, (4, 4))
    assert not all(torch.allclose(p, q, rtol=1e-9) for p, q in zip(ours.parameters(), whole.parameters(), strict=True))


def test_fewer_numbers_are_kept_for_the_backward_pass() -> None:
    def most_kept(parts: int) -> int:
        algorithm = make("ERM", Optimization(parts=parts))
        kept = [0]
        objective = algorithm.objective

        def counted(minibatches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
            kept.append(0)
            return objective(minibatches)

        algorithm.objective = counted  # type: ignore[method-assign]

        def count(tensor: Tensor) -> Tensor:
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            algorithm.update(batches((64, 64)))
        return max(kept)

    assert most_kept(4) < 0.4 * most_kept(1)
