"""A run, top to bottom: data, network, loop, records, and going on where it stopped."""

import platform
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import aidgn
from aidgn import backbones
from aidgn.algorithms import Algorithm, find
from aidgn.data import augment
from aidgn.data.batches import Draws, Images, to_device
from aidgn.data.cache import Prepared, prepare
from aidgn.errors import UserError
from aidgn.records import DOMAINBED_NAMES
from aidgn.training.averaging import AVERAGES
from aidgn.training.evaluation import Splits, Transform, measure
from aidgn.training.featurizer import choose_device, choose_precision, featurizer
from aidgn.training.folder import RunFolder
from aidgn.training.spec import RunSpec, folder_name

CHUNK = 8  # images augmented together on the CPU
THREADS = torch.get_num_threads()  # of this machine
BLOCK = 64  # steps whose draws are made and sent to the device at once
SAVE_SECONDS = 60.0  # at most this much work is lost by a crash; less where saving takes under 2 % of the time

Progress = Callable[[str, int, int, Mapping[str, Any] | None], None]  # what, done, of how many, a new record


class Interrupted(UserError):
    """Stopped by Ctrl-C or SIGTERM after saving; the same command goes on."""

    exit_code = 130


def train(spec: RunSpec, out: str | Path = "runs", *, data_dir: str | Path | None = None, device: str = "auto",
          precision: str = "auto", cache_dir: str | Path | None = None, workers: int | None = None,
          save_seconds: float = SAVE_SECONDS, on_progress: Progress | None = None) -> Path:
    """Train one run and return its folder. A finished run is left as it is, an interrupted one is continued."""
    report = on_progress or (lambda *_: None)
    where = choose_device(device)
    precision = choose_precision(precision, where)
    prepared = prepare(spec.load_dataset(data_dir), cache_dir=Path(cache_dir) if cache_dir else None, workers=workers,
                       skip_broken=spec.skip_broken,
                       on_progress=lambda done, total: report("prepare", done, total, None))
    dataset = prepared.dataset
    spec = spec.resolved(dataset)
    identity = {**spec.identity(dataset, prepared.content), "precision": precision}
    folder = RunFolder(Path(out) / folder_name(identity))
    if folder.about(identity) and folder.finished:
        return folder.path

    with folder.locked(), _stoppable() as stopped:
        folder.tidy()
        about = folder.about(identity)
        if about and folder.finished:  # by another process, meanwhile
            return folder.path
        # Sums on the CPU depend on the number of threads, so it belongs to the run, wherever it is continued.
        threads = int(about.get("threads") or (1 if dataset.small else THREADS))
        torch.set_num_threads(threads)
        seed = spec.seed(dataset)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

        targets = [dataset.domains.index(name) for name in spec.target]
        sources = [domain for domain in range(len(dataset.domains)) if domain not in targets]
        splits = Splits.of(dataset, spec.trial)
        for domain, outside in enumerate(splits.outside):
            if not len(outside):
                raise UserError(f"Domain {dataset.domains[domain]} has {len(dataset.indices(domain))} images; at least "
                                "5 are needed to set a fifth of them aside for validation.")
        kind = find(spec.algorithm)
        network = featurizer(str(spec.backbone), spec.weights, 3 + kind.extra_channels, precision, where)
        algorithm = kind(network, len(dataset.classes), len(sources), **spec.hyper_parameters).to(where)
        algorithm.train()
        args = {"dataset": dataset.name, "algorithm": spec.label(), "test_envs": targets, "trial_seed": spec.trial,
                "hparams_seed": spec.draw, "seed": seed, "steps": spec.steps, "domains": dataset.domains,
                "backbone": spec.backbone, "weights": identity["weights"], "precision": precision,
                "skipped": len(prepared.skipped), "task": "domain_generalization", "holdout_fraction": 0.2}
        run = _Run(spec, algorithm, _images(prepared, where), splits, sources, targets, seed, args)
        folder.claim(identity, {"steps": spec.steps, "classes": dataset.classes, "domains": dataset.domains,
                                "image_size": dataset.image_size, "skipped": prepared.skipped,
                                "stride_first": backbones.says_stride_first(str(spec.backbone), spec.weights),
                                "precision": precision, "threads": threads, "device": _describe(where),
                                "aidgn": aidgn.__version__, "torch": torch.__version__,
                                "python": platform.python_version()})
        state = folder.load()
        if state is not None:
            try:
                run.load_state(state)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise UserError(f"{folder.state} does not fit this run ({str(error).splitlines()[0]}): it was saved by "
                                "another version. Remove it to start this run from the beginning.") from error
        folder.log(f"{'continued' if run.step else 'started'} at step {run.step} of {spec.steps} on "
                   f"{_describe(where)}, {precision}, torch {torch.__version__}")
        report("train", run.step, run.steps, None)
        saved, wait = time.monotonic(), save_seconds
        for record in run.go():
            first = record is not None and not folder.state.exists()
            due = stopped.is_set() or first or time.monotonic() - saved > wait
            if due or record is not None:
                run.check_finite(folder)
            if record is not None:
                folder.append(record)
            if due:
                began = time.monotonic()
                folder.save(run.state())
                saved = time.monotonic()
                wait = min(save_seconds, 50 * (saved - began))
            report("train", run.step, run.steps, record)
            if stopped.is_set() and run.step < run.steps:
                folder.log(f"interrupted at step {run.step}")
                raise Interrupted(f"Stopped at step {run.step} of {run.steps}; all is saved in {folder.path}. "
                                  "The same command goes on from there.")
        folder.finish(spec.label(), (run.best_weights, run.best_step), (run.last_weights(), run.step))
        folder.log(f"finished; step {run.best_step} selected by training-domain validation")
    return folder.path


class _Run:
    """The loop and all that changes in it."""

    def __init__(self, spec: RunSpec, algorithm: Algorithm, images: Images, splits: Splits, sources: list[int],
                 targets: list[int], seed: int, args: Mapping[str, Any]):
        self.spec, self.algorithm, self.images, self.args = spec, algorithm, images, args
        self.splits, self.sources, self.targets = splits, sources, targets
        self.steps, self.eval_every = int(spec.steps or 0), int(spec.eval_every or 0)
        batch_size = algorithm.integer("batch_size")
        pools = [splits.inside[domain] for domain in sources]
        self.draws = Draws(pools, batch_size, seed)
        self.steps_per_epoch = min(map(len, pools)) / batch_size
        dataset = images.prepared.dataset
        self.train_transform, self.clean_transform = transforms(
            dataset.image_size, dataset.augment, images.exact_fit, images.device.type == "cuda")

        self.average = AVERAGES[spec.average](algorithm) if spec.average else None

        self.step = 0
        self.sums: dict[str, Tensor] = {}  # of the terms since the last record, on the device
        self.counts: dict[str, int] = {}
        self.not_finite = torch.full((), self.steps + 1, device=images.device)  # the first step with a NaN or infinity
        self.best_accuracy, self.best_step = -1.0, 0
        self.best_weights: dict[str, Tensor] = {}

    def go(self) -> Iterator[dict[str, Any] | None]:
        """Train to the end; yields after every step, with a record where there is one."""
        size = self.draws.batch_size
        began, began_step = time.perf_counter(), self.step
        while self.step < self.steps:
            stop = min(self.step + BLOCK, self.steps)
            indices, uniforms = self.draws.steps(self.step, stop)
            uniforms = to_device(uniforms, self.images.device)
            for (pixels, geometry, labels), uniform in zip(self.images.batches(list(indices)), uniforms, strict=True):
                rate = 0.5 ** sum(self.step >= milestone for milestone in self.spec.lr_milestones or ())
                if rate != self.algorithm.lr_factor:
                    self.algorithm.scale_lr(rate)
                x = self.train_transform(pixels, geometry, uniform)
                if x.is_cuda:  # elsewhere it would import the compiler, a second, for nothing
                    torch.compiler.cudagraph_mark_step_begin()
                terms = self.algorithm.update(list(zip(x.split(size), labels.split(size), strict=True)))
                self.step += 1
                self.note(terms)
                if self.average:
                    self.average.after_step(self.step)
                if self.step % self.eval_every and self.step < self.steps:
                    yield None
                    continue
                if self.images.device.type == "cuda":
                    torch.cuda.synchronize()
                step_time = (time.perf_counter() - began) / (self.step - began_step)
                yield {**self.evaluate(), "step_time": step_time}
                began, began_step = time.perf_counter(), self.step

    def note(self, terms: Mapping[str, Tensor]) -> None:
        """Sum the terms on the device; nothing is read back until the next record."""
        for name, value in terms.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
            self.counts[name] = self.counts.get(name, 0) + 1
        fine = torch.stack(list(terms.values())).isfinite().all()
        self.not_finite = torch.where(fine | (self.not_finite < self.step), self.not_finite, self.step)

    def evaluate(self) -> dict[str, Any]:
        """The record of this step: accuracies that selection needs, means of the loss terms since the last record."""
        began = time.perf_counter()
        if self.average is None:
            return self.record(began)
        if self.average.needs_validation_loss:
            groups = [self.splits.outside[domain] for domain in self.sources]
            _, losses = measure(self.algorithm, self.images, groups, self.clean_transform)
            self.average.after_evaluation(float(np.mean(losses)))
        with self.average.in_place():
            return self.record(began)

    def record(self, began: float) -> dict[str, Any]:
        names, groups = [], []
        for domain in sorted({*self.sources, *self.targets}):
            if domain in self.targets or self.spec.evaluate_source_in:
                names.append(f"env{domain}_in_acc")
                groups.append(self.splits.inside[domain])
            if domain in self.targets or not self.spec.augment_validation:
                names.append(f"env{domain}_out_acc")
                groups.append(self.splits.outside[domain])
        values = dict(zip(names, measure(self.algorithm, self.images, groups, self.clean_transform)[0], strict=True))
        if self.spec.augment_validation:
            values |= self.augmented_validation()
        validation = float(np.mean([values[f"env{domain}_out_acc"] for domain in self.sources]))
        if validation > self.best_accuracy:
            self.best_accuracy, self.best_step = validation, self.step
            self.best_weights = {name: tensor.clone() for name, tensor in self.algorithm.state_dict().items()}
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return {"step": self.step, "epoch": self.step / self.steps_per_epoch, **means, **values,
                "eval_time": time.perf_counter() - began, "args": self.args,
                "hparams": {DOMAINBED_NAMES.get(name, name): value
                            for name, value in self.spec.hyper_parameters.items()}}

    def augmented_validation(self) -> dict[str, float]:
        """Accuracies on source `out` splits of augmented images, their draws fixed by the step."""
        generator = torch.Generator().manual_seed(self.draws.seed + self.step)

        def transform(pixels: Tensor, geometry: Tensor) -> Tensor:
            uniforms = torch.rand((len(pixels), augment.UNIFORMS), generator=generator).to(pixels.device)
            return self.train_transform(pixels, geometry, uniforms)

        groups = [self.splits.outside[domain] for domain in self.sources]
        values, _ = measure(self.algorithm, self.images, groups, transform)
        return {f"env{domain}_out_acc": value for domain, value in zip(self.sources, values, strict=True)}

    def check_finite(self, folder: RunFolder) -> None:
        """Stop if a loss or a weight is not a finite number, before anything of it is saved."""
        weights = [parameter.detach() for parameter in self.algorithm.parameters()]
        sound = torch.stack([norm.float() for norm in torch._foreach_norm(weights)]).isfinite().all()
        step = int(torch.where(sound, self.not_finite, self.not_finite.clamp(max=self.step)))
        if step <= self.steps:
            folder.log(f"the loss was not finite at step {step}")
            kept = f"The last good state is in {folder.state}" if folder.state.exists() else "No state was saved yet"
            also = "" if self.args["precision"] == "float32" else ", or --precision float32"
            raise UserError(f"The loss or a weight became NaN or infinite at step {step}. {kept}. Try a smaller "
                            f"learning rate, for example --set lr={self.algorithm.number('lr') / 10:g}{also}.")

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "algorithm": self.algorithm.training_state(), "sums": self.sums,
                "counts": self.counts, "best_accuracy": self.best_accuracy, "best_step": self.best_step,
                "best_weights": self.best_weights, "random": _random_state(),
                "average": self.average.state() if self.average else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        device = self.images.device
        self.algorithm.load_training_state(state["algorithm"])
        self.step, self.counts = state["step"], dict(state["counts"])
        self.sums = {name: value.to(device) for name, value in state["sums"].items()}
        self.best_accuracy, self.best_step = state["best_accuracy"], state["best_step"]
        self.best_weights = {name: value.to(device) for name, value in state["best_weights"].items()}
        if self.average:
            self.average.load_state(state["average"])
        _set_random_state(state["random"])

    def last_weights(self) -> dict[str, Tensor]:
        """What is saved of the last step."""
        if self.average is None:
            return self.algorithm.state_dict()
        with self.average.in_place():
            return {name: tensor.clone() for name, tensor in self.algorithm.state_dict().items()}


def transforms(size: int, augmented: bool, exact_fit: bool, compiled: bool) -> tuple[Callable[..., Tensor], Transform]:
    """The training and the evaluation transform of uint8 images."""
    train, clean = _compiled_augment() if compiled else (_in_chunks(augment.augment), _in_chunks(augment.clean))
    clean_transform = partial(clean, size=size, exact_fit=exact_fit)
    if not augmented:
        return (lambda pixels, geometry, uniforms: clean_transform(pixels, geometry)), clean_transform
    return partial(train, size=size), clean_transform


def _in_chunks(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A few images at a time, whose intermediate results stay in a processor's cache."""
    def apply(*tensors: Tensor, **settings: Any) -> Tensor:
        chunks = zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True)
        return torch.cat([function(*chunk, **settings) for chunk in chunks])
    return apply


@lru_cache(1)
def _compiled_augment() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return (torch.compile(augment.augment, dynamic=False), torch.compile(augment.clean, dynamic=False))


_loaded: dict[tuple[str, str, int, torch.device], Images] = {}


def _images(prepared: Prepared, device: torch.device) -> Images:
    """The images on the device; those of the last run in this process, if they are the same."""
    key = prepared.content, prepared.dataset.fingerprint, prepared.dataset.image_size, device
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = Images(prepared, device)
    return _loaded[key]


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets, so that a run ends between two steps; the second one kills."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before: dict[int, Any] = {}

    def stop(number: int, _frame: object) -> None:
        stopped.set()
        signal.signal(number, before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for key, handler in before.items():
            signal.signal(key, handler)


def _random_state() -> dict[str, Any]:
    """The state of every global generator, in types that load without running code."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss],
            "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
