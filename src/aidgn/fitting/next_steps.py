"""Advise a practitioner how to get a better model, or a better estimate, after a fit."""

import numpy as np

from aidgn.data import Dataset
from aidgn.errors import plural
from aidgn.fitting.estimate import ACCURACY
from aidgn.fitting.pictures import DoubtfulPictures
from aidgn.new_site.expectations import Expectations
from aidgn.new_site.interval import percent

MANY_SITES = 8  # from here on, more sites narrow the interval little
UNEVEN = 3  # classes are uneven if the largest has so many times the pictures of the smallest


def advise(
    dataset: Dataset, expectations: Expectations | None, pictures: DoubtfulPictures, metric: str, model: str
) -> list[str]:
    """List what to do next, the most useful first.

    Args:
        dataset: The pictures that could be read.
        expectations: What to expect at a new site.
        pictures: Pictures to look at.
        metric: The metric that chose the algorithm, a name of `CHOICES`.
        model: Folder of the model, for commands.
    """
    steps = []
    if pictures.copies:
        steps.append(
            f"Remove the copies ({plural(len(pictures.copies), 'pair')}) and run the same command again: the estimate "
            "is too high with them."
        )
    if pictures.labels:
        steps.append(
            "Look at the first doubtful pictures below. Where the label is wrong, correct it; then run the same "
            "command again."
        )
    if expectations:
        steps += _advise_by_results(expectations)
    counts = dataset.count_images().sum(0)
    if counts.max() >= UNEVEN * counts.min():
        rarest = dataset.classes[int(counts.argmin())]
        other = ", or choose by --metric macro-f1, which tries balanced samples" if metric == ACCURACY else ""
        steps.append(
            f"Classes are uneven: {rarest} has {plural(int(counts.min()), 'picture')}, "
            f"{dataset.classes[int(counts.argmax())]} {counts.max()}. If the rare ones suffer (the accuracy "
            f"by class shows it), add pictures of them{other}."
        )
    steps.append(f"At a new site, label some pictures and check: aidgn evaluate {model} NEW_SITE/")
    return steps


def _advise_by_results(expectations: Expectations) -> list[str]:
    steps = []
    accuracies = expectations.accuracies.accuracies
    sites = len(accuracies)
    if sites < MANY_SITES:
        more = expectations.accuracies.interval(more_sites=3)
        effect = ""
        if more:
            effect = f": three more would give between {more}, if they are like these"
            effect += ", which differ much" if more.is_wide else ""
        steps.append(f"Add pictures of more sites{effect}. So few as {sites} say little about the next one.")
    means = {name: float(np.mean(values)) for name, values in accuracies.items()}
    worst = min(means, key=means.__getitem__)
    others = float(np.mean([value for name, value in means.items() if name != worst]))
    if others - means[worst] > 0.1:
        steps.append(
            f"Look at the pictures of {worst}: {percent(means[worst])} right while it was unseen, {percent(others)} at "
            "the others. Sites like it are where the model fails."
        )
    classes = {name: measured.mean for name, measured in expectations.classes.items() if measured.accuracies}
    weakest = min(classes, key=classes.__getitem__)
    if expectations.accuracies.mean - classes[weakest] > 0.1:
        steps.append(
            f"Add pictures of {weakest} from several sites: {percent(classes[weakest])} of them are right at unseen "
            "sites, the fewest of all classes."
        )
    return steps
