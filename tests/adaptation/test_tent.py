"""Tent-C, Tent-BN and Tent against entropies, normalisations and Adam steps written out in float64."""

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aidgn import backbones
from aidgn.adaptation import Tent, TentBN, TentC
from aidgn.algorithms import create
from aidgn.errors import AidgnError
from aidgn.training.featurizer import Featurizer

SIZES = (8, 8, 8, 3)  # the last batch is smaller


def minimise(toy: SimpleNamespace, adam: Any, forward: Any, updates: int) -> Tensor:
    """The logits [B][C] of the last forward pass, before the step that follows it."""
    for _ in range(updates):
        rows = forward()
        adam.step(sum(toy.entropy(row) for row in rows) / len(rows))
    return torch.stack([torch.stack(list(row)) for row in rows]).detach()


def stream(toy: SimpleNamespace) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, toy.FEATURES, generator=generator, dtype=torch.float64) + 0.5 for n in SIZES]


@pytest.mark.parametrize(("rate", "updates"), [(0.1, 1), (1.0, 3), (10.0, 1)])
@pytest.mark.parametrize("name", ["ERM", "AIDGN"])
def test_tent_c_like_naive(toy: SimpleNamespace, name: str, rate: float, updates: int) -> None:
    algorithm = toy.trained(name)
    classifier = copy.deepcopy(algorithm.classifier)
    adam = toy.Adam(list(classifier.parameters()), lr=rate * 1e-2)
    ours = TentC(algorithm, rate=rate, updates=updates)
    for z in stream(toy):
        expected = minimise(toy, adam, lambda z=z: [toy.logits(classifier, row) for row in z], updates)
        torch.testing.assert_close(ours.predict_features(z), expected, rtol=1e-9, atol=1e-9)
    assert (classifier.weight - algorithm.classifier.weight).abs().max() > rate * 1e-2  # it moved


@pytest.mark.parametrize(("rate", "updates"), [(0.1, 1), (1.0, 3), (10.0, 1)])
@pytest.mark.parametrize("name", ["ERM", "AIDGN"])
def test_tent_bn_like_naive(toy: SimpleNamespace, name: str, rate: float, updates: int) -> None:
    algorithm = toy.trained(name)
    scale, shift = (torch.full((toy.FEATURES,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
    adam = toy.Adam([scale, shift], lr=rate * 1e-2)
    ours = TentBN(algorithm, rate=rate, updates=updates)
    for z in stream(toy):
        rows = z.tolist()
        means = [sum(row[j] for row in rows) / len(rows) for j in range(toy.FEATURES)]
        variances = [sum((row[j] - means[j]) ** 2 for row in rows) / len(rows) for j in range(toy.FEATURES)]

        def forward(rows: Any = rows, means: Any = means, variances: Any = variances) -> list[list[Tensor]]:
            return [
                toy.logits(
                    algorithm.classifier,
                    [
                        (row[j] - means[j]) / (variances[j] + 1e-5) ** 0.5 * scale[j] + shift[j]
                        for j in range(toy.FEATURES)
                    ],
                )
                for row in rows
            ]

        expected = minimise(toy, adam, forward, updates)
        torch.testing.assert_close(ours.predict_features(z), expected, rtol=1e-8, atol=1e-8)
    assert (scale - 1).abs().max() > rate * 1e-2


def test_tent_bn_forgets_scale_and_place_of_features(toy: SimpleNamespace) -> None:
    algorithm = toy.trained("ERM")
    z = stream(toy)[0]
    torch.testing.assert_close(
        TentBN(algorithm).predict_features(1000 * z + 7), TentBN(algorithm).predict_features(z), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["ERM", "AIDGN"])
def test_tent_like_naive(toy: SimpleNamespace, name: str, frozen: bool, updates: int) -> None:
    """On a folded network and on one that was trained with moving statistics."""
    algorithm = toy.trained(name, frozen=frozen)
    state = copy.deepcopy(algorithm.featurizer.state_dict())
    affine = [state[f"{layer}.{which}"].requires_grad_() for layer in (1, 4) for which in ("weight", "bias")]
    adam = toy.Adam(affine, lr=1e-2)
    ours = Tent(algorithm, updates=updates)

    def normalised(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        channels = []
        for c in range(x.shape[1]):
            values = x[:, c]
            mean = values.sum() / values.numel()
            variance = ((values - mean) ** 2).sum() / values.numel()
            channels.append((values - mean) / (variance + 1e-5).sqrt() * scale[c] + shift[c])
        return torch.stack(channels, dim=1)

    def forward(x: Tensor) -> list[list[Tensor]]:
        x = normalised(F.conv2d(x, state["0.weight"]), *affine[:2]).relu()
        x = normalised(F.conv2d(x, state["3.weight"], state["3.bias"]), *affine[2:]).relu()
        return [toy.logits(algorithm.classifier, z) for z in x.mean((2, 3))]

    for k, n in enumerate(SIZES):
        x = toy.images(n, seed=20 + k, shift=0.5)
        expected = minimise(toy, adam, lambda x=x: forward(x), updates)
        torch.testing.assert_close(ours.predict(x), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["ERM", "AIDGN", "ARM"])
def test_tent_adapts_only_scales_and_shifts_of_the_backbone(toy: SimpleNamespace, name: str) -> None:
    algorithm = toy.trained(name)
    adaptation = Tent(algorithm, rate=10.0)
    adapted: Any = adaptation.network.__self__  # type: ignore[attr-defined]
    for k in range(3):
        adaptation.predict(toy.images(8, seed=k))
    names = {f"featurizer.{layer}.{which}" for layer in (1, 4) for which in ("weight", "bias")}
    trained = dict(algorithm.named_parameters())
    moved = {key for key, value in adapted.named_parameters() if not torch.equal(value, trained[key])}
    assert moved == names == {key for key, value in adapted.named_parameters() if value.requires_grad}
    if name == "ARM":  # the network of the context is not the backbone
        assert adapted.context_net[1].running_mean is not None


@pytest.mark.parametrize("name", ["ERM", "AIDGN"])
@pytest.mark.parametrize("method", [TentC, TentBN, Tent])
def test_entropy_falls(toy: SimpleNamespace, name: str, method: type[Any]) -> None:
    x = toy.images(16, seed=5)
    adaptation = method(toy.trained(name, lr=2e-3), updates=3)
    means = []
    for _ in range(15):
        means.append(torch.stack([toy.entropy(row) for row in adaptation.predict(x)]).mean().item())
    assert all(later < earlier for earlier, later in pairwise(means))
    assert means[-1] < 0.985 * means[0]


def test_tent_does_not_run_compiled_code(toy: SimpleNamespace) -> None:
    algorithm = toy.trained("ERM").float()
    plain = Tent(algorithm, rate=10.0)
    featurizer = Featurizer(algorithm.featurizer, "float32", compiled=False)
    algorithm.featurizer = featurizer
    runner = featurizer.runner
    runner.compiled = lambda x: runner.compute(x)  # like a compiled function, it is not copied with its module
    adaptation = Tent(algorithm, rate=10.0)
    for k in range(3):
        x = toy.images(8, seed=k).float()
        torch.testing.assert_close(adaptation.predict(x), plain.predict(x), rtol=1e-3, atol=1e-3)
    assert (adaptation.predict(x) - Tent(algorithm).predict(x)).abs().max() > 0.05  # it has adapted


def test_tent_needs_batch_norm(toy: SimpleNamespace) -> None:
    algorithm = toy.trained("ERM", updates=0)
    algorithm.featurizer = backbones.create(backbones.SMALL)
    with pytest.raises(AidgnError, match="this backbone has none"):
        Tent(algorithm)
    algorithm.featurizer = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False))
    with pytest.raises(AidgnError, match="this backbone has none"):
        Tent(algorithm)


def test_tent_on_a_folded_network_of_timm(toy: SimpleNamespace) -> None:
    """timm's batch norm with an activation inside: a frozen, folded network and one never frozen adapt alike."""
    torch.manual_seed(0)
    net = timm.create_model("mobilenetv3_small_050", num_classes=0).double()
    net.num_features = net.head_hidden_size
    folded = copy.deepcopy(net)
    backbones.freeze(folded)
    assert backbones.fold(folded) > 0
    outputs = []
    for featurizer in (net, folded):
        torch.manual_seed(1)
        algorithm = create("AIDGN", featurizer, toy.CLASSES, 2).double()
        adaptation = Tent(algorithm, rate=10.0)
        x = torch.randn(4, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        outputs.append([adaptation.predict(x) for _ in range(2)])
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (outputs[0][0] - outputs[0][1]).abs().max() > 1e-6
