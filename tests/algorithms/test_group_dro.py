"""GroupDRO against its update rule with domain weights in plain Python."""

import copy
import math
from types import SimpleNamespace

import torch


def test_updates(toy: SimpleNamespace) -> None:
    algorithm = toy.make("GroupDRO", groupdro_eta=0.3)
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)
    q = [1.0, 1.0, 1.0]

    def naive(minibatches):
        nonlocal q
        risks = [toy.cross_entropy(g(f(x)), y) for x, y in minibatches]
        q = [weight * math.exp(0.3 * risk.item()) for weight, risk in zip(q, risks, strict=True)]
        q = [weight / sum(q) for weight in q]
        loss = sum(weight * risk for weight, risk in zip(q, risks, strict=True))
        adam.step(loss)
        torch.testing.assert_close(algorithm.q, torch.tensor(q, dtype=torch.float64), rtol=1e-9, atol=0)
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])


def test_the_worst_domain_gains_weight(toy: SimpleNamespace) -> None:
    algorithm = toy.make("GroupDRO", lr=1e-9, groupdro_eta=0.5)
    minibatches = toy.batches(0, sizes=(40, 40, 40))
    with torch.no_grad():
        right = [(x, algorithm.predict(x).argmax(1)) for x, _ in minibatches]
        wrong = algorithm.predict(minibatches[1][0]).argmin(1)
    right[1] = (minibatches[1][0], wrong)
    shares = []
    for _ in range(6):
        algorithm.update(right)
        shares.append(float(algorithm.q[1]))
    assert shares == sorted(shares) and shares[-1] > 0.5
    assert math.isclose(float(algorithm.q.sum()), 1)
