"""The first section of fit's report: what to expect at a new site, and which pictures to look at."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from aidgn.analysis.label_errors import DoubtfulLabel
from aidgn.analysis.near_copies import NearCopy
from aidgn.analysis.predictions import Predictions
from aidgn.data import Dataset
from aidgn.data.images import read_image
from aidgn.metrics import ClassMetrics, count_confusions, list_mistakes, measure_classes
from aidgn.new_site.expectations import Expectations
from aidgn.new_site.interval import SiteAccuracies

SHOWN_LABELS = 24
SHOWN_COPIES = 12
SHOWN_CONFUSIONS = 12
SIDE = 112  # pixels of a thumbnail


@dataclass(frozen=True)
class Overview:
    """The content of the first section of a fit's page."""

    dataset: Dataset  # the pictures
    sentences: Sequence[str]  # what to expect, a sentence each
    next_steps: Sequence[str]  # what to do next, a sentence each
    expectations: Expectations | None = None  # what to expect at a new site; None with fewer than two sites
    predictions: Sequence[Predictions] = ()  # predictions of runs with one site unseen
    doubtful: Sequence[DoubtfulLabel] = ()  # pictures whose label looks wrong
    copies: Sequence[NearCopy] = ()  # copies across sites
    # Heatmaps of doubtful pictures for the suggested class, by file
    heatmaps: Mapping[str, Image.Image] = field(default_factory=dict)
    findings: Sequence[str] = ()  # facts about the pictures, a sentence each
    # The pictures that are shown as data: URIs, by file; from `load_thumbnails`
    thumbnails: dict[str, str] = field(default_factory=dict)
    heat: dict[str, str] = field(default_factory=dict)  # the same for heatmaps

    @property
    def shown_labels(self) -> Sequence[DoubtfulLabel]:
        return self.doubtful[:SHOWN_LABELS]

    @property
    def shown_copies(self) -> Sequence[NearCopy]:
        return self.copies[:SHOWN_COPIES]

    @property
    def classes(self) -> list[tuple[str, SiteAccuracies]]:
        """The classes that have pictures at unseen sites with their accuracies, the weakest first."""
        if self.expectations is None:
            return []
        known = [entry for entry in self.expectations.classes.items() if entry[1].accuracies]
        return sorted(known, key=lambda entry: entry[1].mean)

    @property
    def confusion(self) -> np.ndarray:
        """Pictures of unseen sites by class and predicted class, all sites together, int64 [C, C].

        Only the first trial counts, and only the pictures that the accuracies count.
        """
        size = len(self.dataset.classes)
        counts = np.zeros((size, size), np.int64)
        for run in self.predictions:
            if run.trial == min(other.trial for other in self.predictions):
                unseen = run.where(run.unseen & ~run.validation)
                counts += count_confusions(unseen.labels, unseen.predicted, size)
        return counts

    @property
    def class_metrics(self) -> dict[str, ClassMetrics]:
        """Metrics by class on the pictures of `confusion`."""
        return dict(zip(self.dataset.classes, measure_classes(self.confusion), strict=True))

    @property
    def mistakes(self) -> list[tuple[str, str, int, int]]:
        """The most frequent confusions: true class, predicted class, such pictures, pictures of the true class."""
        names = self.dataset.classes
        mistakes = list_mistakes(self.confusion, SHOWN_CONFUSIONS)
        return [(names[i], names[j], wrong, total) for i, j, wrong, total in mistakes]

    def load_thumbnails(self) -> None:
        """Read the pictures that the page shows."""
        files = [doubt.file for doubt in self.shown_labels]
        files += [file for copy in self.shown_copies for file in (copy.first, copy.second)]
        numbers = {name: number for number, name in enumerate(self.dataset.files)}
        self.thumbnails.update(
            {file: encode(read_picture(self.dataset, numbers[file], SIDE)) for file in dict.fromkeys(files)}
        )
        self.heat.update({file: encode(image) for file, image in self.heatmaps.items()})


def shade_rows(confusion: np.ndarray) -> list[list[tuple[int, int]]]:
    """Return for each cell of a confusion matrix the number of pictures and their share of the row in percent."""
    totals = confusion.sum(axis=1).tolist()
    return [
        [(count, round(100 * count / max(total, 1))) for count in row]
        for row, total in zip(confusion.tolist(), totals, strict=True)
    ]


def read_picture(dataset: Dataset, number: int, at_least: int) -> Image.Image:
    """Read a picture of a data set; a large file may be decoded smaller, with sides of at least `at_least` pixels."""
    if dataset.pixels is not None:
        return Image.fromarray(dataset.pixels[number])
    image, _ = read_image(Path(str(dataset.root), dataset.files[number]), at_least=at_least)
    return image


def encode(image: Image.Image) -> str:
    """Return a small picture as a data: URI; nothing is enlarged or cut."""
    image.thumbnail((SIDE, SIDE))
    return to_uri(image, 80)


def to_uri(image: Image.Image, quality: int) -> str:
    """Return an image as a data: URI."""
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
