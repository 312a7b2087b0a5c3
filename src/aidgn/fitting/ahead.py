"""Compute parts of the report from frozen features, on one core while another trains classifiers on them."""

import threading
from collections.abc import Sequence
from contextlib import suppress

from aidgn.analysis.embedding import choose_images, tsne
from aidgn.analysis.near_copies import NearCopy, find_near_copies
from aidgn.training.frozen import FeatureStore
from aidgn.training.setup import latest_features


class ReportAhead(threading.Thread):
    """A thread that finds copies and computes the map of points, which `tsne` keeps.

    If a part fails, the main thread computes it again and reports the error.
    """

    def __init__(self, features: FeatureStore, points: int):
        super().__init__(daemon=True)
        self.features = features
        self.points = points
        self.copies: Sequence[NearCopy] | None = None

    def run(self) -> None:
        decoded = self.features.decoded
        rows = self.features.rows[0]
        with suppress(Exception):
            self.copies = find_near_copies(decoded, self.features.features[rows])
        if self.points:
            shown = choose_images(decoded.dataset.domain_of, decoded.dataset.labels, self.points)
            with suppress(Exception):
                tsne(self.features.features[rows[shown]])

    @classmethod
    def begin(cls, points: int) -> "ReportAhead | None":
        """Start the thread if this process has features of a frozen network in memory."""
        features = latest_features()
        if features is None:
            return None
        ahead = cls(features, points)
        ahead.start()
        return ahead
