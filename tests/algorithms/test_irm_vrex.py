"""IRM and VREx against naive updates with autograd's derivative of the scaled risk; around annealing."""

import copy
from types import SimpleNamespace

import pytest
import torch

from aidgn.algorithms.irm import scale_gradients
from aidgn.errors import AidgnError


@pytest.mark.parametrize("anneal", [0, 2, 100])
@pytest.mark.parametrize("name", ["IRM", "VREx"])
def test_updates(toy: SimpleNamespace, name: str, anneal: int) -> None:
    prefix = name.lower()
    algorithm = toy.make(name, **{f"{prefix}_lambda": 30.0, f"{prefix}_penalty_anneal_iters": anneal})
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)

    def fresh_adam():
        return toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)

    adam, count = fresh_adam(), 0

    def naive(minibatches):
        nonlocal adam, count
        risks, penalties = [], []
        for x, y in minibatches:
            logits = g(f(x))
            risks.append(toy.cross_entropy(logits, y))
            s = torch.ones((), dtype=torch.float64, requires_grad=True)
            even, odd = (
                torch.autograd.grad(toy.cross_entropy(logits[k::2] * s, y[k::2]), s, create_graph=True)[0]
                for k in (0, 1)
            )
            penalties.append(even * odd)
        mean = sum(risks) / 3
        penalty = sum(penalties) / 3 if name == "IRM" else sum((r - mean) ** 2 for r in risks) / 3
        loss = mean + (30.0 if count >= anneal else 1.0) * penalty
        if count == anneal:
            adam = fresh_adam()
        adam.step(loss)
        count += 1
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)], steps=5)


def test_irm_penalty_is_unbiased() -> None:
    """Over all ordered pairs of distinct samples the mean of g_i g_j is the squared mean gradient less its noise:
    E over random orderings of mean(even) * mean(odd) = (sum_i sum_(j != i) g_i g_j) / (n (n - 1))."""
    torch.manual_seed(0)
    logits, y = torch.randn(4000, 3, dtype=torch.float64) * 2, torch.randint(3, (4000,))
    each = scale_gradients(logits, y)
    estimates = []
    for _ in range(4000):
        chosen = each[torch.randint(4000, (6,))]
        estimates.append(chosen[::2].mean() * chosen[1::2].mean())
    estimate = torch.stack(estimates)
    assert abs(estimate.mean() - each.mean() ** 2) < 4 * estimate.std() / len(estimate) ** 0.5
    biased = torch.stack([each[torch.randint(4000, (6,))].mean() ** 2 for _ in range(4000)])
    assert abs(biased.mean() - each.mean() ** 2) > 10 * biased.std() / len(biased) ** 0.5  # the test can tell


def test_irm_needs_two_samples_of_each_domain(toy: SimpleNamespace) -> None:
    with pytest.raises(AidgnError, match="at least 2 samples"):
        toy.make("IRM").update(toy.batches(0, sizes=(4, 1, 4)))


def test_vrex_needs_two_domains(toy: SimpleNamespace) -> None:
    with pytest.raises(AidgnError, match="at least 2 source domains"):
        toy.make("VREx", domains=1)


def test_vrex_penalty_is_zero_for_equal_risks(toy: SimpleNamespace) -> None:
    algorithm = toy.make("VREx")
    ((x, y),) = toy.batches(0, sizes=(5,))
    terms = algorithm.update([(x, y)] * 3)
    torch.testing.assert_close(terms["penalty"], torch.zeros((), dtype=torch.float64), atol=1e-25, rtol=0)
    assert algorithm.update(toy.batches(1))["penalty"] > 1e-4


def test_restart_keeps_the_scaled_rate(toy: SimpleNamespace) -> None:
    algorithm = toy.make("VREx", vrex_penalty_anneal_iters=1)
    algorithm.scale_lr(0.5)
    old = algorithm.optimizers["main"]
    for step in range(2):
        algorithm.update(toy.batches(step))
    new = algorithm.optimizers["main"]
    assert new is not old
    assert new.param_groups[0]["lr"] == pytest.approx(5e-3) and new.param_groups[0]["initial_lr"] == 1e-2
