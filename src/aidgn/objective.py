"""The AIDGN objective and its angular classifier in plain PyTorch, for any training loop.

Jin et al., Domain Generalization through the Lens of Angular Invariance, IJCAI 2022.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Norms and mean norms below this count as zero.
TINY = 1e-12
# Cosines are kept this far off +-1, where the derivative of the sine is infinite.
COSINE_GAP = 1e-7
# The released code clamps norms from below at this value and adds this angle (in radians) to every margin.
RELEASE_LEAST_NORM, RELEASE_OFFSET = 10.0, 0.4
VARIANTS = ("paper", "release", "release-paired")


class AIDGNLoss(NamedTuple):
    """The scalar terms of the loss: total = classification + regularizer, and the regularizer includes eta."""

    total: Tensor
    classification: Tensor
    regularizer: Tensor


class AngularClassifier(nn.Module):
    """Compute logits kappa * cos(theta_c), with theta_c the angle between z and column c of `weight` [n, C]; no bias.

    >>> classifier = AngularClassifier(in_features=512, num_classes=7)
    >>> classifier(torch.randn(4, 512)).shape
    torch.Size([4, 7])
    """

    def __init__(self, in_features: int, num_classes: int, kappa: float = 110.0):
        super().__init__()
        if in_features < 1 or num_classes < 1:
            raise ValueError(f"in_features and num_classes must be at least 1, got {in_features} and {num_classes}.")
        check_numbers(above_zero={"kappa": kappa})
        self.in_features, self.num_classes, self.kappa = in_features, num_classes, float(kappa)
        self.weight = nn.Parameter(torch.empty(in_features, num_classes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the columns from uniform(-1, 1) and normalise them."""
        with torch.no_grad():
            self.weight.uniform_(-1, 1)
            self.weight.copy_(normalized(self.weight, dim=0))

    def forward(self, z: Tensor) -> Tensor:
        z, weight = in_full_precision(z, self.weight)
        with no_autocast(z):
            return self.kappa * cosines(z, weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.num_classes}, kappa={self.kappa:g}"


def aidgn_loss(
    features: Tensor,
    labels: Tensor,
    domains: Tensor,
    weight: Tensor,
    *,
    kappa: float = 110.0,
    gamma: float = 1e-3,
    beta: float = 0.3,
    eta: float = 0.04,
    mu_star: float = 410.0,
    ratio: str = "linear",
    regularizer: str = "linear",
    variant: str = "paper",
    ratio_threshold: float = 1.0,
) -> AIDGNLoss:
    """mean_i CE(kappa [cos theta_1 .. cos(theta_y + m_i) .. cos theta_C], y_i) + eta mean_d (mu_d/mu* + mu*/mu_d),
    m_i = gamma (r_i + beta mu_d), r_i = |z_i|, mu_d the mean of r over domain d in the batch (the paper's appendix).

    The mean norm mu_d is a constant in the margin m and carries its gradient in the regulariser. Half precision is
    computed in float32. Nothing waits for the device.

    Args:
        features: z [B, n], the features of one batch, with samples of all domains in any order.
        labels: [B], the classes.
        domains: [B], the domain ids: any integers, any number of samples of each.
        weight: [n, C], one direction per class in the columns, not necessarily normalised.
        kappa: concentration, the factor on the cosines.
        gamma: factor on the margin (gamma / delta in the paper).
        beta: weight of mu_d in the margin; 0 is the ablation "without D".
        eta: weight of the regulariser; 0 is the ablation "without R".
        mu_star: the mean norm of the ideal domain.
        ratio: "linear", or "exact" for m = gamma beta mu_d exp(r / (beta mu_d)). The linear form is its first-order
            approximation. "exact" grows fast and exceeds pi at the defaults, where the margin is dropped, so it needs
            a smaller gamma.
        regularizer: "linear", or "exact" for KL(Exp(1/mu*) || Exp(1/mu_d)) = log(mu_d/mu*) + mu*/mu_d - 1.
        variant: "paper", or "release" for what the authors' published code trains: with rc = clamp(r, 10, mu*),
            m = gamma (rc - 10 + beta mu_d) + 0.4 and the regulariser eta mean_ij (rc_j / (h_i^2 mu*) + mu* / rc_j),
            where h = r / mu_d (a constant) if above `ratio_threshold`, else 1. That code divides tensors of shapes
            [B, 1] and [B], so every norm meets the h of every sample. "release-paired" gives each norm its own h:
            eta mean_i (rc_i / (h_i^2 mu*) + mu* / rc_i). Meant for mu* well above 10.
        ratio_threshold: see `variant`; not used by "paper".

    >>> features = torch.randn(6, 512, requires_grad=True)
    >>> labels, domains = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 0, 0, 0, 5, 5])
    >>> classifier = AngularClassifier(in_features=512, num_classes=3)
    >>> loss = aidgn_loss(features, labels, domains, classifier.weight)
    >>> loss.total.backward()
    >>> prediction = classifier(features).argmax(1)
    """
    check_words(
        ratio=(ratio, ("linear", "exact")),
        regularizer=(regularizer, ("linear", "exact")),
        variant=(variant, VARIANTS),
    )
    check_numbers(
        above_zero={"kappa": kappa, "mu_star": mu_star, "ratio_threshold": ratio_threshold},
        not_negative={"gamma": gamma, "beta": beta, "eta": eta},
    )
    if ratio == "exact" and beta == 0:
        raise ValueError("ratio='exact' divides by beta * mu_d and needs beta > 0; use ratio='linear' with beta=0.")
    check_tensors(features, labels, domains, weight)

    return loss_and_margins(
        features,
        labels,
        domains,
        weight,
        kappa,
        gamma,
        beta,
        eta,
        mu_star,
        ratio,
        regularizer,
        variant,
        ratio_threshold,
    )[0]


def loss_and_margins(
    features: Tensor,
    labels: Tensor,
    domains: Tensor,
    weight: Tensor,
    kappa: float,
    gamma: float,
    beta: float,
    eta: float,
    mu_star: float,
    ratio: str = "linear",
    regularizer: str = "linear",
    variant: str = "paper",
    ratio_threshold: float = 1.0,
    class_weights: Tensor | None = None,
) -> tuple[AIDGNLoss, Tensor, Tensor]:
    """Compute `aidgn_loss` without checking the arguments; also return the norms r_i and margins m_i for logging.

    With `class_weights` [C], the classification term is the mean of each sample's loss times the weight of its class.
    """
    z, weight = in_full_precision(features, weight)
    with no_autocast(z):
        r = torch.linalg.vector_norm(z, dim=1)
        mu_d, domain_weight = domain_means(r, domains)
        if variant == "paper":
            m = margin(r, mu_d.detach(), gamma, beta, ratio)
            penalty = (domain_weight * norm_regularizer(mu_d, mu_star, regularizer)).sum()
        else:
            norms = r.clamp(RELEASE_LEAST_NORM, mu_star)
            m = margin(norms - RELEASE_LEAST_NORM, mu_d.detach(), gamma, beta, ratio) + RELEASE_OFFSET
            h = (r / mu_d).detach()
            h = torch.where(h > ratio_threshold, h, torch.ones_like(h))
            if variant == "release":
                norms = norms.unsqueeze(1)  # [B, 1] with h [B]: all pairs, as in the released code
            penalty = norm_regularizer(norms, mu_star, regularizer, h).mean()
        logits = perturbed_logits(cosines(z, weight), labels.long(), m, kappa)
        if class_weights is None:
            classification = F.cross_entropy(logits, labels.long())
        else:
            classification = F.cross_entropy(logits, labels.long(), class_weights.to(z.dtype), reduction="none").mean()
        penalty = eta * penalty
        return AIDGNLoss(classification + penalty, classification, penalty), r.detach(), m.detach()


def margin(r: Tensor, mu_d: Tensor, gamma: float, beta: float, ratio: str = "linear") -> Tensor:
    """Return the margin gamma (r + beta mu_d), or gamma beta mu_d exp(r / (beta mu_d)) if ratio is "exact".

    They are the density ratio w of the norms, to first order and exactly (corollary 1).
    """
    if ratio == "linear":
        return gamma * (r + beta * mu_d)
    scale = (beta * mu_d).clamp_min(TINY)
    # Clamp before the exponential to avoid overflow: all margins above pi have the same effect.
    return ((gamma * scale).log() + r / scale).clamp(max=math.log(4)).exp()


def perturbed_logits(cosine: Tensor, labels: Tensor, m: Tensor, kappa: float) -> Tensor:
    """Return kappa [cos theta_1 .. cos(theta_y + m) .. cos theta_C]; keep cos theta_y if theta_y + m exceeds pi."""
    index = labels.unsqueeze(1)
    cosine_y = cosine.gather(1, index).squeeze(1)
    m = m.clamp(max=math.pi)
    c = cosine_y.clamp(-1 + COSINE_GAP, 1 - COSINE_GAP)
    perturbed = c * m.cos() - ((1 - c) * (1 + c)).sqrt() * m.sin()
    within = c >= -m.cos()  # theta_y <= pi - m
    return kappa * cosine.scatter(1, index, torch.where(within, perturbed, cosine_y).unsqueeze(1))


def norm_regularizer(mu: Tensor, mu_star: float, regularizer: str = "linear", h: Tensor | float = 1.0) -> Tensor:
    """Return mu / mu* + mu* / mu elementwise, or the KL divergence that it approximates if `regularizer` is "exact".

    KL(Exp(1/mu*) || Exp(1/mu)) = log(mu/mu*) + mu*/mu - 1; the linear form is its first order without the constant.
    The released code divides mu / mu* by h^2.
    """
    relative = mu / (h * h * mu_star)
    return (relative if regularizer == "linear" else relative.log() - 1) + mu_star / mu


def domain_means(r: Tensor, domains: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each sample, the mean of r over its domain, kept above zero, and its weight in a mean over domains.

    The weight is 1 / (samples of its domain * domains). All pairs of ids are compared, because `unique` would make the
    CPU wait for the GPU.
    """
    same = (domains.unsqueeze(1) == domains.unsqueeze(0)).to(r.dtype)
    share = 1 / same.sum(1)
    return ((same * r).sum(1) * share).clamp_min(TINY), share / share.sum()


def cosines(z: Tensor, weight: Tensor) -> Tensor:
    """Return cos theta_c = w_c . z / |w_c||z| for the columns w_c of `weight`."""
    return normalized(z, dim=-1) @ normalized(weight, dim=0)


def normalized(x: Tensor, dim: int) -> Tensor:
    """Return x / |x|. A zero vector stays zero, and its gradient has the size of the others'."""
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return x / torch.where(norm > TINY, norm, torch.ones_like(norm))


def in_full_precision(z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to float32, or to float64 if one of them is float64."""
    dtype = torch.float64 if torch.float64 in (z.dtype, weight.dtype) else torch.float32
    return z.to(dtype), weight.to(dtype)


def no_autocast(z: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of z."""
    device = z.device.type
    # torch.amp.is_autocast_available would break the compiled graph in PyTorch 2.6.
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


def check_words(**words: tuple[str, tuple[str, ...]]) -> None:
    for name, (word, known) in words.items():
        if word not in known:
            raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {word!r}.")


def check_numbers(above_zero: dict[str, float], not_negative: dict[str, float] | None = None) -> None:
    for name, number in above_zero.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be above 0, got {number}.")
    for name, number in (not_negative or {}).items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} must be 0 or above, got {number}.")


def check_tensors(features: Tensor, labels: Tensor, domains: Tensor, weight: Tensor) -> None:
    """Check shapes and types. Reading values would make the CPU wait for the GPU."""
    if features.ndim != 2 or features.shape[0] == 0 or not features.is_floating_point():
        raise ValueError(
            f"features must be floating point of shape [B, n] with B >= 1, "
            f"got {features.dtype} of shape {list(features.shape)}."
        )
    if weight.ndim != 2 or weight.shape[0] != features.shape[1] or not weight.is_floating_point():
        raise ValueError(
            f"weight must be floating point of shape [n, C] with n = {features.shape[1]} as in features, "
            f"got {weight.dtype} of shape {list(weight.shape)}."
        )
    for name, ids in (("labels", labels), ("domains", domains)):
        if ids.shape != features.shape[:1] or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(
                f"{name} must be integers of shape [{features.shape[0]}], one for each row of features, "
                f"got {ids.dtype} of shape {list(ids.shape)}."
            )


def class_vectors(classifier: nn.Module) -> Tensor | None:
    """Return the vectors of the classes [n, C] if the classifier is a single layer."""
    if isinstance(classifier, AngularClassifier):
        return classifier.weight.detach()
    return classifier.weight.detach().T if isinstance(classifier, nn.Linear) else None
