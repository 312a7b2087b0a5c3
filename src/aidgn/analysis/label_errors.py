"""Find pictures whose label looks wrong, by predictions of networks that never saw their site.

Confident learning (Northcutt, Jiang & Chuang, "Confident learning: estimating uncertainty in dataset labels", JAIR
2021) with the sites as folds. The threshold of a class is the mean probability of the class over the pictures that
have its label. A label is doubtful if another class reaches its threshold and is the most probable of those that do.
Doubtful labels are ranked by the difference between both probabilities.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aidgn.analysis.predictions import Predictions
from aidgn.new_site.calibration import choose_temperature, log_probabilities


@dataclass(frozen=True)
class DoubtfulLabel:
    """A picture whose label looks wrong."""

    file: str  # its path relative to the data set's folder
    site: str
    label: str  # class by its label
    suggestion: str  # class that it looks like
    label_probability: float  # calibrated probability of the label
    suggestion_probability: float  # calibrated probability of the suggestion


@dataclass(frozen=True, eq=False)
class OutOfSite:
    """The calibrated probabilities of pictures by networks that never saw their site, means over trials."""

    files: list[str]  # paths relative to the data set's folder
    sites: np.ndarray  # site of each picture, index into `site_names`
    labels: np.ndarray  # class of each picture as labelled, index into `class_names`
    probabilities: np.ndarray  # [N, C]
    site_names: list[str]  # names of the sites
    class_names: list[str]  # names of the classes

    @property
    def header(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["file", "site", "label", "predicted", "confidence", *(f"p_{name}" for name in self.class_names)]

    def rows(self) -> Iterator[list[Any]]:
        """Yield a row for each picture: file, site, label, predicted class, its probability, all probabilities."""
        for file, site, label, values in zip(self.files, self.sites, self.labels, self.probabilities, strict=True):
            best = int(values.argmax())
            shown = [round(value, 6) for value in values.tolist()]
            yield [file, self.site_names[site], self.class_names[label], self.class_names[best], shown[best], *shown]


def pool_out_of_site(runs: Sequence[Predictions]) -> OutOfSite:
    """Average the predictions for the pictures of unseen sites over trials.

    Args:
        runs: Predictions of runs on the same pictures, each with one site unseen; at least one.
    """
    unseen = [run.out_of_site for run in runs]
    by_site: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for run in unseen:
        by_site.setdefault(run.targets[0], []).append((run.logits, run.labels))
    temperature = choose_temperature(by_site)
    numbers: dict[str, int] = {}
    for run in unseen:
        for file in run.files:
            numbers.setdefault(file, len(numbers))
    classes = unseen[0].class_names
    sums = np.zeros((len(numbers), len(classes)))
    labels, sites, trials = (np.zeros(len(numbers), np.int64) for _ in range(3))
    for run in unseen:
        places = [numbers[file] for file in run.files]
        sums[places] += np.exp(log_probabilities(run.logits, temperature))
        trials[places] += 1
        labels[places] = run.labels
        sites[places] = run.domains
    return OutOfSite(list(numbers), sites, labels, sums / trials[:, None], unseen[0].domain_names, classes)


def find_doubtful_labels(pictures: OutOfSite) -> list[DoubtfulLabel]:
    """Find the pictures whose label looks wrong, the most doubtful first."""
    probabilities, labels, classes = pictures.probabilities, pictures.labels, pictures.class_names
    suggestions = suggest(probabilities, labels)
    labelled = np.take_along_axis(probabilities, labels[:, None], 1)[:, 0]
    suggested = np.take_along_axis(probabilities, suggestions[:, None], 1)[:, 0]
    doubtful = np.flatnonzero(suggestions != labels)
    return [
        DoubtfulLabel(
            pictures.files[i],
            pictures.site_names[pictures.sites[i]],
            classes[labels[i]],
            classes[suggestions[i]],
            float(labelled[i]),
            float(suggested[i]),
        )
        for i in doubtful[np.lexsort((labelled[doubtful], labelled[doubtful] - suggested[doubtful]))]
    ]


def suggest(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the class that each picture looks like; its label if no class reaches its threshold.

    Args:
        probabilities: [N, C].
        labels: Class of each picture as labelled [N].
    """
    classes = probabilities.shape[1]
    thresholds = np.array(
        [probabilities[labels == c, c].mean() if (labels == c).any() else np.inf for c in range(classes)]
    )
    reached = np.where(probabilities >= thresholds, probabilities, -1)
    return np.where(reached.max(axis=1) >= 0, reached.argmax(axis=1), labels)
