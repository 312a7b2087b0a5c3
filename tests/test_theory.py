"""The theory against scipy, quadrature, autograd and numeric optimisation."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import integrate, optimize, stats
from scipy.special import gammaln, logsumexp

from aidgn import theory
from aidgn.objective import perturbed_logits

Array = NDArray[np.float64]


def unit(seed: int, *shape: int) -> Array:
    x = np.random.default_rng(seed).standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def scipy_vmf(mean: Array, kappa: float) -> Any:
    return stats.vonmises_fisher(mean, kappa)  # type: ignore[arg-type]  # whose stubs ask for an integer


def log_bessel_by_quadrature(v: float, x: float) -> float:
    """log I_v(x) - x from I_v(x) = (x/2)^v / (sqrt(pi) Gamma(v + 1/2)) int_-1^1 (1 - t^2)^(v - 1/2) e^(x t) dt, with
    t = tanh s, where the trapezoidal rule converges exponentially."""
    step = 1e-3
    s = np.arange(-60_000, 60_001) * step
    log_cosh = np.abs(s) + np.log1p(np.exp(-2 * np.abs(s))) - np.log(2)
    integral = logsumexp(-(2 * v + 1) * log_cosh - 2 * x / (1 + np.exp(2 * s))) + np.log(step)
    return v * np.log(x / 2) - gammaln(v + 0.5) - 0.5 * np.log(np.pi) + integral


# von Mises-Fisher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 20])
@pytest.mark.parametrize("kappa", [1e-8, 0.3, 1.0, 20.0, 500.0])
def test_log_density_is_scipys(n: int, kappa: float) -> None:
    x, mean = unit(0, 7, n), unit(1, n)
    expected = scipy_vmf(mean, kappa).logpdf(x)
    np.testing.assert_allclose(theory.vmf_log_density(x, mean, kappa), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", [2, 3, 10, 100, 101, 103, 512])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 3.0, 110.0, 3000.0])
def test_density_integrates_to_one(n: int, kappa: float) -> None:
    """Over the angle to the mean: |S^(n-2)| int_0^pi p(t) sin^(n-2)(t) dt = 1, |S^(n-2)| = 2 pi^((n-1)/2) / Gamma."""
    angle = np.linspace(1e-9, np.pi - 1e-9, 40_001)
    x = np.concatenate([np.cos(angle)[:, None], np.sin(angle)[:, None], np.zeros((angle.size, n - 2))], axis=1)
    mean = np.eye(n)[0]
    log_ring = np.log(2) + (n - 1) / 2 * np.log(np.pi) - gammaln((n - 1) / 2) + (n - 2) * np.log(np.sin(angle))
    total = integrate.simpson(np.exp(theory.vmf_log_density(x, mean, kappa) + log_ring), x=angle)
    assert total == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("n", [128, 512, 2048])
@pytest.mark.parametrize("kappa", [1e-3, 1.0, 110.0, 1e3, 1e4, 1e5])
def test_normaliser_in_many_dimensions(n: int, kappa: float) -> None:
    mean = np.eye(n)[0]
    v = n / 2 - 1
    expected = v * np.log(kappa) - n / 2 * np.log(2 * np.pi) - log_bessel_by_quadrature(v, kappa)
    assert theory.vmf_log_density(mean, mean, kappa) == pytest.approx(expected, rel=1e-12, abs=1e-10)


@pytest.mark.parametrize("v", [0, 0.5, 1, 12, 49.5, 50, 50.5, 300])
def test_bessel(v: float) -> None:
    """Of every order and size, across the borders at v = 50 and x = 1 and 1e8."""
    for x in (1e-3, 0.999, 1.0, 1.001, 30.0, 1e4, 0.99e8, 1.01e8, 1e10):
        expected = log_bessel_by_quadrature(v, x) + gammaln(v + 1) - v * np.log(x / 2)
        assert theory.log_bessel(v, x) == pytest.approx(expected, rel=1e-11, abs=1e-11), x
    assert theory.log_bessel(v, 0.0) == 0
    assert theory.log_bessel(v, 1e-200) == pytest.approx(0, abs=1e-16)


def test_log_density_at_2048_is_finite_and_monotone() -> None:
    mean, kappa = np.eye(2048)[0], np.concatenate([[0.0], np.geomspace(1e-10, 1e5, 300)])
    peak = theory.vmf_log_density(mean, mean, kappa)
    opposite = theory.vmf_log_density(-mean, mean, kappa)
    assert np.isfinite(peak).all() and np.isfinite(opposite).all()
    assert (np.diff(peak) >= 0).all() and (np.diff(opposite) <= 0).all() and peak[-1] > peak[0] + 1000
    area = math.log(2) + 1024 * math.log(math.pi) - math.lgamma(1024)
    assert peak[0] == opposite[0] == pytest.approx(-area, rel=1e-14)


def test_log_density_broadcasts() -> None:
    x, means, kappas = unit(0, 5, 1, 4), unit(1, 3, 4), np.array([0.0, 2.0, 50.0])
    together = theory.vmf_log_density(x, means, kappas)
    assert together.shape == (5, 3)
    for i, j in np.ndindex(5, 3):
        assert together[i, j] == pytest.approx(float(theory.vmf_log_density(x[i, 0], means[j], kappas[j])), rel=1e-14)


@pytest.mark.parametrize(
    ("n", "kappa"), [(2, 0.0), (2, 5.0), (3, 0.0), (3, 2.0), (10, 30.0), (512, 110.0), (2048, 3e3)]
)
def test_sample_moments(n: int, kappa: float) -> None:
    """The cosine to the mean has mean A and variance 1 - A^2 - (n-1) A / kappa (A by quadrature); the rest is
    symmetric around the mean."""
    mean, size = unit(3, n), 4000
    x = theory.vmf_sample(mean, kappa, size, np.random.default_rng(4))
    assert x.shape == (size, n)
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-12)
    a = math.exp(log_bessel_by_quadrature(n / 2, kappa) - log_bessel_by_quadrature(n / 2 - 1, kappa)) if kappa else 0.0
    variance = 1 - a**2 - (n - 1) * (a / kappa if kappa else 1 / n)
    cosine = x @ mean
    assert cosine.mean() == pytest.approx(a, abs=4.5 * math.sqrt(variance / size))
    assert cosine.var() == pytest.approx(variance, rel=0.15)
    sideways = unit(5, n)
    sideways -= sideways @ mean * mean
    sideways /= np.linalg.norm(sideways)
    spread = math.sqrt((1 - a**2 - variance) / (n - 1))
    assert (x @ sideways).mean() == pytest.approx(0, abs=4.5 * spread / math.sqrt(size))
    assert (x @ sideways).std() == pytest.approx(spread, rel=0.1)


def test_sample_distribution_is_scipys() -> None:
    mean = unit(6, 4)
    ours = theory.vmf_sample(mean, 3.0, 3000, np.random.default_rng(0)) @ mean
    theirs = scipy_vmf(mean, 3.0).rvs(3000, random_state=np.random.default_rng(1)) @ mean
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-3


def test_same_generator_same_sample() -> None:
    first, second = (theory.vmf_sample(unit(0, 5), 2.0, 10, np.random.default_rng(9)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("n", [2, 3, 50, 99, 100, 101, 102, 512, 2048])
def test_concentration_inverts_the_mean_length(n: int) -> None:
    kappas = np.array([1e-6, 0.1, 5.0, 110.0, 3e3, 1e5])
    lengths = np.array(
        [math.exp(log_bessel_by_quadrature(n / 2, k) - log_bessel_by_quadrature(n / 2 - 1, k)) for k in kappas]
    )
    np.testing.assert_allclose(theory.vmf_mean_length(kappas, n), lengths, rtol=1e-9)
    exact = theory.vmf_mean_length(kappas, n)
    np.testing.assert_allclose(theory.vmf_concentration(exact, n), kappas, rtol=1e-8)
    assert [theory.vmf_concentration(float(length), n) for length in exact] == pytest.approx(list(kappas), rel=1e-8)


def test_concentration_at_the_ends() -> None:
    assert theory.vmf_concentration(0.0, 7) == 0
    assert theory.vmf_concentration(1.0, 7) == math.inf
    assert theory.vmf_concentration(1 - 1e-13, 7) == pytest.approx(3e13, rel=1e-2)


@pytest.mark.parametrize("n", [2, 3, 64, 512, 2048])
def test_concentration_of_nearly_equal_directions(n: int) -> None:
    """A(kappa) = 1 - (n-1) / 2 kappa + (n-1) (n-3) / 8 kappa^2 - ... for large kappa."""
    kappas = n * np.geomspace(1e3, 1e11, 1001)
    lengths = 1 - (n - 1) / (2 * kappas) + (n - 1) * (n - 3) / (8 * kappas**2)
    # Lengths this close to 1 are themselves rounded.
    assert (np.abs(theory.vmf_concentration(lengths, n) / kappas - 1) < 5e-6 + 1e-16 / (1 - lengths)).all()


@pytest.mark.parametrize(("n", "kappa"), [(2, 4.0), (3, 0.7), (64, 50.0), (512, 400.0), (2048, 3000.0)])
def test_fit_recovers_what_was_sampled(n: int, kappa: float) -> None:
    mean = unit(7, n)
    fitted = theory.vmf_fit(theory.vmf_sample(mean, kappa, 4000, np.random.default_rng(8)))
    assert fitted.kappa == pytest.approx(kappa, rel=0.08)
    assert fitted.mean_direction @ mean > 0.99


def test_fit_is_the_maximum_of_the_likelihood() -> None:
    x = theory.vmf_sample(unit(9, 6), 8.0, 60, np.random.default_rng(10))
    mean, kappa = theory.vmf_fit(x)
    best = scipy_vmf(mean, float(kappa)).logpdf(x).sum()
    for factor in (0.99, 1.01):
        assert scipy_vmf(mean, float(kappa) * factor).logpdf(x).sum() < best
    for seed in range(5):
        other = mean + 0.02 * unit(seed, 6)
        assert scipy_vmf(other / np.linalg.norm(other), float(kappa)).logpdf(x).sum() < best
    expected_mean, expected_kappa = stats.vonmises_fisher.fit(x)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-10)
    assert kappa == pytest.approx(expected_kappa, rel=1e-6)


def test_fit_of_several_groups_at_once() -> None:
    groups = np.stack([theory.vmf_sample(unit(s, 5), k, 30, np.random.default_rng(s)) for s, k in ((0, 1.0), (1, 9.0))])
    together = theory.vmf_fit(groups)
    for i, group in enumerate(groups):
        alone = theory.vmf_fit(group)
        np.testing.assert_allclose(together.mean_direction[i], alone.mean_direction)
        assert together.kappa[i] == pytest.approx(float(alone.kappa))


def test_fit_of_identical_and_of_opposite_samples() -> None:
    assert theory.vmf_fit(np.eye(3)[[0, 0, 0]]).kappa == math.inf
    opposite = theory.vmf_fit(np.array([[1.0, 0, 0], [-1.0, 0, 0]]))
    assert opposite.kappa == 0 and np.isfinite(opposite.mean_direction).all()


# Polar coordinates and theorem 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 9, 2048])
def test_polar_coordinates_both_ways(n: int) -> None:
    z = np.random.default_rng(n).standard_normal((50, n)) * 7
    r, phi = theory.to_polar(z)
    assert r.shape == (50,) and phi.shape == (50, n - 1)
    np.testing.assert_allclose(r, np.linalg.norm(z, axis=1), rtol=1e-12)
    assert (phi >= 0).all() and (phi[:, :-1] <= np.pi).all() and (phi[:, -1] < 2 * np.pi).all()
    assert n == 2 or (phi[:, -1] > np.pi).any()
    np.testing.assert_allclose(np.cos(phi[:, 0]), z[:, 0] / r, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(theory.from_polar(r, phi), z, rtol=1e-9, atol=1e-10)


def test_polar_coordinates_of_the_axes_and_of_zero() -> None:
    z = np.concatenate([np.eye(4), -np.eye(4), np.zeros((1, 4))])
    np.testing.assert_allclose(theory.from_polar(*theory.to_polar(z)), z, atol=1e-15)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_determinant(n: int) -> None:
    """Against the determinant of a Jacobian by autograd through the printed map."""

    def cartesian(coordinates: torch.Tensor) -> torch.Tensor:
        rest, z = coordinates[0], []
        for phi in coordinates[1:]:
            z.append(rest * torch.cos(phi))
            rest = rest * torch.sin(phi)
        return torch.stack([*z, rest])

    rng = np.random.default_rng(n)
    for _ in range(5):
        r, phi = rng.uniform(0.1, 9), rng.uniform(0.1, 3, n - 1)
        phi[-1] *= 2
        coordinates = torch.tensor([r, *phi], dtype=torch.float64)
        jacobian: Any = torch.autograd.functional.jacobian(cartesian, coordinates)
        expected = math.log(abs(torch.linalg.det(jacobian)))
        assert theory.polar_log_determinant(r, phi) == pytest.approx(expected, rel=1e-9)
        np.testing.assert_allclose(theory.from_polar(r, phi), cartesian(coordinates).numpy(), rtol=1e-12)


def test_gaussian_in_polar_coordinates() -> None:
    """Norm chi, angles proportional to powers of sines: the density of z is scipy's."""
    n, sigma = 5, 2.0
    z = np.random.default_rng(0).standard_normal((20, n)) * 3
    r, phi = theory.to_polar(z)
    log_angles = np.zeros(20)
    for i in range(n - 2):
        power = n - 2 - i
        total = integrate.quad(lambda t, power=power: math.sin(t) ** power, 0, math.pi)[0]
        log_angles += power * np.log(np.sin(phi[:, i])) - math.log(total)
    log_angles -= math.log(2 * math.pi)
    ours = theory.cartesian_log_density(stats.chi(n, scale=sigma).logpdf(r), log_angles, r, phi)
    np.testing.assert_allclose(ours, stats.multivariate_normal(np.zeros(n), sigma**2).logpdf(z), rtol=1e-10)


def test_theorem_1() -> None:
    """Two densities in z that share p(phi), with norms whose law depends on phi: built without polar coordinates, as
    density on the sphere times p(r | direction) / r^(n-1), their ratio is that of the norms."""
    n, mean = 4, unit(0, 4)
    z = np.random.default_rng(1).standard_normal((30, n)) * 2
    r, phi = theory.to_polar(z)
    direction = z / r[:, None]
    scale = 2 + direction @ mean  # the norm's law differs from direction to direction
    log_source, log_target = stats.expon(scale=scale).logpdf(r), stats.gamma(3, scale=0.7 * scale).logpdf(r)
    on_sphere = scipy_vmf(mean, 3.0).logpdf(direction)
    source, target = (on_sphere + log_norm - (n - 1) * np.log(r) for log_norm in (log_source, log_target))
    log_angles = on_sphere + theory.polar_log_determinant(np.ones(30), phi)  # the same law, per unit of phi
    for log_norm, expected in ((log_source, source), (log_target, target)):
        np.testing.assert_allclose(theory.cartesian_log_density(log_norm, log_angles, r, phi), expected, rtol=1e-10)
    np.testing.assert_allclose(target - source, log_target - log_source, rtol=1e-10)


# Density ratio, posterior, KL -----------------------------------------------------------------------------------------


def test_density_ratio() -> None:
    r, mu, delta = np.array([0.5, 3.0, 9.0]), 4.0, 10.0
    exact = stats.uniform(0, delta).pdf(r) / stats.expon(scale=mu).pdf(r)
    np.testing.assert_allclose(theory.density_ratio(r, mu, delta), exact, rtol=1e-12)
    small = np.array([1e-3, 1e-2, 1e-1])
    difference = theory.density_ratio(small, mu, delta) - theory.density_ratio(small, mu, delta, first_order=True)
    np.testing.assert_allclose(difference, small**2 / (2 * mu * delta), rtol=0.02)  # the second-order term


def test_target_posterior_is_bayes_rule() -> None:
    """With source densities vMF times exponential norms and the target norms uniform, all classes of equal range."""
    n, kappa, delta = 3, 4.0, 12.0
    means, mus, priors = unit(0, 4, n), np.array([1.0, 2.0, 3.0, 5.0]), np.array([0.1, 0.2, 0.3, 0.4])
    z = np.array([0.4, -1.0, 2.0])
    r = np.linalg.norm(z)
    # The source's densities, each times the ratio that turns its norms into the target's.
    joint = [
        prior * scipy_vmf(mean, kappa).pdf(z / r) * (stats.uniform(0, delta).pdf(r) / stats.expon(scale=mu).pdf(r))
        for mean, mu, prior in zip(means, mus, priors, strict=True)
    ]
    ratios = theory.density_ratio(r, mus, delta)
    posterior = theory.target_posterior(means @ (z / r), ratios, priors, kappa)
    np.testing.assert_allclose(posterior, np.array(joint) / sum(joint), rtol=1e-12)
    # A thousand times the concentration: no overflow, one class certain.
    assert theory.target_posterior(means @ (z / r), ratios, priors, 1e5).max() == pytest.approx(1)


@pytest.mark.parametrize(("mu_star", "mu"), [(410.0, 410.0), (3.0, 1.0), (3.0, 20.0)])
def test_exponential_kl(mu_star: float, mu: float) -> None:
    p, q = stats.expon(scale=mu_star), stats.expon(scale=mu)
    expected = integrate.quad(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), 0, 40 * mu_star, limit=200)[0]
    assert theory.exponential_kl(mu_star, mu) == pytest.approx(expected, abs=1e-8)
    assert theory.exponential_kl(mu_star, mu, first_order=True) >= theory.exponential_kl(mu_star, mu)


def test_exponential_kl_first_order_touches_at_mu_star() -> None:
    step = np.array([1e-4, -1e-4])
    exact, first = (theory.exponential_kl(5.0, 5 * (1 + step), first_order=order) for order in (False, True))
    np.testing.assert_allclose(exact, step**2 / 2, rtol=1e-3)  # log x + 1/x - 1 at x = 1 + step
    np.testing.assert_allclose(first, step**2, rtol=1e-3)  # x + 1/x - 2


# Theorem 3 and the gradient -------------------------------------------------------------------------------------------

COSINES, LABEL, M, KAPPA = np.array([0.3, -0.4, 0.55, 0.1]), 2, 0.4, 6.0


def test_theorem_3_by_numeric_optimisation() -> None:
    """The maximum over the simplex, found without knowing where it is, is the loss; its place is P*."""
    found = optimize.minimize(  # type: ignore[call-overload]
        lambda p: -theory.entropy_objective(p, COSINES, LABEL, M, KAPPA),
        np.ones(4) / 4,
        bounds=[(1e-9, 1)] * 4,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    assert found.success
    np.testing.assert_allclose(theory.entropy_maximizer(COSINES, LABEL, M, KAPPA), found.x, atol=1e-5)
    assert theory.loss(COSINES, LABEL, M, KAPPA) == pytest.approx(-found.fun, abs=1e-9)


def test_theorem_3_in_closed_form() -> None:
    a = [math.cos(math.acos(c) + M) if i == LABEL else c for i, c in enumerate(COSINES)]
    weights = [math.exp(KAPPA * x) for x in a]
    assert theory.loss(COSINES, LABEL, M, KAPPA) == pytest.approx(-math.log(weights[LABEL] / sum(weights)), rel=1e-12)
    best = theory.entropy_maximizer(COSINES, LABEL, M, KAPPA)
    np.testing.assert_allclose(best, np.array(weights) / sum(weights), rtol=1e-12)
    value = theory.entropy_objective(best, COSINES, LABEL, M, KAPPA)
    assert value == pytest.approx(theory.loss(COSINES, LABEL, M, KAPPA), rel=1e-12)
    # As printed, with cos(theta_y) in the y-th component, P* would not be the maximum.
    printed = np.exp(KAPPA * COSINES) / np.exp(KAPPA * COSINES).sum()
    assert theory.entropy_objective(printed, COSINES, LABEL, M, KAPPA) < value - 1e-3
    for p in np.random.default_rng(0).dirichlet(np.ones(4), 200):
        assert theory.entropy_objective(p, COSINES, LABEL, M, KAPPA) <= value
    assert theory.entropy_objective(np.eye(4)[LABEL], COSINES, LABEL, M, KAPPA) == 0  # a corner, 0 log 0 = 0


def test_theorem_3_is_about_the_trained_loss() -> None:
    logits = perturbed_logits(
        torch.tensor(COSINES[None]), torch.tensor([LABEL]), torch.tensor([M], dtype=torch.float64), KAPPA
    )
    trained = torch.nn.functional.cross_entropy(logits, torch.tensor([LABEL])).item()
    assert theory.loss(COSINES, LABEL, M, KAPPA) == pytest.approx(trained, rel=1e-12)


def test_gradient_with_respect_to_the_directions() -> None:
    rng = np.random.default_rng(0)
    z, w = rng.standard_normal(5) * 3, rng.standard_normal((5, 4))
    lengths = np.linalg.norm(w, axis=0)
    directions = w / lengths

    def loss(columns: torch.Tensor) -> torch.Tensor:
        cosines = torch.tensor(z / np.linalg.norm(z)) @ columns
        a = torch.where(torch.arange(4) == LABEL, torch.cos(torch.arccos(cosines) + M), cosines)
        return torch.nn.functional.cross_entropy((KAPPA * a)[None], torch.tensor([LABEL]))

    free = torch.tensor(directions, requires_grad=True)
    loss(free).backward()
    formula = theory.loss_gradient(z, directions, LABEL, M, KAPPA)
    assert free.grad is not None
    np.testing.assert_allclose(formula, free.grad.numpy(), rtol=1e-9)
    # Through the normalisation of W only the part orthogonal to w remains, over the column's length.
    raw = torch.tensor(w, requires_grad=True)
    loss(raw / raw.norm(dim=0)).backward()
    assert raw.grad is not None
    orthogonal = formula - directions * (directions * formula).sum(0)
    np.testing.assert_allclose(orthogonal / lengths, raw.grad.numpy(), rtol=1e-9, atol=1e-12)
