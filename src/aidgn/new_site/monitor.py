"""Watch the pictures of a new site: compare them with the training sites and predict the accuracy."""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aidgn.new_site.expectations import Expectations
from aidgn.new_site.interval import percent
from aidgn.new_site.shift import FALSE_ALARM_RATE, MIN_NEW, SiteComparison

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class SiteReport:
    """Results from the unlabelled pictures of a new site."""

    pictures: int  # number of pictures
    comparison: SiteComparison | None  # comparison with the training sites; None for too few pictures
    mean_chance: float  # mean chance that a label is right
    predicted: float  # accuracy that is predicted without labels
    method: str  # method of the prediction, a key of `aidgn.new_site.expectations.METHODS`
    error: float  # mean absolute error of such predictions for the sites that were left out
    promised: float  # mean accuracy at the sites that were left out

    @property
    def alarm(self) -> bool:
        """Whether the site differs from the training sites more than they differ from each other."""
        return self.comparison is not None and self.comparison.alarm

    def __str__(self) -> str:
        expected = (
            f"about {percent(self.predicted)} right by {self.method}, which was off by {100 * self.error:.0f} points "
            "on average at sites that were left out"
        )
        less = f"less than the promised {percent(self.promised)}:" if self.predicted < self.promised else "less than"
        result = self.comparison
        if result is None:
            return f"Too few pictures to compare with the training sites: {self.pictures}, and {MIN_NEW} are needed."
        if not result.differs:
            return (
                f"These pictures look like those of the training sites (p = {result.p_value:.2g}): expect {expected}."
            )
        if result.ratio is None:
            return (
                f"These pictures differ from those of the training sites (p = {result.p_value:.2g}); how far is "
                f"unknown, because no site was left out: {expected}."
            )
        if self.alarm:
            return (
                "Site alarm: this site differs from your sites more than they differ from each other "
                f"({result.ratio:.1f} times their mean distance, at most {result.farthest:.1f} among them; the nearest "
                f"is {result.nearest}; one like them would by chance in one of {result.left_out + 1} cases). Expect "
                f"{less} {expected}."
            )
        if result.other_classes:
            return (
                f"These pictures differ from those of the training sites (p = {result.p_value:.2g}), because they show "
                "other classes, or in other shares. Compared with training pictures of the same classes they differ no "
                f"more than the sites from each other ({result.matched:.1f} times their mean distance, up to "
                f"{result.farthest:.1f} among them): expect {expected}."
            )
        return (
            f"These pictures differ from those of the training sites (p = {result.p_value:.2g}), no more than the "
            f"sites differ from each other ({result.ratio:.1f} times their mean distance, up to {result.farthest:.1f} "
            f"among them): expect {expected}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            **asdict(self),
            "alarm": self.alarm,
            "differs": self.comparison is not None and self.comparison.differs,
            "false_alarm_rate": FALSE_ALARM_RATE,
            "text": str(self),
        }


class SiteMonitor:
    """Collect the pictures of a new site.

    Args:
        expectations: Expectations of the model.
        vectors: Class vectors of the classifier [n, C], if it has them.
        most: Number of pictures to remember, the latest; by default all.
    """

    def __init__(self, expectations: Expectations, vectors: Floats | None, most: int | None = None):
        self.expectations = expectations
        self.vectors = vectors
        self._pictures: deque[tuple[Floats | None, int, float]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._pictures)

    def add(self, features: Floats, logits: Floats, chances: Floats) -> None:
        """Add pictures.

        Args:
            features: [N, n].
            logits: [N, C].
            chances: Chance that each label is right [N].
        """
        reference = self.expectations.reference
        described = None if reference is None else reference.space.describe(features, logits, self.vectors)
        for number, (label, chance) in enumerate(zip(logits.argmax(axis=1).tolist(), chances.tolist(), strict=True)):
            self._pictures.append((None if described is None else described[number], label, chance))

    def report(self) -> SiteReport | None:
        """Return the results for the pictures so far; None without pictures."""
        pictures = list(self._pictures)  # a copy, because a server adds others meanwhile
        if not pictures:
            return None
        reference = self.expectations.reference
        comparison = None
        if reference is not None:
            described = np.stack([row for row, _, _ in pictures if row is not None])
            comparison = reference.compare(described, np.array([label for _, label, _ in pictures]))
        mean_chance = float(np.mean([chance for _, _, chance in pictures]))
        method = self.expectations.method
        return SiteReport(
            len(pictures),
            comparison,
            mean_chance,
            self.expectations.predict_accuracy(mean_chance),
            method,
            self.expectations.error(method),
            self.expectations.accuracies.mean,
        )
