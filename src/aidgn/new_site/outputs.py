"""What a run predicts for a site that it never saw, and for validation images of the sites that it was trained on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aidgn.trust import logit_scores

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Outputs:
    """Predictions for N images.

    Args:
        logits: [N, C].
        labels: Right class of each image [N].
        scores: Scores of trust that do not depend on the logits, by name, each [N].
    """

    logits: Floats
    labels: Integers
    scores: dict[str, Floats]

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
    """Predictions of a run that left out one site.

    Args:
        site: Name of the site.
        trial: Seed of the run.
        unseen: Predictions for the site.
        seen: Predictions for validation images of the other sites.
    """

    site: str
    trial: int
    unseen: Outputs
    seen: Outputs
