"""One run from top to bottom: set up, train, evaluate, save, finish, and continue after an interruption."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aidgn.algorithms import Algorithm
from aidgn.algorithms.checks import check_terms
from aidgn.backbones import IMAGENET, Preprocessing
from aidgn.data.cache import prepare
from aidgn.data.dataset import check_outside
from aidgn.data.loader import BatchSampler, BatchStore, to_device
from aidgn.devices import choose_device, choose_precision
from aidgn.errors import AidgnError, Interrupted
from aidgn.runs.checkpoints import write_novelty
from aidgn.runs.folder import RunWriter
from aidgn.runs.records import domainbed_names
from aidgn.runs.run_id import folder_name, without_preprocessing
from aidgn.runs.spec import RunSpec
from aidgn.training import distributed, setup
from aidgn.training.averaging import create_average
from aidgn.training.errors import NotFinite, explain_out_of_memory, report_custom_errors
from aidgn.training.evaluation import SplitEvaluator
from aidgn.training.featurizer import Featurizer
from aidgn.training.frozen import FeatureStore
from aidgn.training.interrupt import stoppable
from aidgn.training.loss_terms import LossTerms, check_term_names
from aidgn.training.random_state import random_state, seed_generators, set_random_state
from aidgn.training.schedule import learning_rate_factor
from aidgn.training.trackers import Tracker, Tracking
from aidgn.training.worker_group import train_in_workers

SAVE_SECONDS = 60.0  # a crash loses at most this much work; less where saving takes under 2 % of the time
BLOCK = 64  # steps whose image indices and random numbers are drawn and sent to the device together
log = logging.getLogger("aidgn")

Minibatches = list[tuple[Tensor, Tensor]]
# Phase ("prepare": decode images; "features": compute those of a frozen network; "train"), done, total, a new record
Progress = Callable[[str, int, int, Mapping[str, Any] | None], None]


def train(
    spec: RunSpec,
    out: str | Path = "runs",
    *,
    data_dir: str | Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    cache_dir: str | Path | None = None,
    workers: int | None = None,
    save_seconds: float = SAVE_SECONDS,
    trackers: Sequence[str | Tracker] = (),
    devices: int = 1,
    on_progress: Progress | None = None,
) -> Path:
    """Train one run and return its folder. Leave a finished run as it is, and continue an interrupted one.

    Args:
        spec: The run.
        out: Folder of runs.
        data_dir: Folder of data sets; None for the default.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        precision: Name in `aidgn.devices.PRECISION_NAMES`.
        cache_dir: Folder of decoded images; None for the default.
        workers: Processes that decode images; None for the default.
        save_seconds: Longest time between saves.
        trackers: Names of trackers, or trackers.
        devices: Number of devices that share the work of each step; `device` is the first.
        on_progress: Called with the phase, the number done, the total, and a new record if there is one.
    """
    report = on_progress or (lambda *_: None)
    first_device = choose_device(device)
    precision = choose_precision(precision, first_device)
    dataset = spec.load_dataset(data_dir)
    check_outside(dataset, out)
    prepared = prepare(
        dataset,
        cache_dir=Path(cache_dir) if cache_dir else None,
        workers=workers,
        skip_broken=spec.skip_broken,
        on_progress=lambda done, total: report("prepare", done, total, None),
    )
    dataset = prepared.dataset
    spec = spec.resolved(dataset)
    identity = {**spec.identity(dataset, prepared.content), "precision": precision}
    folder = RunWriter(Path(out) / folder_name(identity), enabled=distributed.rank() == 0)
    earlier = RunWriter(Path(out) / folder_name(without_preprocessing(identity)), enabled=distributed.rank() == 0)
    if earlier.exists and not folder.exists:
        log.warning(
            "%s is a run of version 0.1.0, which keeps ImageNet's mean and standard deviation; %s expects other "
            "values. Move the folder away to train with them.",
            earlier.path,
            spec.backbone,
        )
        identity, folder = without_preprocessing(identity), earlier
    tracking = Tracking(trackers, folder)
    folder.check_identity(identity)
    if folder.exists and folder.finished:
        return folder.path
    if devices != distributed.world_size():
        return train_in_workers(
            devices,
            first_device,
            spec,
            out,
            report,
            data_dir=data_dir,
            precision=precision,
            cache_dir=cache_dir,
            workers=workers,
            save_seconds=save_seconds,
            trackers=trackers,
        )

    num_sources = len(dataset.domains) - len(spec.target)
    with (
        report_custom_errors(spec.algorithm, folder.log_file),
        folder.locked(),
        stoppable() as stopped,
        tracking,
        explain_out_of_memory(spec, num_sources),
    ):
        distributed.barrier()
        folder.remove_temp_files()
        folder.check_identity(identity)
        if folder.exists and folder.finished:  # by another process in the meantime
            return folder.path
        images = setup.load_batches(spec, prepared, identity, first_device, cache_dir, report, stopped)
        small = dataset.small or spec.trains_head
        threads = setup.share_threads(folder.metadata.threads if folder.exists else None, small, devices)
        seed_generators(spec.seed(dataset))
        preprocessing = Preprocessing.recorded(identity)
        algorithm = setup.create_algorithm(spec, len(dataset.classes), num_sources, precision, images)
        trainer = Trainer(spec, algorithm, images, setup.record_args(spec, prepared, identity), preprocessing)
        setup.warn_before_start(spec, algorithm, trainer.average, folder, identity)
        metadata = setup.describe_run(spec, prepared, identity, threads, first_device)
        trainer.restore(folder)
        if trainer.step:
            setup.warn_of_changes(folder, metadata)
        else:
            folder.write_metadata(metadata)
        hardware = setup.describe_device(first_device, devices)
        verb = "continued" if trainer.step else "started"
        folder.log(
            f"{verb} at step {trainer.step} of {spec.steps} on {hardware}, {precision}, torch {torch.__version__}"
        )
        tracking.start({**identity, **spec.hyper_parameters})
        report("train", trainer.step, trainer.steps, None)
        saved, save_interval = time.monotonic(), save_seconds
        for minibatches in trainer.batches():
            trainer.train_step(minibatches)
            record = trainer.evaluate() if trainer.is_evaluation_due() else None
            stop = stopped.is_set()  # read once: a later signal must not claim that this step was saved
            save = stop or time.monotonic() - saved > save_interval
            save = save or (record is not None and not folder.state.exists())
            if save or record is not None:
                trainer.check_finite(folder)
            if record is not None:
                folder.append(record)
                tracking.record(record)
            if save:
                began = time.monotonic()
                folder.save(trainer.state())
                saved = time.monotonic()
                save_interval = min(save_seconds, 50 * (saved - began))
            report("train", trainer.step, trainer.steps, record)
            if record is not None:
                trainer.restart_timer()
            if stop and trainer.step < trainer.steps:
                folder.log(f"interrupted at step {trainer.step}")
                raise Interrupted(
                    f"Stopped at step {trainer.step} of {trainer.steps}; all is saved in {folder.path}. "
                    "The same command continues from there."
                )
        if distributed.rank() == 0:
            trainer.finish(folder)
    return folder.path


class Trainer:
    """A run in training: everything that changes from step to step.

    Args:
        spec: The resolved run.
        algorithm: The algorithm, on the device.
        images: The images of the data set, on the device, or features in their place.
        record_args: What every record says about the run, `args` of DomainBed's records.
        preprocessing: What the network expects.
    """

    def __init__(
        self,
        spec: RunSpec,
        algorithm: Algorithm,
        images: BatchStore,
        record_args: Mapping[str, Any] = {},
        preprocessing: Preprocessing = IMAGENET,
    ):
        dataset = images.decoded.dataset
        self.spec = spec
        self.algorithm = algorithm
        self.images = images
        self.record_args = record_args
        self.steps = int(spec.steps or 0)
        self.eval_every = int(spec.eval_every or 0)
        self.train_transform, eval_transform = setup.build_transforms(images, preprocessing)
        seed = spec.seed(dataset)
        self.evaluator = SplitEvaluator(spec, images, seed, self.train_transform, eval_transform)
        pools = self.evaluator.train_pools
        self.batch_size = int(algorithm.hparams.batch_size)
        self.sampler = BatchSampler(pools, self.batch_size, seed)
        self.steps_per_epoch = min(map(len, pools)) / self.batch_size
        self.average = create_average(spec.average, algorithm, spec.warm_start) if spec.average else None
        self.step = 0
        self.terms = LossTerms(images.device, self.steps)
        self.terms_checked = False
        self.best_accuracy = -1.0  # on the validation splits of the sources
        self.best_step = 0
        self.best_weights: dict[str, Tensor] = {}
        self.restart_timer()

    def batches(self) -> Iterator[Minibatches]:
        """Yield augmented batches of one (x, y) per source domain, from the current step to the last."""
        self.restart_timer()
        while self.step < self.steps:
            indices, uniforms = self.sampler.steps(self.step, min(self.step + BLOCK, self.steps))
            uniforms = to_device(uniforms, self.images.device)
            for (pixels, geometry, labels), uniform in zip(self.images.batches(list(indices)), uniforms, strict=True):
                x = self.train_transform(pixels, geometry, uniform)
                yield list(zip(x.split(self.batch_size), labels.split(self.batch_size), strict=True))

    def train_step(self, minibatches: Minibatches) -> None:
        """Update the algorithm on a batch per source domain."""
        factor = learning_rate_factor(
            self.step, self.steps, self.spec.schedule, self.spec.warmup, self.spec.lr_milestones or ()
        )
        if factor != self.algorithm.lr_factor:
            self.algorithm.scale_lr(factor)
        if isinstance(self.algorithm.featurizer, Featurizer):
            self.algorithm.featurizer.frozen = self.step < self.spec.warm_start
        if self.images.device.type == "cuda":  # elsewhere it would import the compiler, a second, for nothing
            torch.compiler.cudagraph_mark_step_begin()
        terms = self.algorithm.update(minibatches)
        if not self.terms_checked:
            check_terms(self.algorithm.name(), terms, "update")
            check_term_names(self.algorithm.name(), terms)
            self.terms_checked = True
        self.step += 1
        self.terms.add(terms, self.step)
        if self.average:
            self.average.after_step(self.step)

    def restart_timer(self) -> None:
        """Start to measure the time per step."""
        self.timer_start = time.perf_counter()
        self.timer_step = self.step

    def is_evaluation_due(self) -> bool:
        return self.step % self.eval_every == 0 or self.step >= self.steps

    def evaluate(self) -> dict[str, Any]:
        """Return the record of this step, and keep its weights if they are the best so far."""
        if self.images.device.type == "cuda":
            torch.cuda.synchronize()
        step_time = (time.perf_counter() - self.timer_start) / (self.step - self.timer_step)
        return {**self.record(), "step_time": step_time}

    def record(self) -> dict[str, Any]:
        """Return the record of this step without the time per step: metrics, and means of the loss terms."""
        began = time.perf_counter()
        distributed.sync_weights(self.algorithm)
        if self.average and self.average.needs_validation_loss:
            self.average.after_evaluation(self.evaluator.validation_loss(self.algorithm))
        with self.averaged():
            metrics, finite = self.evaluator.metrics(self.algorithm, self.step)
            if not finite:
                self.terms.mark_bad(self.step)
            validation = self.evaluator.mean_validation(metrics)
            if validation > self.best_accuracy:
                self.best_accuracy = validation
                self.best_step = self.step
                self.best_weights = self.copy_weights()
        names = domainbed_names(self.algorithm.name())
        return {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            **self.terms.take_means(),
            **metrics,
            "eval_time": time.perf_counter() - began,
            "args": self.record_args,
            "hparams": {names.get(name, name): value for name, value in self.spec.hyper_parameters.items()},
        }

    def averaged(self) -> AbstractContextManager[None]:
        """Give the algorithm the averaged weights inside the context, if the run averages."""
        return self.average.applied() if self.average else nullcontext()

    def copy_weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.algorithm.state_dict().items()}

    def check_finite(self, folder: RunWriter) -> None:
        """Stop before a loss or weight that is not finite is saved."""
        weights = [parameter.detach() for parameter in self.algorithm.parameters()]
        step = self.terms.first_bad_step(weights, self.step)
        if step is None:
            return
        name = self.terms.culprit()
        subject = f"{name}, which {self.algorithm.name()} reports," if name else "The loss, a weight or a prediction"
        folder.log(f"{subject} was not finite at step {step}")
        raise NotFinite(subject, step, folder.state, self.algorithm.hparams.lr, self.record_args["precision"])

    def state(self) -> dict[str, Any]:
        """Return everything that `load_state` needs to continue as if nothing had happened."""
        return {
            "step": self.step,
            "algorithm": self.algorithm.training_state(),
            **self.terms.state(),
            "best_accuracy": self.best_accuracy,
            "best_step": self.best_step,
            "best_weights": self.best_weights,
            "random": random_state(self.images.device),
            "average": self.average.state() if self.average else None,
        }

    def restore(self, folder: RunWriter) -> None:
        """Continue from the state that the folder holds, if any."""
        try:
            state = folder.load()
            if state is not None:
                self.load_state(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise AidgnError(
                f"{folder.state} does not fit this run ({str(error).splitlines()[0]}): it was saved by another "
                "version. Remove it to start this run from the beginning."
            ) from error

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.algorithm.load_training_state(state["algorithm"])
        self.terms.load_state(state)
        self.best_accuracy = state["best_accuracy"]
        self.best_step = state["best_step"]
        self.best_weights = {name: value.to(self.images.device) for name, value in state["best_weights"].items()}
        if self.average:
            self.average.load_state(state["average"])
        set_random_state(state["random"], self.images.device)

    def finish(self, folder: RunWriter) -> None:
        """Write the weights of the best and the last step, and the norms and angles that novelty is measured by."""
        if self.average and self.average.count < 2 and self.average.first_step(self.eval_every) < self.step:
            folder.log(f"{self.spec.average} averaged nothing")
            log.warning(
                "--average %s averaged nothing: the validation loss had no valley. The weights are those of single "
                "steps.",
                self.spec.average,
            )
        with self.averaged():
            last_weights = self.copy_weights()
        self.algorithm.load_state_dict(self.best_weights)
        novelty = self.evaluator.calibrate(self.algorithm)
        write_novelty(folder.novelty, novelty.to_dict())
        backbone = self.images.network.weights if isinstance(self.images, FeatureStore) else None
        folder.finish(str(self.spec.label()), (self.best_weights, self.best_step), (last_weights, self.step), backbone)
        folder.log(f"finished; step {self.best_step} selected by training-domain validation")
