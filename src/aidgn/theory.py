"""The paper's theory in float64: von Mises-Fisher, polar coordinates, density ratio, posterior, KL, theorem 3.

Functions broadcast over leading axes; the last axis is features or classes.
"""

from typing import NamedTuple

import numpy as np
from numpy.polynomial import Polynomial
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln, ive, logsumexp, softmax, xlogy

Array = NDArray[np.float64]

# The von Mises-Fisher distribution on the unit sphere of R^n ----------------------------------------------------------


class VonMisesFisher(NamedTuple):
    """p(x) = kappa^(n/2-1) / ((2 pi)^(n/2) I_{n/2-1}(kappa)) exp(kappa mean_direction . x) for unit vectors x."""

    mean_direction: Array
    kappa: Array


def vmf_log_density(x: ArrayLike, mean_direction: ArrayLike, kappa: ArrayLike) -> Array:
    """Return log p of unit vectors x [..., n] per unit of surface area, for kappa [...] from 0 (uniform) and n >= 2."""
    x, mean_direction, kappa = floats(x), floats(mean_direction), floats(kappa)
    n = x.shape[-1]
    log_area = np.log(2) + n / 2 * np.log(np.pi) - gammaln(n / 2)
    log_density: Array = -log_area - log_bessel(n / 2 - 1, kappa) - kappa * (1 - (x * mean_direction).sum(-1))
    return log_density


def vmf_sample(mean_direction: ArrayLike, kappa: float, size: int, rng: np.random.Generator) -> Array:
    """Draw `size` unit vectors [size, n]; the cosine to the mean direction by rejection sampling (Wood 1994)."""
    mean_direction = floats(mean_direction)
    n = mean_direction.shape[-1]
    b = (n - 1) / (2 * kappa + np.hypot(2 * kappa, n - 1))
    x0 = (1 - b) / (1 + b)
    c = kappa * x0 + (n - 1) * np.log(4 * b / (1 + b) ** 2)
    cosine = np.empty(0)
    while cosine.size < size:
        z = rng.beta((n - 1) / 2, (n - 1) / 2, size)
        proposal = (1 - (1 + b) * z) / (1 - (1 - b) * z)
        accepted = kappa * proposal + (n - 1) * np.log(1 - x0 * proposal) - c >= np.log1p(-rng.random(size))
        cosine = np.concatenate([cosine, proposal[accepted]])
    cosine = cosine[:size, None]
    tangent = rng.standard_normal((size, n))
    tangent -= (tangent @ mean_direction)[:, None] * mean_direction
    tangent /= np.linalg.norm(tangent, axis=-1, keepdims=True)
    return cosine * mean_direction + np.sqrt(np.clip(1 - cosine**2, 0, None)) * tangent


def vmf_fit(x: ArrayLike) -> VonMisesFisher:
    """Fit by maximum likelihood to unit vectors x [..., samples, n]: A_n(kappa) equals the length of their mean.

    Few samples in many dimensions look more concentrated than they are: under the uniform distribution the mean of N
    samples still has a length of about N^(-1/2).
    """
    x = floats(x)
    mean = x.mean(-2)
    length = np.linalg.norm(mean, axis=-1)
    return VonMisesFisher(mean / np.where(length > 0, length, 1)[..., None], vmf_concentration(length, x.shape[-1]))


def vmf_mean_length(kappa: ArrayLike, n: int) -> Array:
    """Return A_n(kappa) = I_{n/2}(kappa) / I_{n/2-1}(kappa), the length of the mean of the distribution."""
    kappa = floats(kappa)
    return kappa / n * np.exp(log_bessel(n / 2, kappa) - log_bessel(n / 2 - 1, kappa))


def vmf_concentration(length: ArrayLike, n: int) -> Array:
    """Return the kappa with A_n(kappa) = length, for lengths from 0 to 1 (infinite at 1).

    Newton's method starts from the approximation kappa = R (n - R^2) / (1 - R^2) of Banerjee et al. 2005.
    """
    length = np.clip(floats(length), 0, 1)
    gap = 1 - length
    with np.errstate(divide="ignore"):
        kappa = np.asarray(length * (n - length**2) / (gap * (1 + length)))
    # At 0 and near 1 the start is exact to six digits or more, and rounding errors of A would be larger.
    refine = (length > 0) & (gap > 1e-6)
    target, root = np.asarray(length)[refine], kappa[refine]
    for _ in range(20):
        before = root
        a = vmf_mean_length(root, n)
        # dA/dkappa, whose terms cancel for large kappa
        slope = np.where(1 - a > 1e-4, 1 - a**2 - (n - 1) * a / root, 2 * (1 - a) ** 2 / (n - 1))
        root = root - (a - target) / slope
        if np.all(np.abs(root - before) <= 1e-12 * root):
            break
    kappa[refine] = root
    return kappa


def log_bessel(v: float, x: ArrayLike) -> Array:
    """Return log(Gamma(v+1) (2/x)^v exp(-x) I_v(x)) for v >= 0; 0 at x = 0, without under- or overflow.

    Order 50 and up: Debye's uniform expansion (Abramowitz and Stegun 9.7.7), divided by its value at x = 0.
    """
    x = floats(x)
    if v >= 50:
        hypotenuse = np.hypot(v, x)
        t = v / hypotenuse
        excess = x * (x / v) / (hypotenuse + v)  # sqrt(1 + (x/v)^2) - 1
        series = sum(u(t) / v**k for k, u in enumerate(DEBYE)) / sum(u(1.0) / v**k for k, u in enumerate(DEBYE))
        return -2 * v * x / (hypotenuse + v + x) - v * np.log1p(excess / 2) + 0.5 * np.log(t) + np.log(series)
    # Power series below 1, where ive underflows; Hankel's expansion above 1e8, where ive stops working.
    quarter, power = np.minimum(x, 1) ** 2 / 4, np.ones_like(x)
    for k in range(10, 0, -1):
        power = 1 + power * quarter / (k * (v + k))
    large = np.maximum(x, 1)
    hankel = (1 - (4 * v * v - 1) / (8 * large)) / np.sqrt(2 * np.pi * large)
    scaled = np.where(large < 1e8, ive(v, np.minimum(large, 1e8)), hankel)
    return np.where(x < 1, np.log(power) - x, np.log(scaled) + gammaln(v + 1) - v * np.log(large / 2))


def debye_polynomials(count: int) -> list[Polynomial]:
    """u_0 = 1, u_{k+1}(t) = t^2 (1 - t^2) u_k'(t) / 2 + integral_0^t (1 - 5 s^2) u_k(s) ds / 8."""
    u = [Polynomial([1.0])]
    while len(u) < count:
        u.append(Polynomial([0, 0, 0.5, 0, -0.5]) * u[-1].deriv() + (Polynomial([1, 0, -5]) * u[-1]).integ() / 8)
    return u


DEBYE = debye_polynomials(8)

# Polar coordinates and theorem 1 --------------------------------------------------------------------------------------


def to_polar(z: ArrayLike) -> tuple[Array, Array]:
    """Return (r [...], phi [..., n-1]): z_1 = r cos phi_1, z_2 = r sin phi_1 cos phi_2, ..., z_n = r sin phi_1 ..
    sin phi_{n-1}. All angles are in [0, pi] but the last, which is in [0, 2 pi)."""
    z = floats(z)
    tail = np.sqrt(np.cumsum(z[..., ::-1] ** 2, axis=-1))[..., ::-1]  # |(z_i .. z_n)|
    phi = np.arctan2(tail[..., 1:], z[..., :-1])
    phi[..., -1] = np.arctan2(z[..., -1], z[..., -2]) % (2 * np.pi)
    return tail[..., 0], phi


def from_polar(r: ArrayLike, phi: ArrayLike) -> Array:
    """Return z [..., n], the inverse of `to_polar`."""
    r, phi = floats(r), floats(phi)
    ones = np.ones_like(phi[..., :1])
    sines = np.cumprod(np.concatenate([ones, np.sin(phi)], axis=-1), axis=-1)
    z: Array = r[..., None] * sines * np.concatenate([np.cos(phi), ones], axis=-1)
    return z


def polar_log_determinant(r: ArrayLike, phi: ArrayLike) -> Array:
    """Return log |det dz / d(r, phi)| = (n-1) log r + sum_i (n-1-i) log sin phi_i."""
    r, phi = floats(r), floats(phi)
    power = np.arange(phi.shape[-1] - 1, -1, -1)
    log_determinant: Array = xlogy(phi.shape[-1], r) + xlogy(power, np.abs(np.sin(phi))).sum(-1)
    return log_determinant


def cartesian_log_density(
    log_norm_density: ArrayLike, log_angle_density: ArrayLike, r: ArrayLike, phi: ArrayLike
) -> Array:
    """Return log p(z) = log p(r|phi) + log p(phi) - log |det dz / d(r, phi)|.

    If p(phi) is the same in two domains, the ratio of their densities in z is the ratio of their p(r|phi) (theorem 1).
    """
    return floats(log_norm_density) + floats(log_angle_density) - polar_log_determinant(r, phi)


# The density ratio of norms, the posterior, the information lost ------------------------------------------------------


def density_ratio(r: ArrayLike, mu: ArrayLike, delta: ArrayLike, *, first_order: bool = False) -> Array:
    """Return w = p_target(r) / p_source(r) = mu exp(r/mu) / delta, or its first order (mu + r) / delta (corollary 1).

    The norm is uniform over a range of width delta on the target and exponential with mean mu on the source.
    """
    r, mu, delta = floats(r), floats(mu), floats(delta)
    return (mu + r if first_order else mu * np.exp(r / mu)) / delta


def target_posterior(cosines: ArrayLike, ratios: ArrayLike, priors: ArrayLike, kappa: float) -> Array:
    """Return p_target(y|z) = exp(kappa cos theta_y) w_y P(y) / sum_c exp(kappa cos theta_c) w_c P(c) (theorem 2)."""
    return softmax(kappa * floats(cosines) + np.log(floats(ratios)) + np.log(floats(priors)), axis=-1)


def exponential_kl(mu_star: ArrayLike, mu: ArrayLike, *, first_order: bool = False) -> Array:
    """Return KL(Exp(1/mu*) || Exp(1/mu)) = log(mu/mu*) + mu*/mu - 1, or its first order mu/mu* + mu*/mu - 2."""
    x = floats(mu) / floats(mu_star)
    return (x - 1 if first_order else np.log(x)) + 1 / x - 1


# The loss of one sample: theorem 3 and its gradient -------------------------------------------------------------------


def perturbed_cosines(cosines: ArrayLike, label: int, m: float) -> Array:
    """Return [cos theta_1 .. cos(theta_y + m) .. cos theta_C], for theta_y + m up to pi."""
    perturbed = floats(cosines).copy()
    perturbed[label] = np.cos(np.arccos(np.clip(perturbed[label], -1, 1)) + m)
    return perturbed


def loss(cosines: ArrayLike, label: int, m: float, kappa: float) -> float:
    """Return -log of the label's probability under softmax(kappa * perturbed cosines)."""
    a = perturbed_cosines(cosines, label, m)
    return float(logsumexp(kappa * (a - a[label])))


def entropy_objective(p: ArrayLike, cosines: ArrayLike, label: int, m: float, kappa: float) -> float:
    """Return kappa sum_c P_c (a_c - a_y) - sum_c P_c log P_c, where a are the perturbed cosines.

    The maximum over the simplex is the loss (theorem 3).
    """
    p, a = floats(p), perturbed_cosines(cosines, label, m)
    return float(kappa * (p * (a - a[label])).sum() - xlogy(p, p).sum())


def entropy_maximizer(cosines: ArrayLike, label: int, m: float, kappa: float) -> Array:
    """Return the maximizer P* of `entropy_objective`: softmax(kappa * perturbed cosines), the perturbed prediction."""
    return softmax(kappa * perturbed_cosines(cosines, label, m))


def loss_gradient(z: ArrayLike, directions: ArrayLike, label: int, m: float, kappa: float) -> Array:
    """Return d loss / d w_c for the unit columns w_c of `directions` [n, C], with m held fixed.

    With p = P*: kappa p_c z/|z| for c != y, and -kappa (1 - p_y) sin(theta_y + m) / sin(theta_y) z/|z| for y.
    """
    z = floats(z)
    unit = z / np.linalg.norm(z)
    cosines = unit @ floats(directions)
    factor = kappa * entropy_maximizer(cosines, label, m, kappa)
    theta = np.arccos(cosines[label])
    factor[label] = (factor[label] - kappa) * np.sin(theta + m) / np.sin(theta)
    return unit[:, None] * factor


def floats(x: ArrayLike) -> Array:
    return np.asarray(x, dtype=np.float64)
