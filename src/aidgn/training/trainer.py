"""One run from top to bottom: set up, train, evaluate, save, finish, and continue after an interruption."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from aidgn.algorithms import Algorithm
from aidgn.backbones import IMAGENET, Preprocessing
from aidgn.data import Dataset
from aidgn.data.loader import BatchSampler, BatchStore, inverse_class_shares, to_device
from aidgn.devices import begin_pass, choose_device, choose_precision, synchronize
from aidgn.errors import Interrupted
from aidgn.runs.checkpoints import write_values
from aidgn.runs.folder import RunWriter
from aidgn.runs.options import CLASS_WEIGHTS, SAMPLING
from aidgn.runs.spec import RunSpec
from aidgn.training import distributed, setup
from aidgn.training.averaging import applied, create_average
from aidgn.training.best_weights import BestWeights, copy_weights
from aidgn.training.errors import explain_state_mismatch
from aidgn.training.evaluation import SplitEvaluator
from aidgn.training.featurizer import Featurizer
from aidgn.training.interrupt import SAVE_SECONDS, SaveTimer
from aidgn.training.kernel_cache import compile_ahead
from aidgn.training.loss_terms import LossTerms
from aidgn.training.prepare import Progress, locked, prepare_run
from aidgn.training.random_state import random_state, seed_generators, set_random_state
from aidgn.training.schedule import learning_rate_factor
from aidgn.training.trackers import Tracker, Tracking
from aidgn.training.worker_group import train_in_workers

BLOCK = 64  # steps whose image indices and random numbers are drawn and sent to the device together

Minibatches = list[tuple[Tensor, Tensor]]


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
    dataset: Dataset | None = None,
) -> Path:
    """Train one run and return its folder. Leave a finished run as it is, and continue an interrupted one.

    Args:
        spec: The run.
        out: Folder of runs.
        data_dir: Folder of data sets; None for the default.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        precision: Name in `aidgn.devices.PRECISION_NAMES`.
        cache_dir: Folder of decoded images; None for the default.
        workers: Processes that decode images; None for the default.
        save_seconds: Longest time between saves.
        trackers: Names of trackers, or trackers.
        devices: Number of devices that share the work of each step; `device` is the first.
        on_progress: Called with the phase, the number done, the total, and a new record if there is one.
        dataset: Data set to use instead of the one that `spec` names, at its image size; on one device only.
    """
    report = on_progress or (lambda *_: None)
    first_device = choose_device(device)
    precision = choose_precision(precision, first_device)
    compile_ahead(first_device)
    run = prepare_run(spec, out, data_dir, cache_dir, workers, precision, report, dataset)
    folder = run.folder
    tracking = Tracking(trackers, folder)
    if run.finished:
        folder.check_records()
        folder.tidy()
        return folder.path
    if devices != distributed.world_size():
        options: dict[str, Any] = {"data_dir": data_dir, "cache_dir": cache_dir, "precision": precision}
        options |= {"workers": workers, "save_seconds": save_seconds, "trackers": trackers}
        return train_in_workers(devices, first_device, run.spec, out, report, **options)

    with locked(run, tracking) as stopped:
        if run.finished:  # by another process in the meantime
            return folder.path
        images = setup.load_batches(run, first_device, cache_dir, report, stopped)
        recorded = folder.metadata.threads if folder.exists else None
        threads = setup.share_threads(recorded, run.dataset.small or spec.trains_head, devices)
        seed_generators(run.spec.seed(run.dataset))
        algorithm = setup.create_algorithm(run, images)
        trainer = Trainer(run.spec, algorithm, images, setup.constant_fields(run), run.preprocessing)
        setup.warn_before_start(run, algorithm, trainer.average)
        with explain_state_mismatch(folder.state):
            trainer.load_state(folder.load())
        setup.note_start(run, trainer.step, threads, first_device, devices)
        tracking.start({**run.identity, **run.spec.hyper_parameters})
        report("train", trainer.step, trainer.steps, None)
        save_timer = SaveTimer(save_seconds)
        for minibatches in trainer.batches():
            trainer.train_step(minibatches)
            record = trainer.evaluate() if trainer.is_evaluation_due() else None
            stop = stopped.is_set()  # read once: a later signal must not claim that this step was saved
            save = stop or save_timer.is_due() or (record is not None and not folder.state.exists())
            if save or record is not None:
                trainer.terms.check_finite(algorithm, trainer.step, folder)
            if record is not None:
                folder.append(record)
                tracking.record(record)
            if save:
                with save_timer.measured():
                    folder.save(trainer.state())
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
            setup.warn_of_no_average(run, trainer.average)
            trainer.finish(folder)
    return folder.path


class Trainer:
    """A run in training: everything that changes from step to step.

    Args:
        spec: The resolved run.
        algorithm: The algorithm, on the device.
        images: The images of the data set on the device, or their features.
        constants: Fields that all records share.
        preprocessing: How images are prepared for the network.
    """

    def __init__(
        self,
        spec: RunSpec,
        algorithm: Algorithm,
        images: BatchStore,
        constants: Mapping[str, Any] = {},
        preprocessing: Preprocessing = IMAGENET,
    ):
        self.spec = spec
        self.algorithm = algorithm
        self.images = images
        self.device = images.device
        self.constants = constants
        self.steps = int(spec.steps or 0)
        self.eval_every = int(spec.eval_every or 0)
        self.train_transform, eval_transform = images.transforms(preprocessing.transform_settings())
        seed = spec.seed(images.decoded.dataset)
        self.evaluator = SplitEvaluator(spec, images, seed, self.train_transform, eval_transform)
        self.batch_size = int(algorithm.hparams.batch_size)
        pools, labels = self.evaluator.train_pools, images.decoded.dataset.labels
        self.sampler = BatchSampler(pools, self.batch_size, seed, labels if spec.balance == SAMPLING else None)
        if spec.balance == CLASS_WEIGHTS:
            algorithm.class_weights = inverse_class_shares(labels, pools, algorithm.num_classes).to(self.device)
        self.steps_per_epoch = min(map(len, self.evaluator.train_pools)) / self.batch_size
        self.average = create_average(spec.average, algorithm, spec.warm_start) if spec.average else None
        self.terms = LossTerms(algorithm.name(), self.device, self.steps)
        self.best = BestWeights(keep_last=spec.train_on_all)
        self.step = 0
        self.restart_timer()

    def batches(self) -> Iterator[Minibatches]:
        """Yield augmented batches of one (x, y) per source domain, from the current step to the last."""
        self.restart_timer()
        while self.step < self.steps:
            indices, uniforms = self.sampler.steps(self.step, min(self.step + BLOCK, self.steps))
            uniforms = to_device(uniforms, self.device)
            for (pixels, geometry, labels), uniform in zip(self.images.batches(list(indices)), uniforms, strict=True):
                x = self.train_transform(pixels, geometry, uniform)
                yield list(zip(x.split(self.batch_size), labels.split(self.batch_size), strict=True))

    def train_step(self, minibatches: Minibatches) -> None:
        """Update the algorithm on a batch per source domain."""
        spec = self.spec
        factor = learning_rate_factor(self.step, self.steps, spec.schedule, spec.warmup, spec.lr_milestones or ())
        if factor != self.algorithm.lr_factor:
            self.algorithm.scale_lr(factor)
        if isinstance(self.algorithm.featurizer, Featurizer):
            self.algorithm.featurizer.frozen = self.step < spec.warm_start
        begin_pass()
        terms = self.algorithm.update(minibatches)
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
        synchronize(self.device)
        began = time.perf_counter()
        distributed.sync_weights(self.algorithm)
        if self.average and self.average.needs_validation_loss:
            self.average.after_evaluation(self.evaluator.validation_loss(self.algorithm))
        with applied(self.average):
            metrics, finite = self.evaluator.metrics(self.algorithm, self.step)
            if not finite:
                self.terms.mark_bad(self.step)
            self.best.update(self.evaluator.mean_validation(metrics), self.step, self.algorithm)
        return {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            **self.terms.take_means(),
            **metrics,
            "eval_time": time.perf_counter() - began,
            **self.constants,
            "step_time": (began - self.timer_start) / (self.step - self.timer_step),
        }

    def state(self) -> dict[str, Any]:
        """Return everything that `load_state` needs to continue as if nothing had happened."""
        return {
            "step": self.step,
            "algorithm": self.algorithm.training_state(),
            **self.terms.state(),
            **self.best.state(),
            "random": random_state(self.device),
            "average": self.average.state() if self.average else None,
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; None to start from the beginning."""
        if state is None:
            return
        self.step = state["step"]
        self.algorithm.load_training_state(state["algorithm"])
        self.terms.load_state(state)
        self.best.load_state(state, self.device)
        if self.average:
            self.average.load_state(state["average"])
        set_random_state(state["random"], self.device)

    def finish(self, folder: RunWriter) -> None:
        """Write the weights of the best and the last step, and the norms and angles for warnings of novelty."""
        with applied(self.average):
            last = copy_weights(self.algorithm)
        self.algorithm.load_state_dict(self.best.weights)
        if not self.spec.train_on_all:  # otherwise there are no validation images to measure
            write_values(folder.novelty, self.evaluator.measure_novelty(self.algorithm).to_dict())
        best = self.best.weights, self.best.step
        folder.finish(str(self.spec.label()), best, (last, self.step), self.images.frozen_weights)
        folder.log(f"finished; step {self.best.step}, {self.best.reason}")
