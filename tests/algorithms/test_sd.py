"""SD, and ERM as its case without a penalty, against a naive reference."""

import copy
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("name", ["ERM", "SD"])
def test_updates(toy: SimpleNamespace, name: str) -> None:
    algorithm = toy.make(name, **({"sd_reg": 0.3} if name == "SD" else {}))
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)

    def naive(minibatches):
        count = sum(toy.SIZES)
        loss = sum(toy.cross_entropy(g(f(x)), y) * len(y) / count for x, y in minibatches)
        if name == "SD":
            loss = loss + 0.3 * sum((g(f(x)) ** 2).sum() for x, _ in minibatches) / (count * toy.CLASSES)
        adam.step(loss)
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])


def test_the_penalty_keeps_logits_small(toy: SimpleNamespace) -> None:
    sizes = []
    for sd_reg in (0.0, 0.1):
        algorithm = toy.make("SD", sd_reg=sd_reg, weight_decay=0.0)
        for _ in range(150):
            algorithm.update(toy.batches(0))
        sizes.append(float(algorithm.predict(toy.batches(0)[0][0]).detach().abs().mean()))
    assert sizes[1] < 0.6 * sizes[0]
