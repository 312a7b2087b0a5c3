"""SagNet against a sample-by-sample reference with DomainBed's order of draws."""

import copy
from types import SimpleNamespace

import torch

from aidgn.algorithms.sagnet import random_content, random_style


def style(row):
    mean = row.sum() / len(row)
    return mean, ((row - mean) ** 2).sum() / (len(row) - 1)


def naive_randomize(z, what):
    share, other = torch.rand(len(z), 1), torch.randperm(len(z))
    out = []
    for k, row in enumerate(z):
        mean, variance = style(row)
        mean_o, variance_o = style(z[other[k]])
        if what == "style":
            a = float(share[k])
            content = (row - mean) / (variance + 1e-5).sqrt()
            new = content * (a * variance + (1 - a) * variance_o + 1e-5).sqrt() + a * mean + (1 - a) * mean_o
        else:
            content = ((z[other[k]] - mean_o) / (variance_o + 1e-5).sqrt()).detach()
            new = content * (variance + 1e-5).sqrt() + mean
        out.append(new)
    return torch.stack(out)


def test_updates(toy: SimpleNamespace) -> None:
    algorithm = toy.make("SagNet", sag_w_adv=0.6)
    f, content = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    style_head = copy.deepcopy(algorithm.style_classifier)
    adam_f, adam_c, adam_s = (toy.Adam(m.parameters(), lr=1e-2, weight_decay=1e-3) for m in (f, content, style_head))

    def naive(minibatches):
        x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
        loss = toy.cross_entropy(content(naive_randomize(f(x), "style")), y)
        gradients = torch.autograd.grad(loss, [*f.parameters(), *content.parameters()])
        adam_f.step(gradients[:4])
        adam_c.step(gradients[4:])
        adam_s.step(toy.cross_entropy(style_head(naive_randomize(f(x), "content")), y))
        logits = style_head(naive_randomize(f(x), "content"))
        adversary = 0.6 * -torch.log(torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)).sum() / logits.numel()
        adam_f.step(adversary)
        return loss

    toy.follow(
        algorithm,
        naive,
        [(algorithm.featurizer, f), (algorithm.classifier, content), (algorithm.style_classifier, style_head)],
    )


def test_random_style_and_random_content() -> None:
    torch.manual_seed(0)
    z = torch.randn(8, 50, dtype=torch.float64) * torch.linspace(1, 3, 8, dtype=torch.float64).unsqueeze(1) + 2
    styled, mixed = random_style(z), random_content(z)

    def content(a):
        return (a - a.mean(1, keepdim=True)) / a.std(1, keepdim=True)

    torch.testing.assert_close(content(styled), content(z), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(styled.mean(1), z.mean(1))
    torch.testing.assert_close(mixed.mean(1), z.mean(1))
    torch.testing.assert_close(mixed.std(1), z.std(1), rtol=1e-4, atol=1e-4)
    matches = torch.cdist(content(mixed), content(z)).argmin(1)
    assert sorted(matches.tolist()) == list(range(8)) and matches.tolist() != list(range(8))


def test_the_style_head_has_no_part_in_the_prediction(toy: SimpleNamespace) -> None:
    algorithm = toy.make("SagNet").eval()
    x = toy.batches(0)[0][0]
    before = algorithm.predict(x)
    with torch.no_grad():
        for parameter in algorithm.style_classifier.parameters():
            parameter.fill_(1e3)
    assert torch.equal(before, algorithm.predict(x))


def test_content_passes_no_gradient_when_it_is_random() -> None:
    """d random_content / d z lies in the span of the gradients of the own mean and variance."""
    torch.manual_seed(1)
    z = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 6, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((random_content(z) * weights).sum(), z)
    for row, g in zip(z.detach(), gradient, strict=True):
        basis = torch.stack([torch.ones(6, dtype=torch.float64), row - row.mean()]).T
        residual = g - basis @ torch.linalg.lstsq(basis, g.unsqueeze(1)).solution.squeeze(1)
        assert residual.abs().max() < 1e-10
