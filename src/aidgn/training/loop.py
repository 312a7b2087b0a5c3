"""The loop of a run: draws, augmentation, update, records, and all of it that must survive an interruption."""

import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aidgn.algorithms import Algorithm
from aidgn.data import transforms as augment
from aidgn.data.loader import BatchSampler, DeviceImageStore, to_device
from aidgn.errors import AidgnError
from aidgn.novelty import Novelty
from aidgn.runs.folder import RunWriter
from aidgn.runs.records import RECORDED, domainbed_names
from aidgn.runs.spec import RunSpec
from aidgn.training import distributed as parallel
from aidgn.training.averaging import find_average
from aidgn.training.evaluation import Splits, Transform, calibrate, measure
from aidgn.training.featurizer import compiled_by_shape
from aidgn.training.schedule import learning_rate_factor

CHUNK = 8  # images augmented together on the CPU
BLOCK = 64  # steps whose draws are made and sent to the device at once
log = logging.getLogger("aidgn")


class NotFinite(AidgnError):
    """A loss or a weight is a NaN or infinite: by the numbers, or because something on the device is spoilt, which only
    another process can tell."""


class Trainer:
    """The loop and all that changes in it."""

    def __init__(
        self,
        spec: RunSpec,
        algorithm: Algorithm,
        images: DeviceImageStore,
        splits: Splits,
        sources: list[int],
        targets: list[int],
        seed: int,
        args: Mapping[str, Any],
    ):
        self.spec, self.algorithm, self.images, self.args = spec, algorithm, images, args
        self.splits, self.sources, self.targets = splits, sources, targets
        self.steps, self.eval_every = int(spec.steps or 0), int(spec.eval_every or 0)
        batch_size = algorithm.integer("batch_size")
        pools = [splits.inside[domain] for domain in sources]
        self.draws = BatchSampler(pools, batch_size, seed)
        self.steps_per_epoch = min(map(len, pools)) / batch_size
        dataset = images.decoded.dataset
        self.train_transform, self.clean_transform = transforms(
            dataset.image_size, dataset.info.augment, images.exact_fit, images.device.type == "cuda"
        )

        self.average = find_average(spec.average)(algorithm) if spec.average else None

        self.step = 0
        self.sums: dict[str, Tensor] = {}  # of the terms since the last record, on the device
        self.counts: dict[str, int] = {}
        self.strange: list[str] = []  # terms that were not finite in the last record
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
                rate = learning_rate_factor(
                    self.step, self.steps, self.spec.schedule, self.spec.warmup, self.spec.lr_milestones or ()
                )
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

    def note(self, terms: Mapping[str, Tensor | float]) -> None:
        """Sum the terms on the device; nothing is read back until the next record. An own `update` may give floats."""
        self.algorithm.check_terms(terms, "update")
        values = {
            name: torch.as_tensor(term, dtype=torch.float32, device=self.images.device).detach()
            for name, term in terms.items()
        }
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
            self.counts[name] = self.counts.get(name, 0) + 1
        fine = torch.stack(list(values.values())).isfinite().all()
        self.not_finite = torch.where(fine | (self.not_finite < self.step), self.not_finite, self.step)

    def evaluate(self) -> dict[str, Any]:
        """The record of this step: accuracies that selection needs, means of the loss terms since the last record."""
        began = time.perf_counter()
        parallel.sync_weights(self.algorithm)
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
        accuracies, losses = measure(self.algorithm, self.images, groups, self.clean_transform)
        if np.isnan(losses).any():  # of logits, though training may have seen none
            self.not_finite.clamp_(max=self.step)
        values = dict(zip(names, accuracies, strict=True))
        if self.spec.augment_validation:
            values |= self.augmented_validation()
        validation = float(np.mean([values[f"env{domain}_out_acc"] for domain in self.sources]))
        if validation > self.best_accuracy:
            self.best_accuracy, self.best_step = validation, self.step
            self.best_weights = {name: tensor.clone() for name, tensor in self.algorithm.state_dict().items()}
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        for name in means:
            if re.fullmatch(RECORDED, name):
                raise AidgnError(
                    f"{self.algorithm.name()} gives a term `{name}`, which is something else in records. "
                    "Call it otherwise."
                )
        self.strange = [name for name, mean in means.items() if not np.isfinite(mean)]
        self.sums, self.counts = {}, {}
        return {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            **means,
            **values,
            "eval_time": time.perf_counter() - began,
            "args": self.args,
            "hparams": {
                domainbed_names(self.algorithm.name()).get(name, name): value
                for name, value in self.spec.hyper_parameters.items()
            },
        }

    def augmented_validation(self) -> dict[str, float]:
        """Accuracies on source `out` splits of augmented images, their draws fixed by the step."""
        generator = torch.Generator().manual_seed(self.draws.seed + self.step)

        def transform(pixels: Tensor, geometry: Tensor) -> Tensor:
            uniforms = torch.rand((len(pixels), augment.UNIFORMS), generator=generator).to(pixels.device)
            return self.train_transform(pixels, geometry, uniforms)

        groups = [self.splits.outside[domain] for domain in self.sources]
        values, _ = measure(self.algorithm, self.images, groups, transform, shared=False)
        return {f"env{domain}_out_acc": value for domain, value in zip(self.sources, values, strict=True)}

    def check_finite(self, folder: RunWriter) -> None:
        """Stop if a loss or a weight is not a finite number, before anything of it is saved."""
        weights = [parameter.detach() for parameter in self.algorithm.parameters()]
        sound = torch.stack([norm.float() for norm in torch._foreach_norm(weights)]).isfinite().all()
        step = int(torch.where(sound, self.not_finite, self.not_finite.clamp(max=self.step)))
        if step <= self.steps:
            what = "The loss, a weight or a prediction"
            strange = self.strange or [name for name, total in self.sums.items() if not total.isfinite()]
            if strange and "loss" not in strange:
                what = f"{strange[0]}, which {self.algorithm.name()} reports,"
            folder.log(f"{what} was not finite at step {step}")
            kept = f"The last good state is in {folder.state}" if folder.state.exists() else "No state was saved yet"
            also = "" if self.args["precision"] == "float32" else ", or --precision float32"
            raise NotFinite(
                f"{what} became NaN or infinite at step {step}. {kept}. Try a smaller "
                f"learning rate, for example --set lr={self.algorithm.number('lr') / 10:g}{also}."
            )

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "algorithm": self.algorithm.training_state(),
            "sums": self.sums,
            "counts": self.counts,
            "best_accuracy": self.best_accuracy,
            "best_step": self.best_step,
            "best_weights": self.best_weights,
            "random": random_state(self.images.device),
            "average": self.average.state() if self.average else None,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        device = self.images.device
        self.algorithm.load_training_state(state["algorithm"])
        self.step, self.counts = state["step"], dict(state["counts"])
        self.sums = {name: value.to(device) for name, value in state["sums"].items()}
        self.best_accuracy, self.best_step = state["best_accuracy"], state["best_step"]
        self.best_weights = {name: value.to(device) for name, value in state["best_weights"].items()}
        if self.average:
            self.average.load_state(state["average"])
        set_random_state(state["random"], device)

    def novelty(self) -> Novelty:
        """What is usual, by the sources' `out` images, for the weights of the selected step; these stay in place."""
        self.algorithm.load_state_dict(self.best_weights)
        groups = [self.splits.outside[domain] for domain in self.sources]
        return calibrate(self.algorithm, self.images, groups, self.clean_transform)

    def last_weights(self) -> dict[str, Tensor]:
        """What is saved of the last step."""
        if self.average is None:
            return self.algorithm.state_dict()
        with self.average.in_place():
            return {name: tensor.clone() for name, tensor in self.algorithm.state_dict().items()}


def transforms(size: int, augmented: bool, exact_fit: bool, compiled: bool) -> tuple[Callable[..., Tensor], Transform]:
    """The training and the evaluation transform of uint8 images."""
    train, clean = _compiled_augment() if compiled else (_in_chunks(augment.augment), augment.clean)
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
    return VerifiedCompile(augment.augment), VerifiedCompile(augment.clean)


class VerifiedCompile:
    """A transform, compiled, that is held against itself as it is written in the first calls with batches of a shape. A
    compiler's fault would show in worse numbers at the end and nowhere else. Where the two differ, it is not compiled.
    """

    CALLS, IMAGES = 3, 8  # that are compared
    NEAR, SHARE = 0.05, 0.02  # rounding changes values by less; an image differs if more than this share does
    # One image may: where a crop's side is half way between two whole numbers, rounding moves it by a pixel.

    def __init__(self, function: Callable[..., Tensor]):
        self.plain = function
        self.compiled: Callable[..., Tensor] | None = compiled_by_shape(function)
        self.calls: Counter[Hashable] = Counter()

    def __call__(self, *tensors: Tensor, **settings: Any) -> Tensor:
        if self.compiled is None:
            return self.plain(*tensors, **settings)
        x = self.compiled(*tensors, **settings)
        kind = tensors[0].shape, *settings.items()
        if self.calls[kind] < self.CALLS:
            self.calls[kind] += 1
            some = slice(None, None, max(len(x) // self.IMAGES, 1))  # of all domains
            off = (x[some] - self.plain(*(tensor[some] for tensor in tensors), **settings)).abs().flatten(1)
            differ = int(((~(off < self.NEAR)).float().mean(1) > self.SHARE).sum())  # a NaN does
            if differ > 1 or not off.isfinite().all():
                log.warning(
                    "Of %d images prepared by compiled code %d differ from what they should be, probably by a "
                    "fault of PyTorch %s. From here on the code is not compiled, which is slower.",
                    len(off),
                    differ,
                    torch.__version__,
                )
                self.compiled = None
                return self.plain(*tensors, **settings)
        return x


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every global generator that the run draws from, in types that load without running code."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0], device)
