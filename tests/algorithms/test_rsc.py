"""RSC against a reference with autograd's gradients and numpy's percentiles."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aidgn.algorithms.rsc import percentile


@pytest.mark.parametrize(("f_drop", "b_drop"), [(1 / 3, 1 / 3), (0.45, 0.1), (0.0, 0.5), (0.5, 0.0)])
def test_updates(toy: SimpleNamespace, f_drop: float, b_drop: float) -> None:
    algorithm = toy.make("RSC", rsc_f_drop_factor=f_drop, rsc_b_drop_factor=b_drop)
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)

    def probability(z, label):
        return torch.softmax(g(z), 0)[label].item()

    def naive(minibatches):
        x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
        z = f(x)
        masks, drops = [], []
        for row, label in zip(z, y, strict=True):
            (gradient,) = torch.autograd.grad(g(row)[label], row, retain_graph=True)
            masks.append((gradient < np.percentile(gradient.numpy(), (1 - f_drop) * 100)).double())
            drops.append(probability(row, label) - probability(row * masks[-1], label))
        limit = np.percentile(drops, (1 - b_drop) * 100)
        muted = [row * mask if drop >= limit else row for row, mask, drop in zip(z, masks, drops, strict=True)]
        loss = toy.cross_entropy(g(torch.stack(muted)), y)
        adam.step(loss)
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])


@pytest.mark.parametrize("shape", [(7,), (5, 12), (3, 2048)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 2 / 3, 0.999, 1.0])
def test_percentile_is_numpys(shape: tuple[int, ...], share: float) -> None:
    values = np.random.default_rng(0).normal(size=shape)
    expected = np.percentile(values, share * 100, axis=-1)
    np.testing.assert_allclose(percentile(torch.from_numpy(values), share).numpy(), expected, rtol=1e-12)


def test_the_stated_share_is_muted(toy: SimpleNamespace) -> None:
    """A third of the features, for a third of the samples; and those with the largest gradient."""
    torch.manual_seed(0)
    algorithm = toy.make("RSC")
    algorithm.classifier = torch.nn.Linear(300, toy.CLASSES).double()
    z, y = torch.rand(90, 300, dtype=torch.float64), torch.randint(toy.CLASSES, (90,))
    kept = algorithm.mask(z, y)
    samples = ~kept.all(1)
    assert int(samples.sum()) == 30
    assert set((~kept[samples]).sum(1).tolist()) == {100}
    weights = algorithm.classifier.weight[y]
    for sample in samples.nonzero().flatten():
        assert weights[sample][~kept[sample]].min() > weights[sample][kept[sample]].max()
