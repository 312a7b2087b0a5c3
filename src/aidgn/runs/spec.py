"""The specification of a run: complete it from the data set, check it, and derive the identity of the run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS, Algorithm, canonical, find
from aidgn.algorithms.custom import is_custom, source_of
from aidgn.algorithms.search_space import resolve
from aidgn.data import DATASETS, Dataset, load_dataset
from aidgn.data.registry import SMALL_SIDE, is_registered, normalize_unicode
from aidgn.data.source import DataSource
from aidgn.errors import AidgnError, ParameterError, plural
from aidgn.runs.label import Label
from aidgn.runs.options import (
    ACCURACY,
    ALL,
    CLASS_WEIGHTS,
    DECAYS,
    HEAD,
    LAST_STAGE,
    MAX_NUMBER,
    NO_BALANCE,
    RunOptions,
    parse_schedule,
    run_options,
)
from aidgn.runs.run_id import identify_images, sweep_key


@dataclass(frozen=True)
class RunSpec(RunOptions):
    """One training. `resolved` replaces None by the values of the data set and the algorithm.

    Args:
        dataset: Name of a known data set, or a folder.
        algorithm: Name of an algorithm, or path/to/file.py:Class.
        target: Unseen domains, by name or letter; () trains on all domains.
        trial: Seed of splits, batches and initial weights.
        draw: Draw of the hyper-parameter search; 0 is the defaults.
        hyper_parameters: Values that replace those of the draw.
        lr_milestones: Steps at which the learning rate is halved.
    """

    dataset: str
    algorithm: str = "AIDGN"
    target: Sequence[str] | str = ()
    trial: int = 0
    draw: int = 0
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    lr_milestones: Sequence[int] | None = None

    def load_dataset(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the data set at the run's image size, after a trial of the network at this size."""
        self.check_options()
        dataset = load_dataset(self.dataset, data_dir)
        image_size = self.choose_image_size(dataset.image_size)
        self.try_network(image_size)
        return dataset if image_size == dataset.image_size else dataset.with_image_size(image_size)

    def choose_image_size(self, default: int) -> int:
        """Return the run's image size: the size of the data set, unless the network needs another."""
        if self.image_size is None and self.backbone:
            return backbones.choose_image_size(self.backbone, default)
        return self.image_size or default

    def try_network(self, image_size: int) -> None:
        """Raise an error if the network cannot take images of this size, or the file of weights does not fit it.

        A file that is not on this machine is not checked: the run will check it.
        """
        if self.backbone or self.weights:
            is_file = self.weights is not None and Path(self.weights).is_file()
            small = image_size <= SMALL_SIDE
            backbone = self.backbone or (backbones.SMALL if small else backbones.DEFAULT)
            backbones.try_forward(backbone, image_size, self.weights if is_file else "none")

    def resolved(self, dataset: Dataset) -> "RunSpec":
        """Return the specification with every choice made and checked."""
        options = self.check_options()
        for name in ("trial", "draw"):
            if not 0 <= getattr(self, name) <= MAX_NUMBER:
                raise ParameterError(name, getattr(self, name), f"a whole number from 0 to {MAX_NUMBER}")
        algorithm = find(self.algorithm)
        names = [self.target] if isinstance(self.target, str) else list(self.target)
        targets = [dataset.domains[i] for i in sorted({dataset.find_domain(name) for name in names})]
        check_sources(algorithm, dataset, targets)
        hyper_parameters = self._hyper_parameters(algorithm, dataset)
        backbone = self.backbone or (backbones.SMALL if dataset.small else backbones.DEFAULT)
        weights = self.weights or ("none" if backbone == backbones.SMALL else "hub")
        train_only = None if self.train_only == ALL else self.train_only
        if train_only and weights == "none":
            raise AidgnError(f"train={train_only} keeps pretrained stages, but weights is none. Give weights.")
        if self.views is not None and train_only != HEAD:
            raise ParameterError("views", self.views, f"none without train={HEAD}: only cached features have views")
        if self.warm_start and train_only == HEAD:
            raise ParameterError("warm_start", self.warm_start, f"0 with train={HEAD}, which trains nothing else")
        if self.train_on_all and (self.average or "").startswith("swad"):
            raise ParameterError("average", self.average, "sma with train_on_all: swad needs a validation loss")
        if self.views and not dataset.info.augment:
            raise ParameterError("views", self.views, f"0: images of {dataset.name} are not augmented")
        if train_only == HEAD and not algorithm.trains_on_features:
            raise AidgnError(refuse_features(algorithm))
        built_in = algorithm in ALGORITHMS.values()
        if self.balance == CLASS_WEIGHTS and not (built_in or vars(algorithm).get("weighs_classes")):
            raise AidgnError(
                f"{algorithm.name()} does not say that it weighs classes. If it takes its loss from "
                "`self.cross_entropy`, add `weighs_classes = True` to the class; else give balance=sampling."
            )
        check_optimization(self, algorithm, str(backbone), train_only, int(hyper_parameters["batch_size"]))
        frozen = backbones.freezes_batch_norm(weights, self.batch_norm)
        # Options with the effect of their default are stored as None, so that equal runs have equal identities.
        options |= {
            "batch_norm": None if frozen == backbones.freezes_batch_norm(weights) else self.batch_norm,
            "balance": None if self.balance == NO_BALANCE else self.balance,
            "select_by": None if self.select_by == ACCURACY else self.select_by,
            "optimizer": None if self.optimizer == "adam" else self.optimizer,
            "layer_decay": None if self.layer_decay == 1 else options["layer_decay"],
        }
        use_milestones = algorithm.lr_milestones and self.schedule is None
        milestones = dataset.info.lr_milestones if use_milestones else ()
        steps = dataset.info.steps if self.steps is None else self.steps
        for name in ("warmup", "warm_start"):
            if options[name] >= steps:
                raise ParameterError(name, options[name], f"fewer than the {plural(steps, 'step')} of the run")
        shape, numbers = parse_schedule(self.schedule)
        if shape in DECAYS and numbers and numbers[0] < steps:
            raise ParameterError("schedule", self.schedule, f"{shape}:N with N at least {steps}, the steps of the run")
        return replace(
            replace(self, **options),
            algorithm=canonical(self.algorithm),
            target=tuple(targets),
            hyper_parameters=hyper_parameters,
            steps=steps,
            eval_every=dataset.info.eval_every if self.eval_every is None else self.eval_every,
            image_size=dataset.image_size,
            backbone=backbone,
            weights=weights,
            train_only=train_only,
            views=(self.views or 0) if train_only == HEAD else None,
            lr_milestones=tuple(milestones if self.lr_milestones is None else self.lr_milestones),
        )

    def _hyper_parameters(self, algorithm: type[Algorithm], dataset: Dataset) -> dict[str, Any]:
        head = self.trains_head
        defaults = algorithm.sample(_seed_name(dataset), self.trial, self.draw, small=dataset.small, head=head)
        space = algorithm.space(dataset.name, dataset.small, head)
        chosen = algorithm.with_derived(self.hyper_parameters)
        hyper_parameters = resolve(algorithm.name(), space, {**defaults, **chosen})
        size = int(hyper_parameters["batch_size"])  # type: ignore[arg-type]
        if size < algorithm.min_batch:
            raise ParameterError("batch_size", size, f"at least {algorithm.min_batch} for {algorithm.name()}")
        return hyper_parameters

    def identity(self, dataset: Dataset, content: str) -> dict[str, Any]:
        """Return everything that the results depend on, independent of where data and weights are stored.

        Args:
            dataset: The data set of this specification, which must be resolved.
            content: Digest of the images.
        """
        identity = self._identity_without_files(dataset.name)
        identity["weights"] = backbones.weights_identity(str(self.backbone), self.weights)
        if preprocessing := backbones.preprocessing(str(self.backbone), self.weights).to_record():
            identity["preprocessing"] = preprocessing
        identity["data"] = identify_images(dataset.fingerprint, content)
        return identity

    def _identity_without_files(self, dataset: str) -> dict[str, Any]:
        """Return the part of the identity that needs no images and no weights."""
        identity = {**asdict(self), "dataset": dataset, "algorithm": str(self.label())}
        if source := self.source():
            identity["source"] = source
        for option in run_options():
            unset = option.identity == "if set" and identity[option.name] == option.default
            if unset or option.identity == "never":
                del identity[option.name]
        as_read: dict[str, Any] = json.loads(json.dumps(identity))
        return as_read

    def key(self) -> str:
        """Return the key of this resolved run within a sweep, which needs no file access."""
        name = self.dataset
        if not is_registered(name):
            name = normalize_unicode(DataSource.parse(name).name)
        return sweep_key(self._identity_without_files(name))

    def source(self) -> str | None:
        """Return the digest of a custom algorithm's file, None for other algorithms."""
        return source_of(find(self.algorithm)) if is_custom(self.algorithm) else None

    def label(self) -> Label:
        """Return the algorithm's label in records and tables."""
        return Label(find(self.algorithm).name(), self.average or "")

    def seed(self, dataset: Dataset) -> int:
        """Return the seed of batches, augmentation and initial weights.

        It is the same for every algorithm and draw, so that they are compared on the same images in the same order.
        """
        text = f"{_seed_name(dataset)}|{','.join(self.target)}|{self.trial}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def check_sources(algorithm: type[Algorithm], dataset: Dataset, targets: Sequence[str]) -> None:
    """Raise an error unless enough source domains remain without the targets."""
    sources = len(dataset.domains) - len(targets)
    if sources < 1:
        raise AidgnError("Every domain is a target: none is left to train on.")
    if sources < algorithm.min_domains:
        where = f"with target {', '.join(targets)} " if targets else ""
        raise AidgnError(
            f"{algorithm.name()} needs at least {plural(algorithm.min_domains, 'source domain')}; "
            f"{where}there {'is' if sources == 1 else 'are'} {sources}. Choose another algorithm, or "
            "give it more domains."
        )


def check_optimization(
    spec: RunSpec, algorithm: type[Algorithm], backbone: str, train_only: str | None, batch_size: int
) -> None:
    """Raise an error for options of the optimization that do not suit the algorithm, backbone or trained part."""
    name = algorithm.name()
    if spec.batch_norm == "live" and train_only:
        raise ParameterError("batch_norm", "live", f"frozen with train={train_only}, which keeps layers as they are")
    if spec.layer_decay is not None and spec.layer_decay != 1:
        if spec.layer_decay > 1:
            raise ParameterError("layer_decay", spec.layer_decay, "a number above 0 and up to 1")
        if train_only == HEAD:
            raise ParameterError("layer_decay", spec.layer_decay, f"none with train={HEAD}, which trains no layer")
        if backbone == backbones.SMALL or backbone.startswith(backbones.TORCHVISION):
            raise ParameterError("layer_decay", spec.layer_decay, f"none for {backbone}: only timm names the layers")
    if algorithm.only_adam and (spec.optimizer == "adamw" or spec.layer_decay not in (None, 1)):
        raise AidgnError(f"{name} imitates steps of Adam inside an update: leave optimizer and layer_decay out.")
    if spec.accumulate > 1 and not vars(algorithm).get("mean_over_samples", False):
        raise ParameterError(
            "accumulate",
            spec.accumulate,
            f"1 for {name}: its loss is no mean over samples, so gradients of parts of a batch do not add up to the "
            "gradient of the batch",
        )
    if spec.accumulate > batch_size:
        raise ParameterError("accumulate", spec.accumulate, f"at most the batch size, {batch_size}")


def refuse_features(algorithm: type[Algorithm]) -> str:
    """Say why an algorithm cannot train on the features of a frozen network."""
    name = algorithm.name()
    if algorithm not in ALGORITHMS.values():
        return (
            f"{name} does not say that it trains on features. If its objective uses only features and logits, not "
            f"images, add `trains_on_features = True` to the class; else give train={LAST_STAGE} or {ALL}."
        )
    return (
        f"{name} works by training the network below the features, which train={HEAD} freezes. Give "
        f"train={LAST_STAGE} or {ALL}, or leave {name} out."
    )


def _seed_name(dataset: Dataset) -> str:
    """Return the seed component that identifies the data set, whatever the name of its folder."""
    return dataset.name if dataset.name in DATASETS else dataset.fingerprint
