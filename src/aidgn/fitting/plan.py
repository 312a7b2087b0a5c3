"""Plan the runs of a fit, with settings chosen by the number and size of the images and by the device."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aidgn import backbones
from aidgn.algorithms import Algorithm, find
from aidgn.data import DATASETS, Dataset
from aidgn.data.images import longest_side
from aidgn.data.registry import SMALL_SIDE
from aidgn.devices import choose_device
from aidgn.errors import ParameterError, plural
from aidgn.runs.options import ACCURACY, CLASS_WEIGHTS, DECAYS, HEAD, LAST_STAGE, NO_BALANCE, SAMPLING
from aidgn.runs.spec import RunSpec
from aidgn.training.averaging import SMA

BASELINE = "ERM"
CPU_BACKBONE = "resnet18.tv_in1k"  # a fifth of the work of ResNet-50
SAMPLED_IMAGES = 200  # images whose headers are read for their size
QUICK_CPU_SIZE = 128  # pixels
HEAD_STEPS = 500  # more steps change a classifier on frozen features little (docs/results)
UNEVEN = 1.5  # balanced samples are tried if the largest class has so many times the images of the smallest
SHARED_HYPER_PARAMETERS = ("batch_size", "resnet_dropout")  # every algorithm has them


@dataclass(frozen=True)
class FitPlan:
    """Runs of an algorithm and of ERM: one for each unseen domain, and one on all domains."""

    estimates: list[RunSpec]  # runs with an unseen domain
    finals: dict[str, RunSpec]  # runs on all domains by `name_of`, the preferred algorithm first

    @property
    def preferred(self) -> str:
        """The algorithm that the caller chose."""
        return next(iter(self.finals))

    @property
    def final(self) -> RunSpec:
        """The run on all domains of the preferred algorithm."""
        return self.finals[self.preferred]

    @property
    def frozen(self) -> bool:
        """Whether runs train only the classifier, on features of a frozen network."""
        return self.final.trains_head

    def __str__(self) -> str:
        unseen = len({spec.target for spec in self.estimates})
        trials = len({spec.trial for spec in self.estimates})
        often = "once" if trials == 1 else f"{trials} times"
        names = list(self.finals)
        listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        runs = f"{listed} with each of {unseen} domains unseen {often}, then one model of all"
        network = f"{self.final.backbone} ({'from scratch' if self.final.weights == 'none' else self.final.weights}"
        if self.frozen:
            network += ", frozen"
        elif self.final.train_only:
            network += ", only its last stage"
        averaged = ", weights averaged over steps" if self.final.average else ""
        return (
            f"Training: {runs if unseen else 'One model'}: {plural(len(self.estimates) + 1, 'run')} of "
            f"{self.final.steps} steps, {network}) at {self.final.image_size} pixels{averaged}."
        )


def plan_fit(
    dataset: Dataset,
    folder: str,
    algorithm: str,
    *,
    quick: bool = False,
    trials: int = 1,
    device: str = "auto",
    hyper_parameters: Mapping[str, Any] | None = None,
    metric: str = ACCURACY,
    **options: Any,
) -> FitPlan:
    """Plan the runs.

    Steps grow with the square root of the number N of images: 40 sqrt(N), from 300 to 15,000; with `quick`
    10 sqrt(N), from 100 to 2,000. Weights are averaged over steps if training starts from pretrained weights and
    changes all of them; from scratch, early steps would spoil the average. On PACS, the one data set where averaging
    was measured, ERM gains two to four points on an unseen domain and AIDGN none, and both move less from step to
    step (docs/results).

    On a CPU a pretrained network stays frozen and only the classifier is trained, for a number of steps that does not
    grow, unless the algorithm or an option needs more of the network.

    If the metric is not accuracy and classes are uneven, the algorithms also train on balanced samples, unless an
    option says how to balance.

    Args:
        dataset: The images that can be read, at the size of the network's input.
        folder: Folder of the images, or the name of a data set.
        algorithm: The algorithm to compare with ERM.
        quick: Train fewer steps and only the last stage of a pretrained network.
        trials: How often each domain is left out, with another seed each time.
        device: Where the runs will be trained.
        hyper_parameters: Values for the algorithm.
        metric: The metric that chooses the algorithm and the step of a run, a name of `CHOICES`.
        options: Options of a run that replace the choices of this function. None leaves the choice; average="none"
            turns averaging off.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    values = dict(hyper_parameters or {})
    on_cpu = choose_device(device).type == "cpu"
    backbone = chosen.get("backbone", _choose_backbone(dataset, on_cpu))
    weights = chosen.get("weights", "none" if backbone == backbones.SMALL else "hub")
    train_only = chosen.pop("train_only", _choose_part(find(algorithm), weights, quick, on_cpu, chosen))
    if quick and on_cpu and not dataset.small and train_only != HEAD:
        values.setdefault("batch_size", 16)
    steps = chosen.get("steps", HEAD_STEPS if train_only == HEAD else _choose_steps(dataset, quick))
    no_average = quick or weights == "none" or train_only == HEAD or steps < 2 * SMA.start
    average = chosen.pop("average", "none" if no_average else "sma")
    settings = {
        "select_by": metric,
        "backbone": backbone,
        "weights": weights,
        "steps": steps,
        "eval_every": max(steps // (5 if train_only == HEAD else 15), 20),
        "train_only": train_only,
        **chosen,
        "image_size": dataset.image_size,
        "average": None if average == "none" else average,
        "skip_broken": True,
    }
    specs = [RunSpec(folder, algorithm, (), hyper_parameters=values, **settings)]
    if find(algorithm).name() != BASELINE:
        shared = {name: value for name, value in values.items() if name in SHARED_HYPER_PARAMETERS}
        specs.append(replace(specs[0], algorithm=BASELINE, hyper_parameters=shared))
    counts = dataset.count_images().sum(0)
    if metric != ACCURACY and "balance" not in chosen and counts.max() >= UNEVEN * counts.min():
        specs += [replace(spec, balance=SAMPLING) for spec in specs]
    if trials < 1:
        raise ParameterError("trials", trials, "a whole number of at least 1")
    domains = dataset.domains if len(dataset.domains) > 1 else []
    return FitPlan(
        [
            replace(spec, target=(domain,), trial=trial).resolved(dataset)
            for spec in specs
            for domain in domains
            for trial in range(trials)
        ],
        {name_of(spec): spec.resolved(dataset) for spec in specs},
    )


def name_of(spec: RunSpec) -> str:
    """Return the name of a run's algorithm in an estimate."""
    balanced = {SAMPLING: " on balanced samples", CLASS_WEIGHTS: " with class weights"}
    return f"{spec.label()}{balanced.get(spec.balance or NO_BALANCE, '')}"


def plan_refit(final: RunSpec, selected_steps: Sequence[int]) -> RunSpec:
    """Return the run on all images, validation ones included.

    Args:
        final: The resolved run on all domains.
        selected_steps: Steps that validation selected in runs with a domain unseen; their median is the number of
            steps. Each step has the learning rate that it had in those runs.
    """
    steps = max(round(statistics.median(selected_steps)), final.warmup + 1, final.warm_start + 1)
    schedule = f"{final.schedule}:{final.steps}" if final.schedule in DECAYS else final.schedule
    return replace(final, steps=steps, schedule=schedule, train_on_all=True)


def choose_image_size(dataset: Dataset, *, quick: bool = False, device: str = "auto") -> int:
    """Choose the side of the network's input: 224, or less for small images or a quick answer on a CPU."""
    size = dataset.image_size
    if dataset.pixels is None and dataset.name not in DATASETS:
        files = dataset.files[:: max(1, len(dataset) // SAMPLED_IMAGES)]
        side = statistics.median(longest_side(f"{dataset.root}{os.sep}{file}") for file in files)
        size = 224 if side > SMALL_SIDE else max(28, math.ceil(side / 4) * 4)
    return min(size, QUICK_CPU_SIZE) if quick and choose_device(device).type == "cpu" else size


def _choose_backbone(dataset: Dataset, on_cpu: bool) -> str:
    if dataset.small:
        return backbones.SMALL
    return CPU_BACKBONE if on_cpu else backbones.DEFAULT


def _choose_part(
    algorithm: type[Algorithm], weights: str, quick: bool, on_cpu: bool, options: Mapping[str, Any]
) -> str | None:
    """Choose which part of the network to train; None for all."""
    if weights == "none":
        return None
    if on_cpu and algorithm.trains_on_features and not options.get("warm_start"):
        return HEAD
    return LAST_STAGE if quick else None


def _choose_steps(dataset: Dataset, quick: bool) -> int:
    if dataset.name in DATASETS and not quick:
        return dataset.info.steps
    factor, fewest, most = (10, 100, 2000) if quick else (40, 300, 15000)
    return int(min(max(round(factor * math.sqrt(len(dataset)), -1), fewest), most))
