"""MTL against a domain-by-domain reference, its embeddings by hand."""

import copy
from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("ema", [0.9, 1.0])
def test_updates(toy: SimpleNamespace, ema: float) -> None:
    algorithm = toy.make("MTL", mtl_ema=ema)
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)
    embeddings = [torch.zeros(toy.FEATURES, dtype=torch.float64) for _ in range(3)]

    def naive(minibatches):
        loss = torch.zeros((), dtype=torch.float64)
        for d, (x, y) in enumerate(minibatches):
            z = f(x)
            e = ema * sum(z) / len(z) + (1 - ema) * embeddings[d]
            embeddings[d] = e.detach()
            loss = loss + toy.cross_entropy(torch.stack([g(torch.cat([row, e])) for row in z]), y)
        adam.step(loss)
        torch.testing.assert_close(algorithm.embeddings, torch.stack(embeddings), rtol=1e-9, atol=1e-12)
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])


def test_prediction_uses_the_mean_of_groups_of_64(toy: SimpleNamespace) -> None:
    algorithm = toy.make("MTL").eval()
    x = torch.randn(150, toy.INPUTS, dtype=torch.float64)
    calls = []
    algorithm.featurizer.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        logits = algorithm.predict(x)
        assert len(calls) == 1
        before = algorithm.embeddings.clone()
        for start in (0, 64, 128):
            z = algorithm.featurizer(x[start : start + 64])
            expected = algorithm.classifier(torch.cat([z, z.mean(0).repeat(len(z), 1)], dim=1))
            torch.testing.assert_close(logits[start : start + 64], expected)
        assert torch.equal(before, algorithm.embeddings)
    assert algorithm.group_size == 64
