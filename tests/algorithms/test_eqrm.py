"""EQRM against scipy's root of the density's distribution function, and a bisection differentiated by autograd."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from aidgn.algorithms.eqrm import quantile


def naive_quantile(risks, alpha):
    """Halve the interval between the quantiles of the lowest and the highest kernel; autograd follows the halving."""
    mean = sum(risks) / len(risks)
    h = 1.06 * (sum((r - mean) ** 2 for r in risks) / (len(risks) - 1)).sqrt() * len(risks) ** -0.2
    ends = [risk + h * norm.ppf(alpha) for risk in (min(risks), max(risks))]
    centres, width = [r.item() for r in risks], h.item()
    for _ in range(32):
        middle = (ends[0] + ends[1]) / 2
        cdf = norm.cdf(middle.item(), centres, width).mean()
        ends[int(cdf > alpha)] = middle
    return (ends[0] + ends[1]) / 2


@pytest.mark.parametrize("burnin", [0, 1, 1.5, 100])
def test_updates(toy: SimpleNamespace, burnin: float) -> None:
    algorithm = toy.make("EQRM", eqrm_quantile=0.8, eqrm_burnin_iters=burnin, eqrm_lr=3e-3)
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    parameters = [*f.parameters(), *g.parameters()]
    adam, count, restarted = toy.Adam(parameters, 1e-2, 1e-3), 0, False

    def naive(minibatches):
        nonlocal adam, count, restarted
        risks = [toy.cross_entropy(g(f(x)), y) for x, y in minibatches]
        loss = sum(risks) / 3 if count < burnin else naive_quantile(risks, 0.8)
        if count >= burnin and not restarted:
            adam, restarted = toy.Adam(parameters, 3e-3, 1e-3), True
        adam.step(loss)
        count += 1
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)], steps=4)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.75, 0.99])
def test_quantile_of_the_density(alpha: float) -> None:
    risks = np.array([0.3, 1.1, 0.7, 2.0, 0.31])
    h = 1.06 * risks.std(ddof=1) * 5**-0.2
    expected = brentq(lambda t: norm.cdf(t, risks, h).mean() - alpha, -10, 10, xtol=1e-13)
    assert float(quantile(torch.from_numpy(risks), alpha)) == pytest.approx(expected, abs=1e-8)


def test_equal_risks_give_their_value_and_a_finite_gradient() -> None:
    risks = torch.full((3,), 0.7, requires_grad=True)
    value = quantile(risks, 0.75)
    value.backward()
    assert value.item() == pytest.approx(0.7) and torch.isfinite(risks.grad).all()


def test_higher_quantiles_look_at_the_worst_domain() -> None:
    shares = []
    for alpha in (0.5, 0.75, 0.95):
        risks = torch.tensor([0.2, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
        quantile(risks, alpha).backward()
        shares.append(float(risks.grad[2] / risks.grad.sum()))
    assert shares == sorted(shares) and shares[-1] > 0.9
