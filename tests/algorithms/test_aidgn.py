"""What AIDGN records besides its loss: norms per domain and margins, by loops."""

import math

import pytest
import torch
from torch import nn

from aidgn.algorithms import create


@pytest.mark.parametrize("name", ["AIDGN", "AIDGN-noD", "AIDGN-release"])
def test_norms_per_domain_and_mean_margin(name: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    network.num_features = 4  # type: ignore[assignment]
    settings = {"gamma": 0.02, "mu_star": 30.0, **({} if name == "AIDGN-noD" else {"beta": 0.4})}
    algorithm = create(name, network, 3, 2, **settings)
    minibatches = [(60 * torch.randn(n, 6), torch.randint(3, (n,))) for n in (5, 3)]
    with torch.no_grad():
        norms = [[math.sqrt(sum(float(v) ** 2 for v in z)) for z in network(x)] for x, _ in minibatches]
    terms = algorithm.update(minibatches)
    means = [sum(each) / len(each) for each in norms]
    beta = 0.0 if name == "AIDGN-noD" else 0.4
    if name == "AIDGN-release":
        margins = [
            0.02 * (min(max(r, 10), 30) - 10 + beta * mean) + 0.4
            for each, mean in zip(norms, means, strict=True)
            for r in each
        ]
    else:
        margins = [0.02 * (r + beta * mean) for each, mean in zip(norms, means, strict=True) for r in each]
    assert [float(terms["norm_0"]), float(terms["norm_1"])] == pytest.approx(means, rel=1e-5)
    assert float(terms["margin"]) == pytest.approx(sum(margins) / 8, rel=1e-5)
    assert float(terms["norm"]) == pytest.approx(sum(map(sum, norms)) / 8, rel=1e-5)
