"""Fishr against per-sample gradients taken one by one with autograd."""

import copy
from types import SimpleNamespace

import pytest
import torch

from aidgn.algorithms.fishr import classifier_gradients


@pytest.mark.parametrize("anneal", [0, 2])
def test_updates(toy: SimpleNamespace, anneal: int) -> None:
    algorithm = toy.make("Fishr", fishr_lambda=50.0, penalty_anneal_iters=anneal, ema=0.8)
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)

    def fresh_adam():
        return toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)

    adam, count = fresh_adam(), 0
    averages = [torch.zeros(toy.CLASSES * toy.FEATURES + toy.CLASSES, dtype=torch.float64) for _ in range(3)]

    def naive(minibatches):
        nonlocal adam, count
        risks, variances = [], []
        for d, (x, y) in enumerate(minibatches):
            logits = g(f(x))
            risks.append(toy.cross_entropy(logits, y))
            gradients = []
            for k in range(len(y)):
                weight, bias = torch.autograd.grad(
                    toy.cross_entropy(logits[k : k + 1], y[k : k + 1]), [g.weight, g.bias], create_graph=True
                )
                gradients.append(torch.cat([weight.flatten(), bias]))
            mean = sum(gradients) / len(y)
            variance = sum((each - mean) ** 2 for each in gradients) / len(y)
            average = 0.8 * averages[d] + 0.2 * variance
            averages[d] = average.detach()
            variances.append(average / 0.2)
        centre = sum(variances) / 3
        penalty = sum(((v - centre) ** 2).mean() for v in variances) / 3
        loss = sum(risks) / 3 + (50.0 * penalty if count >= anneal else 0)
        if count == anneal:
            adam = fresh_adam()
        adam.step(loss)
        count += 1
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)], steps=5)


def test_the_mean_of_the_gradients_is_the_gradient_of_the_mean(toy: SimpleNamespace) -> None:
    algorithm = toy.make("Fishr")
    ((x, y),) = toy.batches(0, sizes=(6,))
    z = algorithm.features(x)
    logits = algorithm.classifier(z)
    weight, bias = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, y),
        [algorithm.classifier.weight, algorithm.classifier.bias],
        retain_graph=True,
    )
    mean = classifier_gradients(z, logits, y).mean(0)
    torch.testing.assert_close(mean, torch.cat([weight, bias.unsqueeze(1)], dim=1))


def test_the_penalty_is_zero_for_equal_domains(toy: SimpleNamespace) -> None:
    algorithm = toy.make("Fishr", penalty_anneal_iters=0)
    ((x, y),) = toy.batches(0, sizes=(5,))
    assert float(algorithm.update([(x, y)] * 3)["penalty"]) < 1e-30
    assert float(algorithm.update(toy.batches(1))["penalty"]) > 1e-6
