"""ARM against a domain-by-domain reference; groups of batch_size at test."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aidgn.errors import AidgnError
from aidgn.training.featurizer import Compiled, Featurizer


def test_updates(toy: SimpleNamespace) -> None:
    algorithm = toy.make("ARM", toy.image_network(4))
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    context = copy.deepcopy(algorithm.context_net)
    initial = [p.clone() for p in context.parameters()]
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)

    def naive(minibatches):
        contexts = context(torch.cat([x for x, _ in minibatches]))  # its batch norm sees all domains at once
        loss, position = torch.zeros((), dtype=torch.float64), 0
        for x, y in minibatches:
            mean = sum(contexts[position : position + len(y)]) / len(y)
            position += len(y)
            logits = torch.cat([g(f(torch.cat([image, mean]).unsqueeze(0))) for image in x])
            loss = loss + toy.cross_entropy(logits, y) * len(y) / sum(toy.SIZES)
        adam.step(loss)
        return loss

    toy.follow(
        algorithm,
        naive,
        [(algorithm.featurizer, f), (algorithm.classifier, g), (algorithm.context_net, context)],
        shape=(3, 6, 6),
    )
    assert all(torch.equal(p, q) for p, q in zip(algorithm.context_net.parameters(), initial, strict=True))


def test_the_context_network(toy: SimpleNamespace) -> None:
    algorithm = toy.make("ARM", toy.image_network(2))  # grey images
    layers = [layer for layer in algorithm.context_net if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size, c.padding) for c in layers] == [
        (1, 64, (5, 5), (2, 2)),
        (64, 64, (5, 5), (2, 2)),
        (64, 1, (5, 5), (2, 2)),
    ]
    assert algorithm.extra_channels == 1 and toy.make("ERM").extra_channels == 0


@pytest.mark.parametrize("images", [4, 7, 12])
def test_groups_of_batch_size_share_a_context(toy: SimpleNamespace, images: int) -> None:
    algorithm = toy.make("ARM", toy.image_network(4), batch_size=4).eval()
    x = torch.randn(images, 3, 6, 6, dtype=torch.float64)
    calls = []
    algorithm.featurizer.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        logits = algorithm.predict(x)
        assert len(calls) == 1
        for start in range(0, images, 4):
            group = x[start : start + 4]
            context = algorithm.context_net(group).mean(0, keepdim=True).repeat(len(group), 1, 1, 1)
            expected = algorithm.classifier(algorithm.featurizer(torch.cat([group, context], dim=1)))
            torch.testing.assert_close(logits[start : start + 4], expected)
    assert algorithm.group_size == 4


def test_batch_size_is_8_except_for_small_images(toy: SimpleNamespace) -> None:
    arm = type(toy.make("ARM", toy.image_network(4)))
    assert [arm.sample("PACS", 0, draw)["batch_size"] for draw in range(3)] == [8, 8, 8]
    assert arm.sample("DomainNet", 0, 1)["batch_size"] == 8
    assert arm.sample("RotatedMNIST", 0, 0)["batch_size"] == 64


def test_a_featurizer_for_images_alone_is_refused(toy: SimpleNamespace) -> None:
    with pytest.raises(AidgnError, match=r"images of 3 channels its first convolution must take 4, not 3"):
        toy.make("ARM", toy.image_network(3)).update(toy.batches(0, shape=(3, 6, 6)))
    with pytest.raises(AidgnError, match=r"images of 1 channels its first convolution must take 2, not 1"):
        toy.make("ARM", toy.image_network(1))
    with pytest.raises(AidgnError, match=r"images of 3 channels its first convolution must take 4, not 2"):
        toy.make("ARM", toy.image_network(2)).predict(torch.randn(2, 3, 6, 6, dtype=torch.float64))


def test_images_of_two_channels(toy: SimpleNamespace) -> None:
    """As DomainBed's ColoredMNIST has them: with the context the featuriser takes three."""
    algorithm = toy.make("ARM", toy.image_network(3))
    assert algorithm.update(toy.batches(0, shape=(2, 6, 6)))["loss"].isfinite()
    assert algorithm.predict(toy.batches(0, shape=(2, 6, 6))[0][0]).shape == (toy.SIZES[0], toy.CLASSES)


def test_the_context_has_the_arithmetic_of_the_featurizer(toy: SimpleNamespace) -> None:
    """In bfloat16 it differs from float32 by bfloat16's rounding, and by no more; copies run their own weights."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 6, 6)
    contexts = {}
    for precision in ("float32", "bfloat16"):
        algorithm = toy.make("ARM", Featurizer(toy.image_network(4), precision, compiled=False)).float()
        torch.manual_seed(1)
        for parameter in algorithm.context_net.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
        with torch.no_grad():
            contexts[precision] = algorithm.context(x)
        assert contexts[precision].dtype == torch.float32
        assert next(name for name in algorithm.state_dict() if "context" in name) == "context_net.0.weight"
        assert algorithm.context_runner.network is algorithm.context_net
        twin = copy.deepcopy(algorithm)
        assert twin.context_runner.network is twin.context_net
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in algorithm.parameters()}
    difference = (contexts["bfloat16"] - contexts["float32"]).norm() / contexts["float32"].norm()
    assert 1e-4 < difference < 2e-2


def test_compiled_code_is_kept_for_the_next_run(toy: SimpleNamespace) -> None:
    """The same module with the new weights; while training the batch is not padded, which its batch norm would see."""
    featurizer = Featurizer(toy.image_network(4), "float32", compiled=False)
    shapes = []
    # They stand for compiled code, which exists on CUDA only.
    featurizer.runner.compiled = Compiled(featurizer.runner.compute, featurizer.runner.compute)
    first = toy.make("ARM", featurizer).float()
    runner = first.context_runner
    runner.compiled = Compiled(*[lambda x: (shapes.append(len(x)), runner.compute(x))[1]] * 2)
    weights = first.context_net[0].weight.detach().clone()
    second = toy.make("ARM", featurizer).float().train()
    assert second.context_runner is runner and not torch.equal(second.context_net[0].weight, weights)
    x = torch.randn(5, 3, 6, 6)
    with torch.no_grad():
        second.features(x)
        second.eval().features(x)
    assert shapes == [5, 512]
