"""Load the model of a trained run and classify images, prepared exactly as in its evaluation."""

import glob
import logging
import os
import shlex
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS, Algorithm, find
from aidgn.algorithms.base import class_vectors
from aidgn.algorithms.custom import source_of
from aidgn.algorithms.search_space import resolve
from aidgn.data.dataset import walk_images
from aidgn.data.images import IMAGE_SUFFIXES, largest_slot
from aidgn.data.loader import to_device
from aidgn.data.transforms import clean
from aidgn.devices import choose_device, choose_precision
from aidgn.errors import AidgnError, plural
from aidgn.inference.image_stream import ImageLike, OnBroken, Pixels, streamed
from aidgn.novelty import RATE, Novelty, norms_and_angles, outputs
from aidgn.runs.checkpoints import read_novelty, read_weights
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import MODEL_NEEDS, DamagedMetadata, RunMetadata
from aidgn.training.evaluation import eval_batch_size
from aidgn.training.featurizer import Featurizer

log = logging.getLogger("aidgn")


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for N images.

    Attributes:
        labels: The most probable class of each image.
        probabilities: float64 [N, C], in the order of `classes`.
        classes: Names of the classes.
        logits: float32 [N, C], on the CPU.
        features: float32 [N, n], on the CPU: input of the classifier.
        warnings: For each image the difference from the training images, or None; None if the model cannot warn.
    """

    labels: list[str]
    probabilities: np.ndarray
    classes: list[str]
    logits: Tensor
    features: Tensor
    warnings: list[str | None] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def top(self, k: int) -> list[list[tuple[str, float]]]:
        """Return the k most probable classes of each image with their probabilities, most probable first."""
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :k]
        values = np.take_along_axis(self.probabilities, order, axis=1)
        return [
            [(self.classes[c], p) for c, p in zip(row, ps, strict=True)]
            for row, ps in zip(order.tolist(), values.tolist(), strict=True)
        ]


class Model:
    """A trained network with its classes, from `load_model`.

    An image is a path, a PIL image, an array [H, W, 3] or [H, W] of uint8, or a tensor [3, H, W] of uint8. Numbers with
    a fraction go from 0 to 1 and are rounded to 8 bits. Algorithms that describe a domain by neighbouring images (ARM,
    MTL) use consecutive images.
    """

    def __init__(
        self,
        network: Algorithm,
        algorithm: str,
        classes: list[str],
        domains: list[str],
        image_size: int,
        device: torch.device,
        novelty: Novelty | None = None,
        false_alarms: float = RATE,
    ):
        self.network = network.to(device).eval()
        self.algorithm = algorithm
        self.classes = classes
        self.domains = domains
        self.image_size = image_size
        self.device = device
        self.novelty = novelty
        self.false_alarms = false_alarms
        self.slot = largest_slot(image_size)  # larger images are shrunk to this side first, as in the cache
        self.batch_size = eval_batch_size(network, device)
        if device.type == "cuda":
            precision = getattr(network.featurizer, "precision", "float32")
            backbones.freeze_folded(network, torch.bfloat16 if precision == "bfloat16" else torch.float32)
        self.vectors = None if novelty is None or novelty.weight is None else torch.as_tensor(novelty.weight).to(device)
        self.uploads = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.in_flight = 0 if self.uploads is None else 2  # batches queued on the GPU while results are read

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> Prediction:
        """Predict labels and probabilities of one or many images."""
        parts = [outputs for _, outputs in self.compute_batches(as_list(images))]
        none = torch.empty(0, dtype=torch.float64)
        empty = Outputs(torch.empty(0, self.network.num_features), torch.empty(0, len(self.classes)), none, none)
        return self.prediction(Outputs(*(torch.cat(tensors) for tensors in zip(*(parts or [empty]), strict=True))))

    def logits(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Return logits [N, C], float32 on the CPU."""
        return self.predict(images).logits

    def prediction(self, outputs: "Outputs") -> Prediction:
        """Turn outputs of the network into a prediction."""
        probabilities = softmax(outputs.logits.numpy())
        if not np.isfinite(probabilities).all():
            raise AidgnError(
                f"The {self.algorithm} model gives NaN or infinite outputs: its weights are damaged or its "
                "training diverged. Copy the model from its source again, or train again."
            )
        warnings = None
        if self.novelty is not None:
            warnings = self.novelty.warnings_of(outputs.norms.numpy(), outputs.angles.numpy(), self.false_alarms)
        return Prediction(
            [self.classes[c] for c in probabilities.argmax(1)],
            probabilities,
            self.classes,
            outputs.logits,
            outputs.features,
            warnings,
        )

    def batches(
        self, images: Iterable[ImageLike], on_broken: OnBroken | None = None
    ) -> Iterator[tuple[list[ImageLike], Prediction]]:
        """Yield images and their predictions batch by batch, for more images than memory holds.

        Args:
            images: The images. The next ones are decoded while the network computes.
            on_broken: Receives each image that cannot be read, and the error. By default the error is raised.
        """
        with closing(self.compute_batches(images, on_broken)) as batches:
            for readable, outputs in batches:
                yield readable, self.prediction(outputs)

    def compute_batches(
        self, images: Iterable[ImageLike], on_broken: OnBroken | None = None
    ) -> Generator[tuple[list[ImageLike], "Outputs"], None, None]:
        """Yield images with their outputs; a GPU already has the next batch then."""
        pending: deque[tuple[list[ImageLike], PendingBatch]] = deque()
        on_gpu = self.uploads is not None
        with closing(streamed(images, self.slot, self.batch_size, on_broken, pinned=on_gpu)) as batches:
            for kept, pixels in batches:
                try:
                    pending.append((kept, self.launch(pixels)))
                    if len(pending) > self.in_flight:
                        kept, oldest = pending.popleft()
                        yield kept, oldest.outputs()
                finally:
                    if self.uploads is not None:  # the next batch may overwrite the pixels; the core is not kept busy
                        self.uploads.record_event(torch.cuda.Event(blocking=True)).synchronize()
        for kept, oldest in pending:
            yield kept, oldest.outputs()

    @torch.no_grad()
    def launch(self, pixels: Sequence[np.ndarray]) -> "PendingBatch":
        """Queue decoded images on the device, with the arithmetic of evaluation.

        This does not wait for a GPU, which may read the pixels until `uploads` is done.
        """
        sizes = np.array([image.shape[:2] for image in pixels], np.int32)
        exact_fit = bool((sizes == self.image_size).all())
        largest = int(sizes.max())
        if (sizes == sizes[0]).all():
            sizes = sizes[:1]  # all are resized alike
        with torch.cuda.stream(self.uploads):  # while the GPU computes the batch before
            x = self.upload(pixels, largest)
            geometry = to_device(torch.from_numpy(np.tile(sizes, 2)), self.device)
        if self.uploads is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self.uploads)
            x.record_stream(stream)
            geometry.record_stream(stream)
        x = clean(x[:, :largest, :largest], geometry, self.image_size, exact_fit=exact_fit)
        features, logits = outputs(self.network, x)
        on_device = (features.float(), logits.float(), *norms_and_angles(features, logits, self.vectors))
        results = Outputs(*(tensor.to("cpu", non_blocking=True) for tensor in on_device))
        done = None if self.uploads is None else stream.record_event(torch.cuda.Event(blocking=True))
        return PendingBatch(results, done)

    def upload(self, pixels: Sequence[np.ndarray], largest: int) -> Tensor:
        """Copy images into slots on the device, each in the upper left corner.

        Images that worker processes decoded are copied from the shared memory: another copy in between would take this
        thread longer than everything else it does for a batch.
        """
        if self.uploads is not None and isinstance(pixels, Pixels) and pixels.memory is not None:
            memory = torch.from_numpy(pixels.memory)
            x = memory.new_empty(len(pixels), *memory.shape[1:], device=self.device)
            for start, stop, row in pixels.consecutive():
                x[start:stop].copy_(memory[row : row + stop - start], non_blocking=True)
            return x
        slots = torch.empty(len(pixels), largest, largest, 3, dtype=torch.uint8, pin_memory=self.uploads is not None)
        for place, image in zip(slots.numpy(), pixels, strict=True):
            place[: image.shape[0], : image.shape[1]] = image
        return to_device(slots, self.device)

    def forward(self, pixels: Sequence[np.ndarray]) -> "Outputs":
        """Compute the outputs for decoded images, with the arithmetic of evaluation."""
        return self.launch(pixels).outputs()


class Outputs(NamedTuple):
    """Outputs of the network for N images, on the CPU."""

    features: Tensor  # float32 [N, n]
    logits: Tensor  # float32 [N, C]
    norms: Tensor  # float64 [N], of the features
    angles: Tensor  # float64 [N], to the vector of the predicted class


class PendingBatch(NamedTuple):
    """A batch queued on the device."""

    results: Outputs  # valid once `done` has happened
    done: torch.cuda.Event | None

    def outputs(self) -> Outputs:
        if self.done is not None:
            self.done.synchronize()
        return self.results


def softmax(logits: np.ndarray) -> np.ndarray:
    """Compute the softmax along axis 1 in float64.

    PyTorch's softmax wakes a thread on every core, and each waits 10 ms for more work: a fifth of the cost of
    predicting from files.
    """
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite logits give NaN, as in PyTorch
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        return exponentials / exponentials.sum(axis=1, keepdims=True)


# Images ---------------------------------------------------------------------------------------------------------------


def as_list(images: ImageLike | Iterable[ImageLike]) -> Iterable[ImageLike]:
    """Put a single image into a list; an array or tensor of four dimensions holds many."""
    if isinstance(images, np.ndarray | Tensor):
        return [images] if images.ndim < 4 else images
    if isinstance(images, str | bytes | Path | Image.Image) or not isinstance(images, Iterable):
        return [images]  # reading reports a wrong type
    return images


def find_images(names: Iterable[str], ignored: list[str] | None = None) -> list[str]:
    """List image files.

    Args:
        names: Files, folders (searched at any depth) and patterns. A name that does not exist stays in the list, so
            that reading it reports the error.
        ignored: Receives the other files in the folders and among the matches.
    """
    files: list[str] = []
    ignored = [] if ignored is None else ignored
    for name in names:
        if os.path.isdir(name):  # noqa: PTH112, here and below for lists of 100,000 names
            others: list[str] = []
            files += sorted(str(Path(name, below, file)) for below, file in walk_images(Path(name), ".", others))
            ignored += sorted(str(Path(name, other)) for other in others)
        elif not glob.has_magic(name) or os.path.lexists(name):
            files.append(name)
        else:
            matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207
            images = [match for match in matches if Path(match).suffix.lower() in IMAGE_SUFFIXES]
            files += images if matches else [name]
            ignored += [match for match in sorted({*matches} - {*images}) if not os.path.isdir(match)]  # noqa: PTH112
    return files


# Loading --------------------------------------------------------------------------------------------------------------


def load_model(
    path: str | Path, device: str = "auto", algorithm: str | None = None, false_alarms: float = RATE
) -> Model:
    """Load the model of a finished run.

    Args:
        path: The folder of the run (for the selected step), model.safetensors or last.safetensors in it, the
            .safetensors file that `aidgn export` made, or the folder of `aidgn fit`.
        device: auto, cpu, cuda or cuda:N.
        algorithm: path/to/file.py:Class of a custom algorithm. The run does not remember it, because loading a model
            must not run code that the author of the folder chose.
        false_alarms: Share of images like those of the training domains that get a warning.
    """
    path = find_model(path)
    weights = RunFolder(path).model if path.is_dir() else path
    tensors, metadata = read_weights(weights) if weights.suffix == ".safetensors" and weights.is_file() else ({}, {})
    if "run" in metadata:  # an exported file
        run = RunMetadata.from_dict(metadata["run"], weights)
    else:
        run = find_run(path, weights).metadata
    run.check_complete(*MODEL_NEEDS)
    about, identity, classes = run.path, run.identity, run.classes
    where = choose_device(device)
    label, name, backbone = str(run.label), run.label.name, str(identity["backbone"])
    pretrained = identity["weights"] != "none"
    stride_first = identity["weights"] not in ("none", "hub") and run.stride_first
    if stride_first is None:
        raise DamagedMetadata(run.path, "it has no stride_first")
    # The arithmetic of the run, unless it ran on a GPU: that would be slow on a CPU.
    same = where.type != "cpu" or run.device.endswith("CPU")
    precision = choose_precision((run.precision if same else "") or "float32", where)

    algorithm_type = find_algorithm(about, name, identity.get("source"), algorithm)
    net = backbones.create(
        backbone, weights="none", in_channels=3 + algorithm_type.extra_channels, freeze_bn=pretrained
    )
    if stride_first:
        backbones.set_stride_first(net)
    backbones.fold(net)
    featurizer = Featurizer(net.to(memory_format=torch.channels_last), precision, compiled=False)
    hyper_parameters = resolve(name, algorithm_type.search_space, {**identity["hyper_parameters"]})
    network = algorithm_type(featurizer, len(classes), len(run.sources), **hyper_parameters)

    if metadata.get("algorithm", label) != label:
        raise AidgnError(
            f"{weights} holds weights of {metadata['algorithm']}, but {about} describes a run of {label}: "
            "they are not of the same run."
        )
    mismatch = backbones.find_mismatch(tensors, network.state_dict())
    if mismatch:
        raise AidgnError(
            f"{weights} does not fit {about}, which describes {label} with {backbone} and "
            f"{len(classes)} classes: {mismatch}. They are not of the same run, or one was changed."
        )
    network.load_state_dict(tensors, strict=False)
    novelty = load_novelty(weights, network, metadata)
    return Model(network, label, classes, run.domains, run.image_size, where, novelty, false_alarms)


def find_model(path: str | Path) -> Path:
    """Return the path of a model: `aidgn fit` puts it into the folder `model`."""
    path = Path(path)
    inner = RunFolder(path / "model").exists and not RunFolder(path).exists
    return path / "model" if inner else path


def load_novelty(weights: Path, network: Algorithm, metadata: dict[str, Any]) -> Novelty | None:
    """Read the norms and angles of validation images, which exist for the weights of the selected step."""
    if "run" in metadata:
        exported = metadata.get("novelty")
        return None if exported is None else Novelty.from_dict(exported, class_vectors(network.classifier))
    run = RunFolder(weights.parent)
    if weights.name != run.model.name or not run.novelty.exists():
        return None
    return Novelty.from_dict(read_novelty(run.novelty), class_vectors(network.classifier))


def find_run(path: Path, weights: Path) -> RunFolder:
    """Return the run that a model belongs to, after checking that there is a model."""
    run = RunFolder(weights.parent)
    expected = (
        f"expected the folder of `aidgn fit` or of a finished run, {run.model.name} or {run.last.name} in it"
        ", or what `aidgn export` made of it"
    )
    if not path.exists():
        raise AidgnError(f"The model {path} does not exist: {expected}.")
    if weights.suffix == ".onnx":
        raise AidgnError(
            f"{path} is for other programs; here give the {run.model.name} that `aidgn export` wrote next to it."
        )
    if weights.suffix != ".safetensors":
        raise AidgnError(f"{path} is not a model: {expected}.")
    if not run.exists:
        places = "runs/*", "*", "*/model"  # the last: models of `aidgn fit`
        runs = next(filter(None, (RunFolder.find(path, place) for place in places)), [])
        if runs:
            raise AidgnError(f"{path} holds {plural(len(runs), 'run')}: give one, such as {runs[0]}.")
        raise AidgnError(
            f"{run} is not the folder of a run: it has no {run.metadata_file.name}, which describes the network; "
            f"{expected}."
        )
    if not weights.exists():
        curves = "It has no records yet either."
        if run.records:
            curves = f"`aidgn report {shlex.quote(str(run))}` shows its curves so far."
        raise AidgnError(
            f"The run {path} is not finished: it has no {weights.name} yet. {curves} The `aidgn train` "
            "command that started it goes on with it."
        )
    return run


def find_algorithm(about: Path, name: str, source: str | None, given: str | None) -> type[Algorithm]:
    """Find the class of a run's algorithm; the caller must name the file of a custom one, which has a `source`."""
    if source is not None and given is None:
        raise AidgnError(
            f"{about} describes a run of {name}, a custom algorithm: name its file with "
            f"--algorithm path/to/file.py:{name} (load_model(..., algorithm=...))."
        )
    if given is None and name not in ALGORITHMS:  # `find` would load a path to code
        raise AidgnError(f"{about} describes a run of {name}, which this version of aidgn does not have.")
    algorithm_type = find(given or name)
    if algorithm_type.name() != name:
        raise AidgnError(f"{about} describes a run of {name}, not of {given}.")
    if source is not None and source != source_of(algorithm_type):
        log.warning("%s has changed since the run was trained; predictions may differ.", given)
    return algorithm_type
