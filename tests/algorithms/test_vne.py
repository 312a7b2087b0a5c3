"""The von Neumann entropy against NumPy's eigenvalues, and updates of VNE and AIDGN-VNE against numeric references."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aidgn.algorithms.vne import von_neumann_entropy
from aidgn.objective import aidgn_loss


def naive_entropy(z: torch.Tensor) -> float:
    unit = [np.array(row) / math.sqrt(sum(value**2 for value in row)) for row in z.tolist()]
    values = np.linalg.eigvals(sum(np.outer(row, row) for row in unit) / len(unit)).real
    return -sum(value * math.log(value) for value in values if value > 1e-11)


def entropy_by_singular_values(z):
    """With gradients, from the singular values, as the authors write it."""
    unit = torch.stack([row / row.pow(2).sum().sqrt() for row in z])
    values = torch.linalg.svd(unit / math.sqrt(len(z)))[1] ** 2
    return -(values * values.log()).sum()


@pytest.mark.parametrize("shape", [(12, 5), (4, 9)])
def test_entropy(shape: tuple[int, int]) -> None:
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    entropy = von_neumann_entropy(z)
    assert entropy.item() == pytest.approx(naive_entropy(z), rel=1e-9)
    assert torch.autograd.gradcheck(von_neumann_entropy, z)
    assert von_neumann_entropy(3 * z.detach()) == pytest.approx(entropy.item())


def test_bounds_of_the_entropy() -> None:
    """No direction but one: 0. Orthogonal directions: the logarithm of their number, also in half precision."""
    assert float(von_neumann_entropy(torch.randn(6, 1) @ torch.ones(1, 4))) == pytest.approx(0, abs=1e-5)
    assert float(von_neumann_entropy(7 * torch.eye(5, 8).bfloat16())) == pytest.approx(math.log(5), rel=1e-6)


def test_gradients_of_equal_and_zero_features_are_finite() -> None:
    z = torch.randn(6, 8)
    z[3], z[4] = z[0], 0
    z.requires_grad_()
    von_neumann_entropy(z).backward()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("coefficient", [0.5, -0.5])
@pytest.mark.parametrize("name", ["VNE", "AIDGN-VNE"])
def test_updates(toy: SimpleNamespace, name: str, coefficient: float) -> None:
    given = {"kappa": 8.0, "gamma": 0.05, "mu_star": 3.0, "eta": 0.2} if name == "AIDGN-VNE" else {}
    algorithm = toy.make(name, vne_coef=coefficient, **given)
    with torch.no_grad():
        algorithm.featurizer[-1] = torch.nn.Identity()  # a ReLU could leave directions without features
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)
    domains = torch.tensor([0] * 5 + [1] * 3 + [2] * 4)

    def naive(minibatches):
        x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
        z = f(x)
        risk = aidgn_loss(z, y, domains, g.weight, **given).total if given else toy.cross_entropy(g(z), y)
        loss = risk - coefficient * entropy_by_singular_values(z)
        adam.step(loss)
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])
