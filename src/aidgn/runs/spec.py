"""What a run is: its specification, resolved against the data set, and the identity that follows from it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aidgn import backbones
from aidgn.algorithms import canonical, find
from aidgn.algorithms.custom import is_custom, source_of
from aidgn.algorithms.search_space import resolve
from aidgn.data import DATASETS, Dataset, load_dataset
from aidgn.data.dataset import normalize_unicode
from aidgn.data.registry import is_registered
from aidgn.errors import AidgnError, plural
from aidgn.runs.run_id import sweep_key

LAST_STAGE = "last-stage"


@dataclass(frozen=True)
class RunSpec:
    """One training. What is None is taken from the data set and the algorithm by `resolved`."""

    dataset: str  # a name of the catalogue, or a folder
    algorithm: str = "AIDGN"
    target: Sequence[str] | str = ()  # the unseen domains, by name or letter; () trains on all
    trial: int = 0
    draw: int = 0  # of the hyper-parameter search; 0 is the defaults
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)  # over those of the draw
    steps: int | None = None
    eval_every: int | None = None
    image_size: int | None = None  # of the network's input
    backbone: str | None = None
    weights: str | None = None  # "hub", "none" or a file
    lr_milestones: Sequence[int] | None = None
    average: str | None = None  # "sma", "swad" or "sma:N": average the weights over steps
    augment_validation: bool = False  # validate sources on augmented images, as DomainBed does
    evaluate_source_in: bool = False  # measure the accuracy on the training images too
    skip_broken: bool = False
    train_only: str | None = None  # "last-stage": the network before its last stage stays as it is

    def load_dataset(self, data_dir: str | Path | None = None) -> Dataset:
        """The data set, at the image size asked for."""
        dataset = load_dataset(self.dataset, data_dir)
        if self.image_size is None or self.image_size == dataset.image_size:
            return dataset
        if self.image_size < 8:
            raise AidgnError(f"--image-size is {self.image_size}; expected a whole number of at least 8.")
        return replace(dataset, image_size=self.image_size)

    def resolved(self, dataset: Dataset) -> "RunSpec":
        """Every choice made and checked."""
        algorithm = find(self.algorithm)
        names = [self.target] if isinstance(self.target, str) else list(self.target)
        targets = sorted({dataset.find_domain(name) for name in names})
        sources = len(dataset.domains) - len(targets)
        if sources < 1:
            raise AidgnError("Every domain is a target: none is left to train on.")
        if sources < algorithm.min_domains:
            where = f"with target {', '.join(dataset.domains[i] for i in targets)} " if targets else ""
            raise AidgnError(
                f"{algorithm.name()} needs at least {plural(algorithm.min_domains, 'source domain')}; "
                f"{where}there {'is' if sources == 1 else 'are'} {sources}. Choose another algorithm, or "
                "give it more domains."
            )
        defaults = algorithm.sample(_key(dataset), self.trial, self.draw, small=dataset.small)
        space = algorithm.space(dataset.name, dataset.small)
        given = algorithm.implied(self.hyper_parameters)
        hyper_parameters = resolve(algorithm.name(), space, {**defaults, **given})
        size = int(hyper_parameters["batch_size"])  # type: ignore[arg-type]
        if size < algorithm.min_batch:
            raise AidgnError(
                f"{algorithm.name()} needs at least {algorithm.min_batch} images of every source domain in "
                f"a batch; --batch-size is {size}."
            )
        backbone = self.backbone or (backbones.SMALL if dataset.small else backbones.DEFAULT)
        milestones = dataset.lr_milestones if algorithm.lr_milestones else ()
        spec = replace(
            self,
            algorithm=canonical(self.algorithm),
            target=tuple(dataset.domains[i] for i in targets),
            hyper_parameters=hyper_parameters,
            steps=dataset.steps if self.steps is None else self.steps,
            eval_every=dataset.eval_every if self.eval_every is None else self.eval_every,
            image_size=dataset.image_size,
            backbone=backbone,
            weights=self.weights or ("none" if backbone == backbones.SMALL else "hub"),
            lr_milestones=tuple(milestones if self.lr_milestones is None else self.lr_milestones),
        )
        if spec.train_only not in (None, LAST_STAGE):
            raise AidgnError(f"train_only is {spec.train_only}; expected {LAST_STAGE} or None.")
        if spec.train_only and spec.weights == "none":
            raise AidgnError(
                f"train_only={spec.train_only} keeps what a network has learnt before, but with weights "
                "none there is nothing. Give weights, or train all of it."
            )
        if spec.average is not None:
            from aidgn.training.averaging import find_average

            find_average(spec.average)
        for option, value, least in (
            ("steps", spec.steps, 1),
            ("eval-every", spec.eval_every, 1),
            ("trial", spec.trial, 0),
            ("draw", spec.draw, 0),
        ):
            if value is None or value < least:
                raise AidgnError(f"--{option} is {value}; expected a whole number of at least {least}.")
        return spec

    def identity(self, dataset: Dataset, content: str) -> dict[str, Any]:
        """What makes this run this run, whatever folder data and weights are in. For a resolved specification;
        `content` is a digest of the images."""
        identity = self._without_files(dataset.name)
        identity["weights"] = backbones.weights_identity(str(self.backbone), self.weights)
        identity["data"] = f"{dataset.fingerprint[:32]}-{content}"
        return identity

    def _without_files(self, dataset: str) -> dict[str, Any]:
        """The part of the identity that neither images nor weights are read for."""
        identity = asdict(self)
        identity["dataset"] = dataset
        identity["algorithm"] = self.label()
        if source := self.source():
            identity["source"] = source
        del identity["skip_broken"]  # what was left out shows in the fingerprint
        if self.train_only is None:  # as before there was a choice
            del identity["train_only"]
        return json.loads(json.dumps(identity))

    def key(self) -> str:
        """What the run is called within a sweep, where images, weights and precision are the same for all: known
        without reading them. For a resolved specification."""
        known = is_registered(self.dataset)
        return sweep_key(
            self._without_files(self.dataset if known else normalize_unicode(Path(self.dataset).resolve().name))
        )

    def source(self) -> str | None:
        """A digest of the file that an own algorithm is in; of others None."""
        return source_of(find(self.algorithm)) if is_custom(self.algorithm) else None

    def label(self) -> str:
        """The algorithm's name in records and tables."""
        return find(self.algorithm).name() + (f"+{self.average.upper()}" if self.average else "")

    def seed(self, dataset: Dataset) -> int:
        """The seed of batches, augmentation and initial weights: the same for every algorithm and draw, so that they
        are compared on the same images in the same order."""
        text = f"{_key(dataset)}|{','.join(self.target)}|{self.trial}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _key(dataset: Dataset) -> str:
    """What stands for a data set where numbers are drawn: its published name, or what is in the folder, which may be
    called anything."""
    return dataset.name if dataset.name in DATASETS else dataset.fingerprint
