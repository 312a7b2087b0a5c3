"""How far to trust a prediction at a site the model never saw: the chance that its label is right.

The chance comes from the score of `aidgn.trust` that best ranks right predictions above wrong ones on left-out sites.
The highest calibrated probability is a chance already. The scale of another score s differs from model to model, so s
is first standardised by validation images of the sites that the model has seen. Logistic regression on left-out sites,
all with the same weight, then gives chance = sigmoid(slope (s - mean) / deviation + intercept).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import mannwhitneyu

from aidgn.new_site.calibration import Predicted, choose_temperature
from aidgn.trust import logit_scores

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]

DISTANCE = "distance"

# From the simplest to the least simple. The last one needs a sample of training features with the model.
CANDIDATES = ("probability", "margin", "energy", "norm", "negative-aware norm", "angle", DISTANCE)
TIE = 0.02  # of the area under the ROC curve; among scores closer than this, the simplest is chosen
UNSURE = 0.5  # a prediction that is more likely wrong than right gets a warning
RIDGE = 1e-4  # keeps the slope finite where a score separates right from wrong without error


@dataclass(frozen=True, eq=False)
class Outputs:
    """Predictions for N images."""

    logits: Floats  # [N, C]
    labels: Integers  # right class of each image [N]
    scores: dict[str, Floats]  # scores of trust that do not depend on the logits, by name, each [N]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each prediction is right [N]."""
        return self.logits.argmax(1) == self.labels

    def score(self, name: str, temperature: float) -> Floats:
        """Return a score of `aidgn.trust.SCORES`; a higher one means more trust."""
        return self.scores[name] if name in self.scores else logit_scores(self.logits, temperature)[name]


@dataclass(frozen=True, eq=False)
class UnseenSite:
    """Predictions of a run that left out one site."""

    site: str  # name of the site
    trial: int  # seed of the run
    unseen: Outputs  # predictions for the site
    seen: Outputs  # predictions for validation images of the other sites


@dataclass(frozen=True)
class Confidence:
    """A model's probabilities at a new site, and the chance that a label is right."""

    temperature: float  # divides the logits
    score: str = "probability"  # name of the score in `aidgn.trust.SCORES`
    slope: float = 0.0  # slope of the logistic regression; 0 for the probability, which needs none
    intercept: float = 0.0
    mean: float = 0.0  # mean of the score over validation images of the sites that the model has seen
    deviation: float = 1.0  # standard deviation of the score over the same images

    def chances(self, scores: Floats) -> Floats:
        """Return the chance that each label is right, given the scores of the pictures."""
        if self.score == "probability":
            return np.exp(scores.astype(np.float64))
        return expit(self.slope * (scores.astype(np.float64) - self.mean) / self.deviation + self.intercept)

    def of(self, outputs: Outputs) -> Floats:
        """Return the chance that each of these predictions is right."""
        return self.chances(outputs.score(self.score, self.temperature))

    def for_model(self, seen: Outputs) -> "Confidence":
        """Return the confidence of another model, given its predictions for validation images of sites it has seen."""
        if self.score == "probability":
            return self
        mean, deviation = describe_scale(seen.score(self.score, self.temperature))
        return Confidence(self.temperature, self.score, self.slope, self.intercept, mean, deviation)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_confidence(sites: Sequence[UnseenSite]) -> Confidence:
    """Fit the temperature, choose the score and fit its chances, all on left-out sites."""
    by_site: dict[str, list[Predicted]] = {}
    for site in sites:
        by_site.setdefault(site.site, []).append((site.unseen.logits, site.unseen.labels))
    temperature = choose_temperature(by_site)
    areas = {name: rank_errors(sites, name, temperature) for name in candidates(sites)}
    best = max(areas.values())
    score = next(name for name, area in areas.items() if area >= best - TIE)
    if score == "probability":
        return Confidence(temperature)
    standard, right = [], []
    for site in sites:
        mean, deviation = describe_scale(site.seen.score(score, temperature))
        standard.append((site.unseen.score(score, temperature) - mean) / deviation)
        right.append(site.unseen.right)
    slope, intercept = fit_logistic(standard, right)
    return Confidence(temperature, score, slope, intercept)


def candidates(sites: Sequence[UnseenSite]) -> list[str]:
    """Return the names of the scores that all predictions have."""
    from_logits = ("probability", "margin", "energy")
    return [name for name in CANDIDATES if name in from_logits or all(name in site.unseen.scores for site in sites)]


def rank_errors(sites: Sequence[UnseenSite], score: str, temperature: float) -> float:
    """Return the mean over sites of `area`; 0.5 if no site has both right and wrong predictions."""
    areas = [area(site.unseen.score(score, temperature), site.unseen.right) for site in sites]
    known = [value for value in areas if value is not None]
    return float(np.mean(known)) if known else 0.5


def area(scores: Floats, right: NDArray[np.bool_]) -> float | None:
    """Return the area under the ROC curve: the chance that a right prediction scores higher than a wrong one.

    None without a right or without a wrong prediction.
    """
    if right.all() or not right.any():
        return None
    wins = mannwhitneyu(scores[right], scores[~right], method="asymptotic").statistic
    return float(wins / (right.sum() * (~right).sum()))


def describe_scale(scores: Floats) -> tuple[float, float]:
    """Return mean and standard deviation."""
    return float(scores.mean()), max(float(scores.std()), 1e-9)


def fit_logistic(values: Sequence[Floats], right: Sequence[NDArray[np.bool_]]) -> tuple[float, float]:
    """Fit slope and intercept of P(right) = sigmoid(slope x + intercept); every site has the same weight."""
    from sklearn.linear_model import LogisticRegression  # takes a while to import

    weights = np.concatenate([np.full(len(x), 1 / len(x) / len(values)) for x in values])
    x, y = np.concatenate(list(values)).astype(np.float64), np.concatenate(list(right))
    fitted = LogisticRegression(C=1 / (2 * RIDGE), tol=1e-8).fit(x[:, None], y, sample_weight=weights)
    return float(fitted.coef_[0, 0]), float(fitted.intercept_[0])


def surest_accuracy(trust: Floats, right: NDArray[np.bool_], share: float) -> float:
    """Return the accuracy on the share of pictures with the highest trust, averaged over orders of equal trust."""
    kept = max(1, round(share * len(trust)))
    border = np.sort(trust)[::-1][kept - 1]
    above, at = trust > border, trust == border
    return float((right[above].sum() + right[at].mean() * (kept - above.sum())) / kept)
