"""From a folder of pictures to a model and what to expect of it: look the folder through, leave each domain out in
turn, train on all, say it all in ten lines."""

import json
import logging
import math
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from aidgn import backbones
from aidgn.algorithms import find
from aidgn.algorithms.custom import is_custom
from aidgn.data import DATASETS, Dataset
from aidgn.data.cache import DecodedDataset
from aidgn.data.images import longest_side
from aidgn.data.registry import SMALL_SIDE
from aidgn.data.validate import inspect_decoded
from aidgn.errors import AidgnError, plural, some
from aidgn.escape import for_markdown
from aidgn.files import atomic_write, write_text
from aidgn.runs.differences import differences
from aidgn.runs.folder import RunFolder
from aidgn.runs.options import LAST_STAGE
from aidgn.runs.spec import RunSpec
from aidgn.selection import read_runs, select
from aidgn.training.averaging import SMA
from aidgn.training.featurizer import choose_device

log = logging.getLogger("aidgn")

BASELINE = "ERM"
ON_CPU = "resnet18.tv_in1k"  # a fifth of the work of ResNet-50
SAMPLE = 200  # images whose headers tell how large they are
FEW = 10  # images of a class, below which it can hardly be learnt
LEAST = 5  # images of a domain, for a fifth of them is set aside


# The folder -----------------------------------------------------------------------------------------------------------


def survey(prepared: DecodedDataset) -> list[str]:
    """What the data set holds and what is wrong with it, one sentence each; the first one counts."""
    dataset, inspection = prepared.dataset, inspect_decoded(prepared)
    counts = inspection.counts
    for domain, total in zip(dataset.domains, counts.sum(1).tolist(), strict=True):
        if total < LEAST:
            raise AidgnError(
                f"The domain {domain} has {total} images that can be read; at least {LEAST} are needed, as "
                "a fifth is set aside for validation. Add some, or move the folder away."
            )
    for name, total in zip(dataset.classes, counts.sum(0).tolist(), strict=True):
        if not total:
            raise AidgnError(f"The class {name} has no image that can be read: mend its files, or remove its folders.")
    few, many = int(counts.sum(0).min()), int(counts.sum(0).max())
    told = [
        f"{dataset.name}: {len(dataset)} images, {plural(len(dataset.domains), 'domain')} "
        f"({some((f'{name} {n}' for name, n in zip(dataset.domains, counts.sum(1), strict=True)), 6)}), "
        f"{len(dataset.classes)} classes of {f'{few} to {many} images' if few < many else f'{few} images each'} "
        f"({some(dataset.classes, 6)})."
    ]
    if inspection.broken:
        reasons = (f"{file} {reason}".rstrip(". ") for file, reason in inspection.broken)
        told.append(f"{plural(len(inspection.broken), 'file')} left out, unreadable: {some(reasons, separator='; ')}.")
    across, straddling = inspection.across_domains, inspection.across_split
    contradictory = inspection.across_classes
    if across:
        told.append(
            f"{plural(len(across), 'image')} in several domains, so that an unseen domain is not quite unseen "
            f"and the estimate too high: {some(' = '.join(group) for group in across)}. Remove the copies."
        )
    if contradictory:
        told.append(
            f"{plural(len(contradictory), 'image')} in several classes: "
            f"{some(' = '.join(group) for group in contradictory)}. Remove what is wrong."
        )
    if straddling:
        told.append(
            f"{plural(len(straddling), 'image')} with a copy among those set aside, so that accuracy on seen "
            f"domains comes out too high: {some(' = '.join(group) for group in straddling)}."
        )
    told += missing(dataset, counts)
    tiny = [f"{name} ({n})" for name, n in zip(dataset.classes, counts.sum(0).tolist(), strict=True) if n < FEW]
    if tiny:
        told.append(f"Classes with fewer than {FEW} images are hardly learnt: {some(tiny)}.")
    if dataset.ignored:
        told.append(f"{plural(len(dataset.ignored), 'other file')} ignored: {some(dataset.ignored)}.")
    if len(dataset.domains) == 1:
        told.append(
            "One domain only: what to expect on an unseen one cannot be estimated. Two or more are needed, "
            "such as cameras, places or days."
        )
        deeper = [file.split("/") for file in dataset.files if file.count("/") > 2]
        if deeper:
            top, domain, name, *_ = deeper[0]
            told.append(f"If {domain} is a domain and {name} a class, give {Path(dataset.root or '', top)} instead.")
    elif len(dataset.domains) == 2:
        told.append(
            "Two domains only: each estimate comes from a model of a single one. With three or more it is far "
            "nearer to the truth."
        )
    return told


def missing(dataset: Dataset, counts: np.ndarray) -> list[str]:
    """Classes that some domains have no image of, and what that means."""
    told = []
    alone = [
        f"{name} (in {dataset.domains[int(column.argmax())]})"
        for name, column in zip(dataset.classes, counts.T, strict=True)
        if np.count_nonzero(column) == 1
    ]
    lacking = [
        f"{name} (not in {some(np.array(dataset.domains)[column == 0])})"
        for name, column in zip(dataset.classes, counts.T, strict=True)
        if 1 < np.count_nonzero(column) < len(column)
    ]
    if alone and len(dataset.domains) > 1:
        told.append(
            f"In one domain only: {some(alone)}. With that domain unseen, nothing teaches these classes and "
            "all their images count as errors; and the final model may take the domain for the class."
        )
    if lacking:
        told.append(
            f"Missing in some domains: {some(lacking)}. They are learnt from the others; in those domains the "
            "estimate says nothing of them."
        )
    return told


# The plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitPlan:
    """Runs with each domain unseen once, of the algorithm and of ERM, and the run on all domains of either."""

    estimates: list[RunSpec]
    finals: dict[str, RunSpec]  # by the algorithm's name in records, the preferred one first

    @property
    def preferred(self) -> str:
        return next(iter(self.finals))


def choose_size(dataset: Dataset) -> int:
    """The side of the network's input: up to `SMALL_SIDE`, if most pictures are so small, else 224."""
    if dataset.pixels is not None or dataset.name in DATASETS:
        return dataset.image_size
    files = dataset.files[:: max(1, len(dataset) // SAMPLE)]
    side = statistics.median(longest_side(f"{dataset.root}{os.sep}{file}") for file in files)
    return 224 if side > SMALL_SIDE else max(28, math.ceil(side / 4) * 4)


def plan(
    dataset: Dataset,
    folder: str,
    algorithm: str,
    *,
    quick: bool = False,
    device: str = "auto",
    hyper_parameters: Mapping[str, Any] | None = None,
    **given: Any,
) -> FitPlan:
    """The runs, with what was not given chosen by the number and size of the pictures and by the device.

    Weights are averaged over steps where all of a trained network is trained: from scratch, early ones would spoil the
    average. On PACS, the one data set where it was measured, ERM gains two to four points on an unseen domain by it and
    AIDGN none, and both move less from step to step (docs/results).
    Steps grow with the square root of the number N of images: 40 sqrt(N), from 300 to 15,000; quick: 10 sqrt(N), from
    100 to 2,000, the network's last stage alone, and on a CPU smaller images in smaller batches."""
    on_cpu, values = choose_device(device).type == "cpu", dict(hyper_parameters or {})
    small = dataset.small
    backbone = given.pop("backbone", None) or (backbones.SMALL if small else ON_CPU if on_cpu else backbones.DEFAULT)
    weights = given.pop("weights", None) or ("none" if backbone == backbones.SMALL else "hub")
    steps, most = (10, 2000) if quick else (40, 15000)
    number = min(max(round(steps * math.sqrt(len(dataset)), -1), 100 if quick else 300), most)
    if dataset.name in DATASETS and not quick:
        number = dataset.info.steps
    number = given.pop("steps", None) or int(number)
    plain = quick or weights == "none" or number < 2 * SMA.start
    average = given.pop("average", None) or ("none" if plain else "sma")
    if quick and on_cpu and not small:
        values.setdefault("batch_size", 16)
    spec = RunSpec(
        folder,
        algorithm,
        (),
        hyper_parameters=values,
        steps=number,
        eval_every=given.pop("eval_every", None) or max(number // 15, 20),
        image_size=dataset.image_size,
        backbone=backbone,
        weights=weights,
        average=None if average == "none" else average,
        skip_broken=True,
        train_only=LAST_STAGE if quick and weights != "none" else None,
        **given,
    )
    names = dataset.domains if len(dataset.domains) > 1 else []
    # What is given for the algorithm may be nothing that the baseline has.
    shared = {name: value for name, value in values.items() if name in ("batch_size", "resnet_dropout")}
    specs = [spec]
    if find(algorithm).name() != BASELINE:
        specs.append(replace(spec, algorithm=BASELINE, hyper_parameters=shared))
    return FitPlan(
        [replace(each, target=(name,)).resolved(dataset) for each in specs for name in names],
        {str(each.label()): each.resolved(dataset) for each in specs},
    )


def describe(job: FitPlan) -> str:
    """What will be trained, in a sentence."""
    spec, unseen = job.finals[job.preferred], len({each.target for each in job.estimates})
    names = " and ".join(job.finals)
    first = f"{names} with each of {unseen} domains unseen once, then one model of all" if unseen else "One model"
    part = ", its last stage alone" if spec.train_only else ""
    averaged = ", weights averaged over steps" if spec.average else ""
    return (
        f"Training: {first}: {plural(len(job.estimates) + 1, 'run')} of {spec.steps} steps, {spec.backbone} "
        f"({'from scratch' if spec.weights == 'none' else spec.weights}{part}) at {spec.image_size} pixels"
        f"{averaged}."
    )


def fetch_weights(job: FitPlan) -> None:
    """Get the initial weights, once for all runs; an error if they are not to be had."""
    spec = job.finals[job.preferred]
    backbones.create(str(spec.backbone), weights=spec.weights)


def quick_size(size: int, device: str) -> int:
    """The side of the network's input for a first answer."""
    return min(size, 128) if choose_device(device).type == "cpu" else size


# The answer -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Accuracies on each domain when it was never seen, of one algorithm."""

    algorithm: str
    accuracies: dict[str, float]  # by domain

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies.values())

    @property
    def spread(self) -> float:
        """Standard deviation over domains."""
        return statistics.stdev(self.accuracies.values()) if len(self.accuracies) > 1 else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        return min(self.accuracies.items(), key=lambda entry: entry[1])


def estimates(folders: Sequence[str | Path]) -> list[Estimate]:
    """Of finished runs with one unseen domain each, at the step that training-domain validation selects."""
    found: dict[str, dict[str, float]] = {}
    records = read_runs(*folders)
    for difference in differences(records.runs):
        log.warning("%s", difference)
    for row in select(records, "training"):
        found.setdefault(row["algorithm"], {})[row["target_name"]] = row["accuracy"]
    return [Estimate(algorithm, accuracies) for algorithm, accuracies in found.items()]


def best(found: Sequence[Estimate], preferred: str) -> str:
    """The algorithm of the final model: the better on unseen domains; if they are equal or unknown, the preferred."""
    return max(found, key=lambda each: (each.mean, each.algorithm == preferred)).algorithm if found else preferred


def compared(found: Sequence[Estimate], chosen: str) -> str:
    """How the chosen algorithm does beside the other, domain by domain; clear is a difference of more than a point that
    a paired t test at 5 % finds."""
    one = next(each for each in found if each.algorithm == chosen)
    other = next(each for each in found if each.algorithm != chosen)
    gaps = [one.accuracies[name] - other.accuracies[name] for name in one.accuracies]
    mean, text = statistics.fmean(gaps), f"{other.algorithm}: {other.mean:.1%}"
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    widest = max(float(stdtrit(len(gaps) - 1, 0.975)) * error, 0.01) if len(gaps) > 2 else math.inf
    clear = "a clear difference" if abs(mean) > widest else "no clear difference"
    return (
        f"{text} in the same way; {chosen} is {100 * mean:+.1f} points beside it, {clear} over {len(gaps)} "
        "domains, and makes the model."
    )


def seen_accuracy(folder: Path) -> float:
    """Of the final model on the images set aside, mean over domains, at the selected step."""
    selected = RunFolder(folder).selected
    return statistics.fmean(value for key, value in selected.items() if key.endswith("_out_acc"))


def check_same_images(identity: Mapping[str, Any], folders: Sequence[str | Path]) -> None:
    """An error if these runs saw other images than a run of this identity: someone changed the folder meanwhile."""
    for folder in folders:
        if RunFolder(folder).identity["data"] != identity["data"]:
            raise AidgnError(
                f"The images of {identity['dataset']} changed while runs were trained on them, so that "
                "these cannot be compared. Run the same command again, which keeps the right ones."
            )


def read_summary(out: Path) -> dict[str, Any]:
    """What an earlier fit left in this folder; {} if there was none."""
    try:
        found = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_place(out: Path, dataset: Dataset) -> None:
    """An error if the folder holds the model of another folder of pictures, which happens to bear the same name."""
    earlier = read_summary(out)
    other = earlier.get("root", root_of(dataset)) != root_of(dataset)
    if other and (earlier.get("domains"), earlier.get("classes")) != (dataset.domains, dataset.classes):
        raise AidgnError(
            f"{out} holds a model of {earlier['root']}, which are other pictures: choose another folder with --out."
        )


def root_of(dataset: Dataset) -> str | None:
    return None if dataset.root is None else str(dataset.root.resolve())


def replaced(out: Path, final: RunSpec, dataset: Dataset) -> list[str]:
    """A sentence, if the model of an earlier fit goes."""
    earlier = read_summary(out)
    facts = {**about(final), "images": dataset.count_images().tolist()}
    if not earlier or all(earlier.get(key) == value for key, value in facts.items()):
        return []
    return [
        f"It replaces the model of an earlier fit ({earlier.get('algorithm')}, {earlier.get('steps')} steps, "
        f"{np.sum(earlier.get('images', 0))} images), which the command of then would bring back."
    ]


def about(final: RunSpec) -> dict[str, Any]:
    return {
        "algorithm": str(final.label()),
        "backbone": final.backbone,
        "image_size": final.image_size,
        "steps": final.steps,
        "train_only": final.train_only,
    }


def keep_model(run: Path, out: Path) -> Path:
    """What predicting needs of a run, in OUT/model: a hard link where there can be one."""
    folder = RunFolder(run)
    for file in (folder.model, folder.novelty, folder.metadata_file):
        with atomic_write(out / "model" / file.name) as temporary:
            try:
                os.link(file, temporary)
            except OSError:
                temporary.write_bytes(file.read_bytes())
    return out / "model"


def answer(found: Sequence[Estimate], chosen: str, seen: float, classes: int) -> list[str]:
    """What to expect, in words; beside what guessing one of so many classes gives."""
    told = []
    for each in found:
        if each.algorithm == chosen:
            name, accuracy = each.worst
            told.append(
                f"On an unseen domain expect about {each.mean:.0%}: {each.mean:.1%} is the mean over "
                f"{plural(len(each.accuracies), 'domain')} left out in turn, {each.spread:.1%} the spread, "
                f"{name} the worst with {accuracy:.1%}. Guessing gives {1 / classes:.1%}."
            )
    if len(found) > 1:
        told.append(compared(found, chosen))
    return [*told, f"On the domains it has seen: {seen:.1%}, on images set aside."]


def write_summary(
    out: Path,
    told: Sequence[str],
    found: Sequence[Estimate],
    final: RunSpec,
    seen: float,
    model: Path,
    dataset: Dataset,
) -> None:
    """REPORT.md for people and summary.json for programs, beside the model."""
    counts = dataset.count_images()
    value = {
        "dataset": dataset.name,
        "root": root_of(dataset),
        "domains": dataset.domains,
        "classes": dataset.classes,
        "images": counts.tolist(),
        "estimates": [
            {**asdict(each), "mean": each.mean, "spread": each.spread, "worst": list(each.worst)} for each in found
        ],
        **about(final),
        "seen_domains": seen,
        "model": model.name,
        "said": list(told),
    }
    write_text(out / "summary.json", json.dumps(value, indent=1) + "\n")
    lines = [f"# {for_markdown(dataset.name)}", "", *(f"- {for_markdown(sentence)}" for sentence in told), ""]
    if found:
        names = dataset.domains
        lines += [
            "Accuracy on each domain, in runs that never saw it:",
            "",
            f"| | {' | '.join(map(for_markdown, names))} | mean |",
            "|---" * (len(names) + 2) + "|",
            *(
                f"| {each.algorithm} | {' | '.join(f'{each.accuracies[name]:.1%}' for name in names)} | "
                f"{each.mean:.1%} |"
                for each in found
            ),
            "",
            "The runs that left a domain out had one domain less to learn from than the final model, which makes "
            "the estimate cautious; that the better of two algorithms was taken makes it a little hopeful. It "
            "holds for a new domain that differs from these as much as they differ from each other.",
            "",
        ]
    lines += [
        "Images:",
        "",
        f"| | {' | '.join(map(for_markdown, dataset.domains))} | all |",
        "|---" * (len(dataset.domains) + 2) + "|",
        *(
            f"| {for_markdown(name)} | {' | '.join(map(str, row))} | {sum(row)} |"
            for name, row in zip(dataset.classes, counts.T.tolist(), strict=True)
        ),
        "",
    ]
    write_text(out / "REPORT.md", "\n".join(lines))


def predict_line(model: Path, spec: RunSpec) -> str:
    own = f" --algorithm {shlex.quote(spec.algorithm)}" if is_custom(spec.algorithm) else ""
    return f"aidgn predict {shlex.quote(str(model))} NEW_PICTURES/{own}"
