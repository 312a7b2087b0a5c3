"""What AIDGN records with its loss, by loops, and the switches of its hyper-parameters."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from aidgn.algorithms import create
from aidgn.algorithms.batches import domain_ids, join
from aidgn.algorithms.search_space import HyperParameterError
from aidgn.data import load_dataset
from aidgn.data.registry import get_info
from aidgn.objective import aidgn_loss
from aidgn.runs.spec import RunSpec


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


@pytest.mark.parametrize("variant", ["release", "release-paired"])
def test_variant_is_a_hyper_parameter_of_the_released_objective(variant: str) -> None:
    torch.manual_seed(0)
    network = nn.Linear(6, 4)
    network.num_features = 4  # type: ignore[assignment]
    algorithm = create("AIDGN-release", network, 3, 2, variant=variant)
    minibatches = [(300 * torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(2)]
    x, y = join(minibatches)
    loss = aidgn_loss(network(x), y, domain_ids(minibatches), algorithm.classifier.weight, variant=variant)
    terms = algorithm.update(minibatches)
    assert [float(terms[name]) for name in ("loss", "regularizer")] == [loss.total.item(), loss.regularizer.item()]
    assert create("AIDGN-release", network, 3, 2).hparams.variant == "release"


@pytest.mark.parametrize("name", ["AIDGN", "AIDGN-noR", "AIDGN-release", "AIDGN-SAGM", "AIDGN-VNE"])
@pytest.mark.parametrize(
    ("dataset", "milestones"), [("PACS", (2000, 4000)), ("OfficeHome", (2000, 4000)), ("VLCS", ())]
)
def test_halving_where_the_paper_says_so(name: str, dataset: str, milestones: tuple[int, ...]) -> None:
    info = get_info(dataset)
    images = replace(load_dataset("digits"), info=info)
    assert RunSpec(dataset, name, info.letters[0]).resolved(images).lr_milestones == milestones


def test_mu_star_auto_keeps_the_ratio_of_the_paper() -> None:
    """The loss is that of features scaled to the initial norm of the paper's network, then and later."""
    torch.manual_seed(0)
    network = nn.Linear(6, 4)
    network.num_features = 4  # type: ignore[assignment]
    algorithm = create("AIDGN", network, 3, 2, mu_star="auto", lr=0.1)
    first, second = ([(3 * torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(2)] for _ in range(2))
    z = network(torch.cat([x for x, _ in first]))
    factor = 38.0 / float(z.norm(dim=1).mean())
    for minibatches in (first, second):
        x, y = join(minibatches)
        expected = aidgn_loss(factor * network(x), y, domain_ids(minibatches), algorithm.classifier.weight)  # type: ignore[arg-type]
        norm = float(network(x).norm(dim=1).mean())
        if minibatches is second:  # as after an interruption
            continued = create("AIDGN", network, 3, 2, mu_star="auto", lr=0.1)
            continued.load_state_dict(algorithm.state_dict())
            algorithm = continued
        terms = algorithm.update(minibatches)
        assert float(terms["loss"]) == pytest.approx(float(expected.total), rel=1e-5)
        assert float(terms["norm"]) == pytest.approx(norm, rel=1e-5)
        assert float(terms["mu_star"]) == pytest.approx(410 / factor, rel=1e-5)
    assert "norm_scale" not in create("AIDGN", network, 3, 2).state_dict()


@pytest.mark.parametrize("wrong", ["automatic", 0])
def test_mu_star_is_a_number_or_auto(wrong: object) -> None:
    with pytest.raises(HyperParameterError, match="auto"):
        create("AIDGN", nn.Linear(6, 4), 3, 2, mu_star=wrong)
