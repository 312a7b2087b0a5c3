"""A trained run as a classifier of any images: prepared exactly as in its evaluation, decoded ahead of the network."""

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
    """What the model says of N images."""

    labels: list[str]  # the most probable class of each
    probabilities: np.ndarray  # float64 [N, C], in the order of `classes`
    classes: list[str]
    logits: Tensor  # float32 [N, C], on the CPU
    features: Tensor  # float32 [N, n], on the CPU: what the classifier sees
    warnings: list[str | None] | None = None  # what is unlike the training images; None: this model cannot tell

    def __len__(self) -> int:
        return len(self.labels)

    def top(self, k: int) -> list[list[tuple[str, float]]]:
        """The k most probable classes of each image with their probabilities, most probable first."""
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :k]
        values = np.take_along_axis(self.probabilities, order, axis=1)
        return [
            [(self.classes[c], p) for c, p in zip(row, ps, strict=True)]
            for row, ps in zip(order.tolist(), values.tolist(), strict=True)
        ]


class Model:
    """A trained network with its classes. An image is a path, a PIL image, an array [H, W, 3] or [H, W] of uint8, or a
    tensor [3, H, W] of uint8; numbers with a fraction go from 0 to 1 and are rounded to 8 bits.

    Algorithms that describe a domain by the images beside an image (ARM, MTL) do so with consecutive images given."""

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
        self.novelty, self.false_alarms = novelty, false_alarms
        self.network = network.to(device).eval()
        self.algorithm, self.classes, self.domains = algorithm, classes, domains
        self.image_size, self.device = image_size, device
        self.slot = largest_slot(image_size)  # larger images are shrunk to this side first, as in the cache
        self.batch_size = eval_batch_size(network, device)
        if device.type == "cuda":
            precision = getattr(network.featurizer, "precision", "float32")
            backbones.freeze_folded(network, torch.bfloat16 if precision == "bfloat16" else torch.float32)
        self.vectors = None if novelty is None or novelty.weight is None else torch.as_tensor(novelty.weight).to(device)
        self.uploads = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.in_flight = 0 if self.uploads is None else 2  # batches that a GPU has to do while results are read

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> Prediction:
        """Label and probabilities of one image or of many."""
        found = [outputs for _, outputs in self.computed(as_list(images))]
        none = torch.empty(0, dtype=torch.float64)
        empty = Outputs(torch.empty(0, self.network.num_features), torch.empty(0, len(self.classes)), none, none)
        return self.prediction(Outputs(*(torch.cat(parts) for parts in zip(*(found or [empty]), strict=True))))

    def logits(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Logits [N, C], float32 on the CPU."""
        return self.predict(images).logits

    def prediction(self, found: "Outputs") -> Prediction:
        probabilities = softmax(found.logits.numpy())
        if not np.isfinite(probabilities).all():
            raise AidgnError(
                f"The {self.algorithm} model gives NaN or infinite outputs: its weights are damaged or its "
                "training diverged. Copy the model from its source again, or train again."
            )
        warnings = (
            None
            if self.novelty is None
            else self.novelty.warnings_of(found.norms.numpy(), found.angles.numpy(), self.false_alarms)
        )
        return Prediction(
            [self.classes[c] for c in probabilities.argmax(1)],
            probabilities,
            self.classes,
            found.logits,
            found.features,
            warnings,
        )

    def batches(
        self, images: Iterable[ImageLike], on_broken: OnBroken | None = None
    ) -> Iterator[tuple[list[ImageLike], Prediction]]:
        """Images and what the model says of them, a batch at a time, while the next are decoded: for more images than
        memory holds. What cannot be read is left out and told to `on_broken`; without it, it is an error."""
        with closing(self.computed(images, on_broken)) as found:
            for kept, outputs in found:
                yield kept, self.prediction(outputs)

    def computed(
        self, images: Iterable[ImageLike], on_broken: OnBroken | None = None
    ) -> Generator[tuple[list[ImageLike], "Outputs"], None, None]:
        """Images with what the network says of them; a GPU already has the next batch when one is given out."""
        launched: deque[tuple[list[ImageLike], PendingBatch]] = deque()
        on_gpu = self.uploads is not None
        with closing(streamed(images, self.slot, self.batch_size, on_broken, pinned=on_gpu)) as batches:
            for kept, pixels in batches:
                try:
                    launched.append((kept, self.launch(pixels)))
                    if len(launched) > self.in_flight:
                        kept, oldest = launched.popleft()
                        yield kept, oldest.outputs()
                finally:
                    if self.uploads is not None:  # the next batch may overwrite the pixels; the core is not kept busy
                        self.uploads.record_event(torch.cuda.Event(blocking=True)).synchronize()
        for kept, oldest in launched:
            yield kept, oldest.outputs()

    @torch.no_grad()
    def launch(self, pixels: Sequence[np.ndarray]) -> "PendingBatch":
        """Give decoded images to the device, which computes what evaluation does; a GPU is not waited for. It may read
        the pixels until `uploads` is done."""
        sizes = np.array([image.shape[:2] for image in pixels], np.int32)
        exact_fit = bool((sizes == self.image_size).all())
        largest = int(sizes.max())
        if (sizes == sizes[0]).all():
            sizes = sizes[:1]  # they are all resized alike
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
        found = Outputs(features.float(), logits.float(), *norms_and_angles(features, logits, self.vectors))
        found = Outputs(*(each.to("cpu", non_blocking=True) for each in found))
        return PendingBatch(
            found, None if self.uploads is None else stream.record_event(torch.cuda.Event(blocking=True))
        )

    def upload(self, pixels: Sequence[np.ndarray], largest: int) -> Tensor:
        """Slots on the device, with each image to the upper left; from where worker processes wrote them, if they did:
        copying takes this thread longer than all else it does for a batch."""
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
        """What the network says of decoded images, as evaluation computes it."""
        return self.launch(pixels).outputs()


class Outputs(NamedTuple):
    """Of N images, on the CPU."""

    features: Tensor  # float32 [N, n]
    logits: Tensor  # float32 [N, C]
    norms: Tensor  # float64 [N], of the features
    angles: Tensor  # float64 [N], to the vector of the predicted class


class PendingBatch(NamedTuple):
    """A batch that the device has been given."""

    found: Outputs  # once it is done
    done: torch.cuda.Event | None

    def outputs(self) -> Outputs:
        if self.done is not None:
            self.done.synchronize()
        return self.found


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along axis 1, in float64. PyTorch's wakes a thread on every core, and each waits 10 ms for more to do: a fifth of
    all that predicting from files costs."""
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinite logits: not a number, as PyTorch has it
        shares = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        return shares / shares.sum(axis=1, keepdims=True)


# Images ---------------------------------------------------------------------------------------------------------------


def as_list(images: ImageLike | Iterable[ImageLike]) -> Iterable[ImageLike]:
    """One image as a list of one; an array or tensor of four dimensions is many."""
    if isinstance(images, np.ndarray | Tensor):
        return [images] if images.ndim < 4 else images
    if isinstance(images, str | bytes | Path | Image.Image) or not isinstance(images, Iterable):
        return [images]  # what is no image is said when it is read
    return images


def find_images(names: Iterable[str], ignored: list[str] | None = None) -> list[str]:
    """Image files: those named, those below the folders named, sorted, and those that match a pattern. Other files
    there are added to `ignored`.

    A name that is nothing of this stays, so that reading it says what is wrong."""
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
    """The model of a finished run: its folder (the selected step), model.safetensors or last.safetensors in it, the
    .safetensors file that `aidgn export` made of it, or the folder of `aidgn fit`.

    algorithm: path/to/file.py:Class for a run of an algorithm of your own. It is asked for, not remembered, because
    loading a model must not run code that whoever made the folder chose.
    false_alarms: the share of images like those of the sources that get a warning."""
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
    # The arithmetic of the run; that of a GPU would be slow on a CPU.
    same = where.type != "cpu" or run.device.endswith("CPU")
    precision = choose_precision((run.precision if same else "") or "float32", where)

    kind = find_algorithm(about, name, identity.get("source"), algorithm)
    net = backbones.create(backbone, weights="none", in_channels=3 + kind.extra_channels, freeze_bn=pretrained)
    if stride_first:
        backbones.set_stride_first(net)
    backbones.fold(net)
    featurizer = Featurizer(net.to(memory_format=torch.channels_last), precision, compiled=False)
    hyper_parameters = resolve(name, kind.search_space, {**identity["hyper_parameters"]})
    network = kind(featurizer, len(classes), len(run.sources), **hyper_parameters)

    if metadata.get("algorithm", label) != label:
        raise AidgnError(
            f"{weights} holds weights of {metadata['algorithm']}, but {about} describes a run of {label}: "
            "they are not of the same run."
        )
    faults = backbones.find_mismatch(tensors, network.state_dict())
    if faults:
        raise AidgnError(
            f"{weights} does not fit {about}, which describes {label} with {backbone} and "
            f"{len(classes)} classes: {faults}. They are not of the same run, or one was changed."
        )
    network.load_state_dict(tensors, strict=False)
    novelty = load_novelty(weights, network, metadata)
    return Model(network, label, classes, run.domains, run.image_size, where, novelty, false_alarms)


def find_model(path: str | Path) -> Path:
    """Where a model is: the folder that `aidgn fit` made holds it as `model`."""
    path = Path(path)
    inner = RunFolder(path / "model").exists and not RunFolder(path).exists
    return path / "model" if inner else path


def load_novelty(weights: Path, network: Algorithm, metadata: dict[str, Any]) -> Novelty | None:
    """What is usual for the selected step's weights; None for others, and for runs that were trained before this."""
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
            f"{path} is for other programs; here give the {run.model.name} that `aidgn export` wrote beside it."
        )
    if weights.suffix != ".safetensors":
        raise AidgnError(f"{path} is not a model: {expected}.")
    if not run.exists:
        places = "runs/*", "*", "*/model"  # the last: several of `aidgn fit`
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
    """The class of a run's algorithm; one of the user's own (it has a `source`) must be given."""
    if source is not None and given is None:
        raise AidgnError(
            f"{about} describes a run of {name}, an algorithm of your own: say where its class is, with "
            f"--algorithm path/to/file.py:{name} (load_model(..., algorithm=...))."
        )
    if given is None and name not in ALGORITHMS:  # `find` would take a path to code for a name
        raise AidgnError(f"{about} describes a run of {name}, which is no algorithm of this version of aidgn.")
    kind = find(given or name)
    if kind.name() != name:
        raise AidgnError(f"{about} describes a run of {name}, not of {given}.")
    if source is not None and source != source_of(kind):
        log.warning("%s has changed since the run was trained; predictions may differ.", given)
    return kind
