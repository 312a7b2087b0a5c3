"""The AIDGN objective against a second implementation in plain Python, one sample and one domain at a time."""

import doctest
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from aidgn import objective
from aidgn.objective import AIDGNLoss, AngularClassifier, aidgn_loss, margin, norm_regularizer, perturbed_logits

DEFAULTS: dict[str, Any] = {
    "kappa": 110.0,
    "gamma": 1e-3,
    "beta": 0.3,
    "eta": 0.04,
    "mu_star": 410.0,
    "ratio": "linear",
    "regularizer": "linear",
    "variant": "paper",
    "ratio_threshold": 1.0,
}
ABLATIONS: dict[str, dict[str, float]] = {
    "full": {},
    "noR": {"eta": 0.0},
    "noD": {"beta": 0.0},
    "noRD": {"eta": 0.0, "beta": 0.0},
}
SWITCHES = [
    {"ratio": ratio, "regularizer": regularizer, "variant": variant, **ABLATIONS[ablation]}
    for ratio, regularizer, variant, ablation in itertools.product(
        ("linear", "exact"), ("linear", "exact"), ("paper", "release", "release-paired"), ABLATIONS
    )
    if not (ratio == "exact" and "D" in ablation)
]
every_switch = pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(map(str, s.values())))


def reference(
    features: Tensor,
    labels: Tensor,
    domains: Tensor,
    weight: Tensor,
    held: Tensor | None = None,
    cases: set[str] | None = None,
    **options: Any,
) -> tuple[float, float, float]:
    """The formulas of the objective, naively. `held`: features from which everything that carries no gradient (mu_d in
    the margin, h) is computed instead; `cases`: receives the cases met."""
    o = {**DEFAULTS, **options}
    z, w = features.tolist(), weight.t().tolist()
    y, d = labels.tolist(), domains.tolist()

    def norm(x: list[float]) -> float:
        return math.sqrt(sum(a * a for a in x))

    def means(rows: list[list[float]]) -> dict[int, float]:
        return {k: sum(norm(row) for row, e in zip(rows, d, strict=True) if e == k) / d.count(k) for k in set(d)}

    constant = z if held is None else held.tolist()
    mu, mu_constant = means(z), means(constant)
    cross_entropies, clamped, hs = [], [], []
    for i, row in enumerate(z):
        r = norm(row)
        bm = o["beta"] * mu_constant[d[i]]
        rc = min(max(r, 10.0), o["mu_star"])
        x = r if o["variant"] == "paper" else rc - 10
        m = o["gamma"] * (x + bm if o["ratio"] == "linear" else bm * math.exp(x / bm))
        if o["variant"] != "paper":
            m += 0.4
        cosines = [sum(a * b for a, b in zip(row, column, strict=True)) / r / norm(column) for column in w]
        theta = math.acos(cosines[y[i]])
        if theta + m <= math.pi:
            cosines[y[i]] = math.cos(theta + m)
        top = max(cosines)
        log_sum = math.log(sum(math.exp(o["kappa"] * (c - top)) for c in cosines)) + o["kappa"] * top
        cross_entropies.append(log_sum - o["kappa"] * cosines[y[i]])
        h = norm(constant[i]) / mu_constant[d[i]]
        h = h if h > o["ratio_threshold"] else 1.0
        if cases is not None:
            cases |= {
                "margin" if theta + m <= math.pi else "guard",
                "h" if h != 1 else "h = 1",
                "low" if r < 10 else "high" if r > o["mu_star"] else "norm",
            }
        clamped.append(rc)
        hs.append(h)
    # In the released code every norm meets every h.
    pairs = zip(clamped, hs, strict=True) if o["variant"] == "release-paired" else itertools.product(clamped, hs)
    released = []
    for rc, h in pairs:
        if o["regularizer"] == "linear":
            released.append(o["eta"] * o["mu_star"] * (rc / (h * o["mu_star"]) ** 2 + 1 / rc))
        else:
            released.append(o["eta"] * (math.log(rc / (h * h * o["mu_star"])) - 1 + o["mu_star"] / rc))
    per_domain = []
    for value in mu.values():
        first = value / o["mu_star"] if o["regularizer"] == "linear" else math.log(value / o["mu_star"]) - 1
        per_domain.append(o["eta"] * (first + o["mu_star"] / value))
    terms = per_domain if o["variant"] == "paper" else released
    classification, regularizer = sum(cross_entropies) / len(z), sum(terms) / len(terms)
    return classification + regularizer, classification, regularizer


def batch(
    seed: int = 0,
    norms: tuple[float, ...] = (4.0, 8.0, 15.0, 20.0, 22.0, 35.0, 60.0, 13.0),
    n: int = 3,
    classes: int = 4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three domains of 5, 2 and 1 samples, mixed, with norms on both sides of the released code's clamps."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(len(norms), n, dtype=torch.float64, generator=generator)
    z = z / z.norm(dim=1, keepdim=True) * torch.tensor(norms, dtype=torch.float64)[:, None]
    labels = torch.randint(classes, (len(norms),), generator=generator)
    domains = torch.tensor([7, -3, 7, 7, 10**12, 7, -3, 7])[: len(norms)]
    return z, labels, domains, torch.randn(n, classes, dtype=torch.float64, generator=generator)


# Of moderate size, so that both sides of every switch and clamp occur and the softmax is not saturated.
MODERATE: dict[str, Any] = {"kappa": 3.0, "mu_star": 40.0, "eta": 0.3, "ratio_threshold": 1.2}


def moderate(switches: dict[str, Any]) -> dict[str, Any]:
    return {**MODERATE, "gamma": 2e-3 if switches["ratio"] == "exact" else 0.02, **switches}


def close(loss: AIDGNLoss, expected: Sequence[float], tolerance: float = 1e-12) -> None:
    assert [term.item() for term in loss] == pytest.approx(expected, rel=tolerance, abs=tolerance)


@every_switch
@pytest.mark.parametrize("seed", range(5))
def test_value(switches: dict[str, Any], seed: int) -> None:
    z, y, d, w = batch(seed)
    loss = aidgn_loss(z, y, d, w, **moderate(switches))
    close(loss, reference(z, y, d, w, **moderate(switches)))
    assert all(term.shape == () and term.dtype == torch.float64 for term in loss)


@pytest.mark.parametrize("ratio", ["linear", "exact"])
def test_the_batches_hold_every_case(ratio: str) -> None:
    cases: set[str] = set()
    for variant, seed in itertools.product(("paper", "release"), range(5)):
        reference(*batch(seed), cases=cases, **moderate({"ratio": ratio, "variant": variant}))
    assert cases == {"margin", "guard", "h", "h = 1", "low", "norm", "high"}


def test_defaults_are_the_papers() -> None:
    z, y, d, w = batch(1, norms=(300.0, 500.0, 410.0, 350.0, 20.0, 700.0, 90.0, 200.0), n=16)
    close(aidgn_loss(z, y, d, w), reference(z, y, d, w), 1e-11)


@every_switch
def test_gradient(switches: dict[str, Any]) -> None:
    """mu_d and h are constants in the margin and in the released regulariser; all else is differentiated."""
    z, y, d, w = batch(2)
    z.requires_grad_()
    w.requires_grad_()
    options = moderate(switches)
    aidgn_loss(z, y, d, w, **options).total.backward()
    held, step = z.detach().clone(), 1e-5
    for tensor in (z, w):
        values = tensor.detach()
        numeric = torch.zeros_like(values)
        for index in itertools.product(*map(range, values.shape)):
            kept, ends = values[index].item(), []
            for sign in (1, -1):
                values[index] = kept + sign * step
                ends.append(reference(z.detach(), y, d, w.detach(), held, **options)[0])
            values[index] = kept
            numeric[index] = (ends[0] - ends[1]) / (2 * step)
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, numeric, rtol=1e-6, atol=1e-8)


def test_the_released_regulariser_is_a_product_of_means() -> None:
    """eta' (mean(1/h^2) mean(rc) / mu*^2 + mean(1/rc)) with eta' = eta mu*; pairing gives another value."""
    z, y, d, w = batch(2)
    norms = z.norm(dim=1).tolist()
    means = [sum(r for r, e in zip(norms, d, strict=True) if e == k) / int((d == k).sum()) for k in d]
    h = [r / mean if r / mean > 1.2 else 1.0 for r, mean in zip(norms, means, strict=True)]
    rc = [min(max(r, 10.0), 40.0) for r in norms]
    crossed = sum(1 / a**2 for a in h) / 8 * sum(rc) / 8 / 40**2 + sum(1 / a for a in rc) / 8
    paired = sum(b / a**2 for a, b in zip(h, rc, strict=True)) / 8 / 40**2 + sum(1 / a for a in rc) / 8
    options = {**MODERATE, "eta": 0.3}
    assert aidgn_loss(z, y, d, w, variant="release", **options).regularizer.item() == pytest.approx(12 * crossed)
    assert aidgn_loss(z, y, d, w, variant="release-paired", **options).regularizer.item() == pytest.approx(12 * paired)
    assert abs(crossed - paired) > 0.02 * crossed


def test_mean_norm_has_a_gradient_in_the_regulariser_only() -> None:
    z, y, d, w = batch(3)
    z.requires_grad_()
    first = aidgn_loss(z, y, d, w, kappa=3.0, gamma=0.01, beta=2.0)
    (gradient,) = torch.autograd.grad(first.classification, z)
    # Sample 1 moves: with its own margin only, and through mu_d of its domain.
    step = torch.zeros_like(z)
    step[1] = 1e-5 * z[1].detach()
    moved = [
        reference(z.detach() + s * step, y, d, w, held, kappa=3.0, gamma=0.01, beta=2.0)[1]
        for s in (1, -1)
        for held in (z.detach(), None)
    ]
    detached, through = ((moved[i] - moved[i + 2]) / 2 for i in (0, 1))
    assert float((gradient * step).sum()) == pytest.approx(detached, rel=1e-5)
    assert abs(detached - through) > 0.1 * abs(detached)
    (gradient,) = torch.autograd.grad(aidgn_loss(z, y, d, w).regularizer, z)
    assert (gradient.norm(dim=1) > 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0, "gamma": 0.02},
        {"beta": 0.0, "gamma": 0.02, "regularizer": "exact"},
        {"beta": 0.0, "gamma": 0.02, "variant": "release", "ratio_threshold": 1e6},
        {"beta": 0.0, "gamma": 0.02, "variant": "release", "regularizer": "exact", "ratio_threshold": 1e6},
    ],
    ids=str,
)
def test_gradcheck_where_nothing_is_held(options: dict[str, Any]) -> None:
    z, y, d, w = batch(4)
    assert torch.autograd.gradcheck(
        lambda a, b: aidgn_loss(a, y, d, b, **{**MODERATE, **options}), (z.requires_grad_(), w.requires_grad_())
    )


def test_gradcheck_of_the_parts() -> None:
    z, y, _, w = batch(5)
    r, mu = z.norm(dim=1).requires_grad_(), torch.full((8,), 20.0, dtype=torch.float64, requires_grad=True)
    cosine = objective.cosines(z, w).requires_grad_()
    m = torch.linspace(0, 4, 8, dtype=torch.float64, requires_grad=True)
    for ratio in ("linear", "exact"):
        assert torch.autograd.gradcheck(lambda a, b, ratio=ratio: margin(a, b, 1e-3, 0.7, ratio), (r, mu))
    assert torch.autograd.gradcheck(lambda a, b: perturbed_logits(a, y, b, 7.0), (cosine, m))
    for word in ("linear", "exact"):
        assert torch.autograd.gradcheck(lambda a, word=word: norm_regularizer(a, 40.0, word), (r,))
    assert torch.autograd.gradcheck(objective.cosines, (z.requires_grad_(), w.requires_grad_()))


# Limits ---------------------------------------------------------------------------------------------------------------

GAMMAS = (0.0, 1e-3, 1.0, 1e30)


@every_switch
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_finite_everywhere(switches: dict[str, Any], dtype: torch.dtype) -> None:
    eye = torch.eye(6)
    some = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    batches = {
        "zero": torch.zeros(5, 6),
        "one zero": some * torch.tensor([0.0, 1, 1, 1, 0])[:, None],
        "on the class": 400 * eye[:5],
        "against it": -4e4 * eye[:5],
        "one far out": some * torch.tensor([3e3, 1, 1, 1, 1])[:, None],
    }
    if dtype != torch.float16:  # whose range the gradient of order kappa / |z| exceeds
        batches["tiny"] = 1e-7 * some
    for (name, z), gamma in itertools.product(batches.items(), GAMMAS):
        z = z.to(dtype).requires_grad_()
        w = eye[:, :5].clone().requires_grad_()
        loss = aidgn_loss(z, torch.arange(5), torch.tensor([4, 4, 4, 0, -9]), w, **{**switches, "gamma": gamma})
        loss.total.backward()
        assert z.grad is not None and w.grad is not None
        assert all(t.isfinite().all() for t in (*loss, w.grad, z.grad)), (name, gamma)


@pytest.mark.parametrize("variant", ["paper", "release", "release-paired"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("beta", [0.3, 1e-3, 1e-50])
def test_exact_ratio_never_overflows(beta: float, dtype: torch.dtype, variant: str) -> None:
    """exp(r / (beta mu_d)) is beyond all numbers; the margin then counts as above pi."""
    z, y, d, w = (t.to(dtype) if t.is_floating_point() else t for t in batch(15))
    z.requires_grad_()
    loss = aidgn_loss(z, y, d, w, ratio="exact", beta=beta, variant=variant)
    loss.total.backward()
    assert loss.total.isfinite() and z.grad is not None and z.grad.isfinite().all()
    if beta == 1e-3 and variant == "paper":
        torch.testing.assert_close(loss.classification, aidgn_loss(z, y, d, w, gamma=0.0).classification)


def test_gradient_next_to_a_cosine_of_one_is_bounded() -> None:
    """d cos(theta + m) / d cos(theta) = sin(theta + m) / sin(theta), at most 1 / sqrt(2e-7) = 2240."""
    for end in (1.0, -1.0):
        cosine = torch.tensor([[math.nextafter(end, 0), 0.5]], dtype=torch.float64, requires_grad=True)
        perturbed_logits(cosine, torch.tensor([0]), torch.tensor([0.3], dtype=torch.float64), 1.0).sum().backward()
        assert cosine.grad is not None and cosine.grad.abs().max() < 2240


def test_all_zero_features() -> None:
    """No direction: every cosine is 0, the classes are equally likely, and the gradient is of ordinary size."""
    z = torch.zeros(3, 8, requires_grad=True)
    loss = aidgn_loss(z, torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), torch.eye(8)[:, :5])
    assert loss.classification.item() == pytest.approx(math.log(5))
    loss.total.backward()
    assert z.grad is not None and 0 < z.grad.abs().max() <= 110


def test_cosine_of_one_and_minus_one() -> None:
    w = torch.eye(3, dtype=torch.float64)
    y, d = torch.tensor([0]), torch.tensor([0])
    options: dict[str, Any] = {"gamma": 0.01, "beta": 0.5, "eta": 0.0, "kappa": 5.0}
    m = 0.01 * (100 + 50)
    # The angle of the kept-off cosine is at most sqrt(2e-7) = 4.5e-4.
    loss = aidgn_loss(100 * w[[0]], y, d, w, **options).total
    assert loss.item() == pytest.approx(-5 * math.cos(m) + math.log(math.exp(5 * math.cos(m)) + 2), abs=5 * 4.5e-4)
    # theta = pi: any margin passes pi, so there is none.
    loss = aidgn_loss(-100 * w[[0]], y, d, w, **options).total
    assert loss.item() == pytest.approx(5 + math.log(math.exp(-5) + 2), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_guard_is_at_pi(dtype: torch.dtype) -> None:
    theta = torch.linspace(0.05, math.pi - 0.05, 60, dtype=dtype)
    for m in (0.0, 0.3, 1.5, 3.0, math.pi, 3.5, 7.0, 1e9, math.inf):
        cosine = torch.stack([theta.cos(), torch.zeros_like(theta)], 1)
        logits = perturbed_logits(cosine, torch.zeros(60, dtype=torch.long), torch.full_like(theta, m), 2.0)
        expected = [2 * math.cos(t + m if t + m <= math.pi else t) for t in theta.tolist()]
        assert logits[:, 0].tolist() == pytest.approx(expected, abs=1e-5 if dtype == torch.float32 else 1e-12)
        assert (logits[:, 1] == 0).all()


def test_exact_margin_at_the_defaults_passes_pi() -> None:
    mu = torch.tensor([410.0], dtype=torch.float64)
    assert margin(mu, mu, 1e-3, 0.3, "exact") > math.pi
    assert margin(mu, mu, 1e-4, 0.3, "exact").item() == pytest.approx(1e-4 * 123 * math.exp(410 / 123), rel=1e-12)


def test_exact_margin_is_linear_to_first_order() -> None:
    """b exp(r/b) - (r + b) = r^2 / 2b to second order."""
    mu = torch.full((3,), 400.0, dtype=torch.float64)
    r = torch.tensor([4.0, 0.4, 0.04], dtype=torch.float64)
    difference = margin(r, mu, 1e-3, 0.5, "exact") - margin(r, mu, 1e-3, 0.5)
    torch.testing.assert_close(difference, 1e-3 * r**2 / 400, rtol=1e-2, atol=1e-12)


def test_exact_regularizer_is_kl_of_exponentials() -> None:
    mu_star = 7.0
    mu = torch.tensor([2.0, 7.0, 30.0], dtype=torch.float64)
    grid = torch.linspace(0, 600, 600_001, dtype=torch.float64)
    for value, kl, linear in zip(
        mu.tolist(),
        norm_regularizer(mu, mu_star, "exact").tolist(),
        norm_regularizer(mu, mu_star).tolist(),
        strict=True,
    ):
        p = torch.exp(-grid / mu_star) / mu_star
        log_ratio = math.log(value / mu_star) + grid * (1 / value - 1 / mu_star)
        assert kl == pytest.approx(float(torch.trapezoid(p * log_ratio, grid)), abs=1e-6)
        assert linear - 2 >= kl - 1e-15 and (value != mu_star or linear - 2 == kl == 0)


# Batches --------------------------------------------------------------------------------------------------------------


@every_switch
def test_one_domain_and_one_sample(switches: dict[str, Any]) -> None:
    z, y, d, w = batch(6)
    options = moderate(switches)
    close(aidgn_loss(z, y, torch.full_like(d, 3), w, **options), reference(z, y, torch.full_like(d, 3), w, **options))
    close(aidgn_loss(z[:1], y[:1], d[:1], w, **options), reference(z[:1], y[:1], d[:1], w, **options))


@every_switch
def test_order_of_samples_and_names_of_domains_do_not_matter(switches: dict[str, Any]) -> None:
    z, y, d, w = batch(7)
    options = moderate(switches)
    expected = tuple(term.item() for term in aidgn_loss(z, y, d, w, **options))
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    close(aidgn_loss(z[order], y[order], d[order], w, **options), expected)
    renamed = torch.tensor([{7: 0, -3: 2, 10**12: 1}[k] for k in d.tolist()])
    for dtype in (torch.int64, torch.int32, torch.uint8):
        close(aidgn_loss(z, y.to(dtype), renamed.to(dtype), w, **options), expected)


def test_each_domain_counts_once_in_the_regulariser() -> None:
    r = torch.tensor([10.0, 10.0, 10.0, 40.0], dtype=torch.float64)
    loss = aidgn_loss(
        r[:, None] * torch.eye(4, dtype=torch.float64),
        torch.arange(4),
        torch.tensor([0, 0, 0, 1]),
        torch.eye(4, dtype=torch.float64),
        mu_star=20.0,
        eta=1.0,
    )
    assert loss.regularizer.item() == pytest.approx(((0.5 + 2) + (2 + 0.5)) / 2)


def test_scale_of_the_weights_does_not_matter() -> None:
    z, y, d, w = batch(8)
    scale = torch.tensor([1e-6, 1.0, 5.0, 1e6], dtype=torch.float64)
    close(aidgn_loss(z, y, d, w * scale, **MODERATE), reference(z, y, d, w, **MODERATE))


# Precision and compilation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_switch
def test_half_precision_is_computed_in_float32(switches: dict[str, Any], dtype: torch.dtype) -> None:
    z, y, d, w = batch(9)
    z, w = z.to(dtype), w.float()
    loss = aidgn_loss(z, y, d, w, **moderate(switches))
    assert loss.total.dtype == torch.float32
    close(loss, reference(z.double(), y, d, w.double(), **moderate(switches)), 1e-5)
    z.requires_grad_()
    aidgn_loss(z, y, d, w, **moderate(switches)).total.backward()
    assert z.grad is not None and z.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    z, y, d, w = (t.to(dtype) if t.is_floating_point() else t for t in batch(10, n=64))
    classifier = AngularClassifier(64, 4).to(dtype)
    expected, logits = aidgn_loss(z, y, d, w), classifier(z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert aidgn_loss(z, y, d, w) == expected
        assert torch.equal(classifier(z), logits) and logits.dtype == dtype
        assert classifier(z.bfloat16()).dtype == dtype


def test_total_is_the_sum() -> None:
    z, y, d, w = (t.float() if t.is_floating_point() else t for t in batch(11))
    loss = aidgn_loss(z, y, d, w)
    assert loss._fields == ("total", "classification", "regularizer")
    assert loss.total == loss.classification + loss.regularizer


@every_switch
def test_nothing_waits_for_values(switches: dict[str, Any]) -> None:
    """Fake tensors have no values: whatever reads one on the host raises."""
    with FakeTensorMode():
        z, w = torch.randn(6, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
        loss = aidgn_loss(z, torch.randint(3, (6,)), torch.randint(9, (6,)), w, **switches)
        loss.total.backward()
        assert loss.total.shape == () and z.grad is not None and z.grad.shape == (6, 5)


@pytest.mark.parametrize("options", [{}, {"variant": "release", "ratio": "exact", "regularizer": "exact"}], ids=str)
def test_compiles_in_one_graph(options: dict[str, Any]) -> None:
    z, y, d, w = batch(12)
    torch._dynamo.reset()
    compiled = torch.compile(aidgn_loss, fullgraph=True, backend="aot_eager")
    close(compiled(z, y, d, w, **options), tuple(term.item() for term in aidgn_loss(z, y, d, w, **options)))


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "exakt"}, "ratio must be 'linear' or 'exact', got 'exakt'"),
        ({"regularizer": "kl"}, "regularizer must be"),
        ({"variant": "Paper"}, "variant must be 'paper' or 'release' or 'release-paired'"),
        ({"ratio": "exact", "beta": 0.0}, "needs beta > 0"),
        ({"kappa": 0.0}, "kappa must be above 0"),
        ({"mu_star": -1.0}, "mu_star must be above 0"),
        ({"ratio_threshold": 0.0}, "ratio_threshold must be above 0"),
        ({"gamma": -1e-9}, "gamma must be 0 or above"),
        ({"beta": -0.1}, "beta must be 0 or above"),
        ({"eta": -0.1}, "eta must be 0 or above"),
        ({"eta": math.nan}, "eta must be 0 or above"),
        ({"kappa": math.inf}, "kappa must be above 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aidgn_loss(*batch(), **options)


def test_wrong_tensors() -> None:
    z, y, d, w = batch()
    for wrong, message in [
        ((z[0], y, d, w), "features must be"),
        ((z.long(), y, d, w), "features must be"),
        ((z[:0], y[:0], d[:0], w), "B >= 1"),
        ((z, y, d, w.t()), r"weight must be .* n = 3"),
        ((z, y[:-1], d, w), r"labels must be integers of shape \[8\]"),
        ((z, y.double(), d, w), "labels must be"),
        ((z, y, d[:, None], w), "domains must be"),
        ((z, y, d > 0, w), "domains must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            aidgn_loss(*wrong)


# The classifier -------------------------------------------------------------------------------------------------------


def test_classifier() -> None:
    torch.manual_seed(0)
    classifier = AngularClassifier(16, 5)
    torch.manual_seed(0)
    draw = torch.rand(16, 5) * 2 - 1
    assert [(name, p.shape) for name, p in classifier.named_parameters()] == [("weight", (16, 5))]
    torch.testing.assert_close(classifier.weight.detach(), draw / draw.norm(dim=0))
    z = torch.randn(7, 16)
    expected = [
        [
            110 * math.cos(math.acos(float(row @ column / row.norm() / column.norm())))
            for column in classifier.weight.detach().t()
        ]
        for row in z
    ]
    torch.testing.assert_close(classifier(z), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(classifier(1e-3 * z), classifier(z), rtol=1e-4, atol=1e-4)
    assert torch.equal(AngularClassifier(16, 5, kappa=2.0)(torch.zeros(1, 16)), torch.zeros(1, 5))
    assert classifier.half()(z.half()).dtype == torch.float32
    with pytest.raises(ValueError, match="kappa"):
        AngularClassifier(16, 5, kappa=-1.0)
    with pytest.raises(ValueError, match="at least 1"):
        AngularClassifier(16, 0)


def test_loss_without_margin_is_cross_entropy() -> None:
    z, y, d, w = batch(13)
    classifier = AngularClassifier(3, 4).double()
    classifier.weight.data = w
    loss = aidgn_loss(z, y, d, w, gamma=0.0, eta=0.0)
    assert loss.total.item() == pytest.approx(torch.nn.functional.cross_entropy(classifier(z), y).item(), rel=1e-12)


# The paper's remark: MagFace ------------------------------------------------------------------------------------------


def magface(
    cosines: list[float],
    label: int,
    a: float,
    *,
    s: float,
    l_a: float,
    u_a: float,
    l_m: float,
    u_m: float,
    lambda_g: float,
) -> float:
    """Meng et al., CVPR 2021: margin linear in the norm a, from l_m at l_a to u_m at u_a, and g(a) = 1/a + a/u_a^2."""
    m = (u_m - l_m) / (u_a - l_a) * (a - l_a) + l_m
    exponents = [s * (math.cos(math.acos(c) + m) if i == label else c) for i, c in enumerate(cosines)]
    return math.log(sum(map(math.exp, exponents))) - exponents[label] + lambda_g * (1 / a + a / u_a**2)


def test_one_sample_of_one_domain_is_magface() -> None:
    """kappa = s, mu* = u_a, eta mu* = lambda_g, and the margin's slope gamma (1 + beta)."""
    kappa, gamma, beta, eta, mu_star, l_a = 9.0, 1e-3, 0.3, 0.04, 410.0, 10.0
    slope = gamma * (1 + beta)
    w = torch.eye(3, dtype=torch.float64)
    for z in ([30.0, 40.0, -20.0], [200.0, 100.0, 120.0]):
        features = torch.tensor([z], dtype=torch.float64)
        a = math.hypot(*z)
        loss = aidgn_loss(
            features,
            torch.tensor([1]),
            torch.tensor([0]),
            w,
            kappa=kappa,
            gamma=gamma,
            beta=beta,
            eta=eta,
            mu_star=mu_star,
        )
        expected = magface(
            [x / a for x in z],
            1,
            a,
            s=kappa,
            l_a=l_a,
            u_a=mu_star,
            l_m=slope * l_a,
            u_m=slope * mu_star,
            lambda_g=eta * mu_star,
        )
        assert loss.total.item() == pytest.approx(expected, rel=1e-12)


def test_release_without_domains_is_magface_for_any_batch() -> None:
    """beta = 0 and no sample above the threshold: l_a = 10, l_m = 0.4, norms within [l_a, u_a]."""
    z, _, d, w = batch(14, norms=(11.0, 30.0, 100.0, 400.0))
    y = objective.cosines(z, w).argmax(1)  # within pi - 0.8, beyond which MagFace differs
    loss = aidgn_loss(z, y, d, w, kappa=5.0, beta=0.0, variant="release", ratio_threshold=1e6)
    cosines, norms = objective.cosines(z, w).tolist(), z.norm(dim=1).tolist()
    assert min(map(max, cosines)) > 0
    expected = [
        magface(row, label, a, s=5.0, l_a=10.0, u_a=410.0, l_m=0.4, u_m=0.8, lambda_g=0.04 * 410)
        for row, label, a in zip(cosines, y.tolist(), norms, strict=True)
    ]
    assert loss.total.item() == pytest.approx(sum(expected) / 4, rel=1e-12)


def test_examples_in_the_docstrings() -> None:
    results = doctest.testmod(objective)
    assert results.attempted >= 8 and results.failed == 0
