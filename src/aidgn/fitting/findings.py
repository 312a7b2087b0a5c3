"""Describe a folder of images and its problems before a model is trained on it."""

from pathlib import Path

import numpy as np

from aidgn.data import Dataset
from aidgn.data.cache import DecodedDataset
from aidgn.data.validate import Groups, Inspection, inspect_decoded
from aidgn.errors import AidgnError, plural, some
from aidgn.fitting.estimate import ACCURACY

FEW_IMAGES = 10  # a class with fewer images is hardly learnt
OTHER_SHARE = 5  # a class is reported if its share in one domain is so many times its share in another


def inspect(decoded: DecodedDataset) -> list[str]:
    """Describe a data set and its problems, a sentence each; the first sentence has the counts.

    Raises:
        AidgnError: A domain or a class has too few images to train on.
    """
    inspection = inspect_decoded(decoded)
    if inspection.refusals:
        raise AidgnError("\n".join(inspection.refusals))
    return [
        _describe_counts(inspection),
        *_describe_files(inspection),
        *_describe_missing_classes(inspection),
        *_describe_shares(inspection),
        *_describe_domains(decoded.dataset),
    ]


def _describe_counts(inspection: Inspection) -> str:
    dataset = inspection.dataset
    domains = [f"{name} {count}" for name, count in zip(dataset.domains, inspection.counts.sum(1), strict=True)]
    fewest = inspection.counts.sum(0).min()
    most = inspection.counts.sum(0).max()
    per_class = f"{fewest} to {most} images" if fewest < most else f"{fewest} images each"
    return (
        f"{dataset.name}: {len(dataset)} images, {plural(len(domains), 'domain')} ({some(domains, 6)}), "
        f"{len(dataset.classes)} classes of {per_class} ({some(dataset.classes, 6)})."
    )


def _describe_files(inspection: Inspection) -> list[str]:
    sentences = []
    if inspection.broken:
        reasons = (f"{file} {reason}".rstrip(". ") for file, reason in inspection.broken)
        sentences.append(
            f"{plural(len(inspection.broken), 'file')} left out, unreadable: {some(reasons, separator='; ')}."
        )
    if groups := inspection.across_domains:
        sentences.append(
            f"{plural(len(groups), 'image')} in several domains, which makes the estimate for an unseen domain too "
            f"high: {_list_copies(groups)}. Remove the copies."
        )
    if groups := inspection.across_classes:
        sentences.append(
            f"{plural(len(groups), 'image')} in several classes: {_list_copies(groups)}. Remove the wrong ones."
        )
    if groups := inspection.across_split:
        sentences.append(
            f"{plural(len(groups), 'image')} with a copy among the validation images, which makes the accuracy on seen "
            f"domains too high: {_list_copies(groups)}."
        )
    if ignored := inspection.dataset.ignored:
        sentences.append(f"{plural(len(ignored), 'other file')} ignored: {some(ignored)}.")
    return sentences


def describe_metric(dataset: Dataset, metric: str, tries_balance: bool) -> list[str]:
    """Say why the algorithm is not chosen by accuracy, if it is not.

    Args:
        dataset: The images that can be read.
        metric: The metric of the data set, a name of `CHOICES`.
        tries_balance: Whether `fit` also trains on balanced samples.
    """
    if metric == ACCURACY or len(dataset.domains) < 2:
        return []
    counts = dataset.count_images().sum(0)
    largest, smallest = int(counts.argmax()), int(counts.argmin())
    compared = ", with and without balanced samples" if tries_balance else ""
    return [
        f"Classes are uneven ({dataset.classes[largest]} {counts[largest]} images, {dataset.classes[smallest]} "
        f"{counts[smallest]}), so the algorithm and the step are chosen by {metric}, which counts every class "
        f"alike{compared}. --metric accuracy chooses by accuracy, as for even classes."
    ]


def _list_copies(groups: Groups) -> str:
    return some(some(group, 5, " = ") for group in groups)


def _describe_missing_classes(inspection: Inspection) -> list[str]:
    domains = np.array(inspection.dataset.domains)
    in_one, in_some, small = [], [], []
    for name, counts in zip(inspection.dataset.classes, inspection.counts.T, strict=True):
        if np.count_nonzero(counts) == 1 < len(domains):
            in_one.append(f"{name} (in {domains[counts.argmax()]})")
        elif not counts.all():
            in_some.append(f"{name} (not in {some(domains[counts == 0])})")
        if counts.sum() < FEW_IMAGES:
            small.append(f"{name} ({counts.sum()})")
    sentences = []
    if in_one:
        sentences.append(
            f"In one domain only: {some(in_one)}. While that domain is unseen, nothing teaches these classes, so all "
            "their images count as errors; and the final model may mistake the domain for the class."
        )
    if in_some:
        sentences.append(
            f"No images in some domains: {some(in_some)}. If that is intended, there is nothing to do: other domains "
            "teach these classes. The estimate for a domain leaves out the classes it lacks."
        )
    if small:
        sentences.append(f"Classes with fewer than {FEW_IMAGES} images are hardly learnt: {some(small)}.")
    return sentences


def _describe_shares(inspection: Inspection) -> list[str]:
    """Name the classes that are much more frequent in one domain than in another; totals do not show them."""
    domains = inspection.dataset.domains
    shares = inspection.counts / np.maximum(inspection.counts.sum(1, keepdims=True), 1)
    uneven = []
    for name, column, counts in zip(inspection.dataset.classes, shares.T, inspection.counts.T, strict=True):
        most, least = int(column.argmax()), int(column.argmin())
        if counts[most] >= FEW_IMAGES and 0 < OTHER_SHARE * column[least] <= column[most]:
            uneven.append(f"{name} ({column[most]:.0%} of {domains[most]}, {column[least]:.0%} of {domains[least]})")
    if not uneven:
        return []
    return [
        f"Shares of classes differ between domains: {some(uneven)}. A model may take the domain for a hint at the "
        "class. --balance sampling draws the classes of every domain equally often."
    ]


def _describe_domains(dataset: Dataset) -> list[str]:
    if len(dataset.domains) > 2:
        return []
    if len(dataset.domains) == 2:
        return [
            "Only two domains: each estimate comes from a model of a single domain. Three or more give a much better "
            "estimate."
        ]
    sentences = [
        "Only one domain: the accuracy on an unseen domain cannot be estimated. Give two or more, such as cameras, "
        "places or days."
    ]
    nested = next((file.split("/") for file in dataset.files if file.count("/") > 2), None)
    if nested:
        folder, domain, class_name, *_ = nested
        sentences.append(
            f"If {domain} is a domain and {class_name} a class, give {Path(dataset.root or '', folder)} instead."
        )
    return sentences
