"""Predict while adapting to the unlabelled images of a new site, if that helped at sites that were left out."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.adaptation.evaluate import BATCH_SIZE, adapt
from aidgn.adaptation.methods import METHODS
from aidgn.errors import AidgnError
from aidgn.inference.image_stream import ImageLike, OnBroken
from aidgn.inference.model import Model
from aidgn.inference.prediction import Outputs, Prediction, softmax
from aidgn.new_site.monitor import SiteMonitor

OFFERED = ("T3A", "Tent-C")  # methods that need only features and work with one picture at a time


def measure_adaptation(runs: Sequence[str | Path], **options: Any) -> dict[str, Any]:
    """Measure the offered methods at the site that each run left out.

    The settings of a method are those that most runs choose on validation images of the seen sites.

    Args:
        runs: Folders of runs with one unseen site each.
        options: Arguments of `adapt`.

    Returns:
        For each method, and for "none", the accuracy at each site and the settings.
    """
    accuracies: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    settings: dict[str, Counter[tuple[tuple[str, Any], ...]]] = defaultdict(Counter)
    for run in runs:
        for line in adapt(run, OFFERED, **options):
            if line["selected"] and line["method"] in ("none", *OFFERED):
                accuracies[line["method"]][line["target"][0]].append(line["target_accuracy"])
                settings[line["method"]][tuple(line["settings"].items())] += 1
    return {
        method: {
            "accuracies": {site: float(np.mean(values)) for site, values in by_site.items()},
            "settings": dict(settings[method].most_common(1)[0][0]),
        }
        for method, by_site in accuracies.items()
    }


def describe_adaptation(measured: Mapping[str, Any]) -> list[str]:
    """Describe the effect of each method at sites that were left out, a sentence each.

    Args:
        measured: The result of `measure_adaptation`; empty if nothing was measured.
    """
    sentences = []
    for method in OFFERED if measured else ():
        effect = compare_with_none(measured, method)
        verdict = f"`predict --adapt {method.lower()}` uses it." if effect.helped else "It is not offered."
        sentences.append(f"Adaptation to unlabelled pictures by {method}: {effect}. {verdict}")
    return sentences


@dataclass(frozen=True)
class Effect:
    """The effect of a method at the sites that were left out."""

    before: float  # mean accuracy without it
    after: float  # mean accuracy with it
    better: int  # number of sites with a higher accuracy
    worse: int  # number of sites with a lower accuracy
    sites: int

    @property
    def helped(self) -> bool:
        return self.after > self.before

    def __str__(self) -> str:
        return (
            f"{self.after:.1%} right with it, {self.before:.1%} without, on average over sites that were left out "
            f"(better at {self.better}, worse at {self.worse} of {self.sites})"
        )


def compare_with_none(measured: Mapping[str, Any], method: str) -> Effect:
    """Compare the accuracies with a method and without adaptation at the sites that were left out."""
    before, after = (measured[name]["accuracies"] for name in ("none", method))
    return Effect(
        float(np.mean(list(before.values()))),
        float(np.mean(list(after.values()))),
        sum(after[site] > accuracy for site, accuracy in before.items()),
        sum(after[site] < accuracy for site, accuracy in before.items()),
        len(before),
    )


def choose_settings(measured: Mapping[str, Any], method: str) -> tuple[dict[str, Any], str]:
    """Return the settings of a method, and a sentence on its effect at sites that were left out.

    Args:
        measured: The result of `measure_adaptation`; empty if nothing was measured.
        method: One of `OFFERED`.

    Raises:
        AidgnError: The method did not help there.
    """
    if method not in measured:
        return {}, (
            f"Warning: {method} was not measured at sites that were left out, so it may lower the accuracy. `aidgn fit "
            "--adapt` measures it."
        )
    effect = compare_with_none(measured, method)
    if not effect.helped:
        raise AidgnError(f"{method} is not offered for this model, because it did not help: {effect}.")
    return dict(measured[method]["settings"]), f"{method} helped: {effect}."


def predict_adapted(
    model: Model,
    method: str,
    settings: Mapping[str, Any],
    images: Iterable[ImageLike],
    on_broken: OnBroken | None = None,
    monitor: SiteMonitor | None = None,
) -> Iterator[tuple[list[ImageLike], Prediction]]:
    """Yield images and their predictions by a model that adapts to them, 32 images at a time.

    Adapted probabilities are not calibrated, so there is no chance that a label is right, and no warning of unsure
    labels.

    Args:
        model: The model, which is not changed.
        method: One of `OFFERED`.
        settings: Settings of the method.
        images: The images, in the order in which the model adapts.
        on_broken: Receives each image that cannot be read, and the error. By default the error is raised.
        monitor: Receives the predictions without adaptation, to compare the site with the training sites.
    """
    adapter: Any = METHODS[method].adapter(model.network, **settings)
    for names, outputs in model.compute_batches(images, on_broken):
        for start in range(0, len(names), BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            batch = Outputs(*(tensor[part] for tensor in outputs))
            prediction = model.prediction(batch)
            if monitor is not None and prediction.chances is not None:
                monitor.add(prediction.features.numpy(), prediction.logits.numpy(), prediction.chances)
            logits = adapter.predict_features(prediction.features.to(model.device)).float().cpu()
            probabilities = softmax(logits.numpy())
            labels = [model.classes[c] for c in probabilities.argmax(1)]
            yield (
                names[part],
                replace(
                    prediction,
                    labels=labels,
                    probabilities=probabilities,
                    logits=logits,
                    warnings=model.unfamiliar(batch),
                    chances=None,
                ),
            )
