"""A trained run as files that others use: ONNX, one safetensors file that says all, and a model card.

The ONNX graph takes pictures of any size as they are and prepares them itself; it is run before it is kept, and must
say what the model says.
"""

import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from aidgn import backbones
from aidgn.algorithms import Algorithm
from aidgn.analysis.extraction import find_dataset, open_run, own_algorithm
from aidgn.data import Dataset
from aidgn.data.images import read_image
from aidgn.data.transforms import MEAN, STD, weights
from aidgn.errors import AidgnError
from aidgn.files import atomic_write, write_text
from aidgn.inference.model import Model, find_model, load_model
from aidgn.inference.model_card import write_model_card
from aidgn.runs.checkpoints import read_novelty, read_weights, write_weights
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import RunMetadata
from aidgn.training.featurizer import Featurizer

TOLERANCE = 1e-3  # of the largest logit: between ONNX and the model, on pictures that the model does not shrink first
SHRUNK = 2e-2  # the same for larger pictures, which Pillow shrinks to whole grey levels
CHECKED = 24  # pictures that an ONNX file is checked with
LONGEST = 1024  # pixels of a side of these, so that memory stays small
OPSET = 18
# What of run.json goes along: not where the data lay, nor the names of files.
KEPT = (
    "identity",
    "classes",
    "domains",
    "image_size",
    "stride_first",
    "steps",
    "precision",
    "device",
    "aidgn",
    "torch",
)


@dataclass(frozen=True)
class OnnxCheck:
    """How ONNX's logits differ from the model's on the same pictures."""

    pictures: int
    real: bool  # of the data set; otherwise made up
    difference: float  # the greatest, relative to the largest logit, of pictures that are not shrunk first
    shrunk: float  # the same of larger ones; either is 0 where there were none

    def __str__(self) -> str:
        of_each = [
            f"{self.difference:.1g} of the largest (allowed: {TOLERANCE:g})" if self.difference else "",
            f"{self.shrunk:.1g} for large pictures (allowed: {SHRUNK:g})" if self.shrunk else "",
        ]
        return (
            f"onnxruntime gives the same labels for {self.pictures} {'' if self.real else 'made-up '}pictures; "
            f"logits differ by {', '.join(filter(None, of_each)) or 'nothing'}"
        )


@dataclass(frozen=True)
class Exported:
    files: list[Path]
    check: OnnxCheck | None  # None: no ONNX


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    onnx: bool = True,
    data: str | Path | None = None,
    algorithm: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Exported:
    """Write model.onnx, model.safetensors and MODEL_CARD.md of a finished run into `out` (RUN/export).

    data: the folder of the run's images, if it is no more where the training found it; without images the ONNX file is
    checked with made-up ones and the card does not say how many there were."""
    run = find_model(run)
    say = on_progress or (lambda _: None)
    file = RunFolder(run).model if run.is_dir() else run
    if file.suffix == ".safetensors" and file.is_file() and "run" in read_weights(file)[1]:
        raise AidgnError(
            f"{run} was made by `aidgn export` and is complete as it is. To make it anew, give the folder of the run."
        )
    metadata = open_run(run).metadata
    model = load_model(run, "cpu", own_algorithm(metadata, algorithm))
    if onnx:
        check_exportable(model)
    folder = run / "export" if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise AidgnError(f"{folder} is a file: give --out a folder.")
    if folder.resolve() == run.resolve():
        raise AidgnError(
            f"--out {folder} is the folder of the run, whose {file.name} would be overwritten. Choose another folder."
        )
    try:
        dataset: Dataset | None = images_of(metadata, data)
    except AidgnError:
        if data is not None:
            raise
        dataset = None
    check, files, card, made = None, [], folder / "MODEL_CARD.md", not folder.exists()
    try:
        if onnx:
            say("writing ONNX and comparing it with the model")
            check = write_onnx(model, metadata.to_dict(), folder / "model.onnx", dataset)
            files.append(folder / "model.onnx")
        say("writing safetensors and the model card")
        files.append(write_safetensors(RunFolder(run), RunFolder(folder).model))
        write_text(card, write_model_card(run, metadata, model, dataset, str(check) if check else None))
    except BaseException:
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        raise
    return Exported([*files, card], check)


def images_of(metadata: RunMetadata, data: str | Path | None) -> Dataset:
    """The data set of a run, by its names of files; an error if it is not here or another."""
    dataset = find_dataset(metadata, data)
    if metadata.skipped:
        dataset = dataset.without(i for i, file in enumerate(dataset.files) if file in metadata.skipped)
    if not metadata.identity["data"].startswith(dataset.fingerprint[:32]):
        raise AidgnError(
            f"The images in {dataset.root or dataset.name} are not those that {metadata.path.parent} was trained on. "
            "Say where the right ones are with --data DIR."
        )
    return dataset


# ONNX -----------------------------------------------------------------------------------------------------------------


def in_float32(model: Model) -> Algorithm:
    """A copy of the network that computes in float32, whatever it was trained in."""
    network = copy.deepcopy(model.network)
    assert isinstance(network.featurizer, Featurizer)
    network.featurizer.runner.precision = "float32"
    return network


class OnnxModel(nn.Module):
    """Pictures uint8 [N, H, W, 3] of any height and width to logits [N, C] and probabilities, prepared as `Model` does:
    sides beyond `slot` shrunk to it in whole grey levels, then both resized to the network's, and normalised."""

    def __init__(self, model: Model):
        super().__init__()
        self.network = in_float32(model)
        backbones.unfold(self.network)  # other programs fold batch norm themselves
        self.size, self.slot = model.image_size, model.slot
        self.eval()

    def side(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the two resizings [slot, n] and [size, slot] of one side, its pixels numbered [n]."""
        length = pixels[-1:] + 1
        kept = length.clamp(max=self.slot)
        scale = length / kept
        centre = (torch.arange(self.slot)[:, None] + 0.5) * scale
        triangle = (1 - (pixels + 0.5 - centre).abs() / scale).clamp(min=0)
        first = triangle / triangle.sum(1, keepdim=True).clamp(min=1e-6)  # rows behind `kept` are 0
        again = weights(torch.zeros(1), kept, torch.zeros(1, dtype=torch.bool), self.size, self.slot)[0]
        return first, again / again.sum(1, keepdim=True)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rows, rows_again = self.side(torch.arange(images.shape[1]).float())
        columns, columns_again = self.side(torch.arange(images.shape[2]).float())
        x = images.permute(0, 3, 1, 2).float()
        x = torch.floor(x @ columns.T + 0.5)  # Pillow: first along rows, then along columns, each time rounded
        x = torch.floor(rows @ x + 0.5)
        x = rows_again @ x @ columns_again.T / 255
        x = (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        logits = self.network.predict(x)
        return logits, logits.softmax(1)


def check_exportable(model: Model) -> None:
    """An error that says why there is no ONNX file of this model, or not here."""
    together = model.network.group_size
    if together > 1:
        raise AidgnError(
            f"{model.algorithm} describes a domain by {together} images beside one another, so that what "
            "it says of a picture depends on the others; ONNX of one picture at a time would be another "
            "model. Export the rest with --no-onnx."
        )
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise AidgnError(
            f"ONNX needs {' and '.join(missing)}, not installed here: pip install 'aidgn[onnx]', or export "
            "the rest with --no-onnx."
        )


def write_onnx(model: Model, about: dict[str, Any], path: Path, dataset: Dataset | None = None) -> OnnxCheck:
    """The whole way from pictures to probabilities as one ONNX file, kept only if onnxruntime agrees with the model."""
    import onnx

    whole, slot = OnnxModel(model), model.slot
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    example = torch.zeros(2, slot + 3, slot + 5, 3, dtype=torch.uint8)
    try:
        with quietly(), torch.no_grad():
            program = torch.onnx.export(
                whole,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=["images"],
                output_names=["logits", "probabilities"],
                dynamic_shapes=({0: batch, 1: height, 2: width},),
            )
            assert program is not None
            graph = program.model_proto
    except Exception as error:  # the exporter runs the network's own code on symbols, which may fail in any way
        raise AidgnError(
            f"{model.algorithm} with {about['identity']['backbone']} cannot be written as ONNX "
            f"({backbones.summarize(error)}). Export the rest with --no-onnx."
        ) from error
    onnx.helper.set_model_props(
        graph,
        {
            "classes": json.dumps(model.classes),
            "algorithm": model.algorithm,
            "image_size": str(model.image_size),
            "domains": json.dumps(model.domains),
            "dataset": about["identity"]["dataset"],
            "input": "images: uint8 [batch, height, width, 3], RGB, upright, any size; resized and normalised inside",
        },
    )
    with atomic_write(path) as temporary:
        try:
            onnx.save(graph, str(temporary))
        except ValueError as error:  # protobuf holds 2 GiB
            raise AidgnError(
                f"{path} would be larger than ONNX files may be ({backbones.summarize(error)}). Export the "
                "rest with --no-onnx."
            ) from error
        return compare(temporary, model, dataset)


def compare(path: Path, model: Model, dataset: Dataset | None) -> OnnxCheck:
    """Run an ONNX file with onnxruntime on the pictures of a data set, or made-up ones; an error if the labels or the
    logits are not the model's in float32."""
    import onnxruntime

    reference = copy.copy(model)
    reference.network = in_float32(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others may need the processor

    def run(picture: np.ndarray) -> np.ndarray:
        try:
            return session.run(["logits"], {"images": picture[None]})[0][0]
        except Exception as error:  # of a class that onnxruntime does not name
            raise AidgnError(
                f"onnxruntime cannot run the ONNX file on a picture of {picture.shape[1]} x "
                f"{picture.shape[0]} pixels ({backbones.summarize(error)}). It was not kept; export the rest "
                "with --no-onnx."
            ) from error

    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    count, greatest = 0, {False: 0.0, True: 0.0}
    for picture in real_pictures(dataset) if dataset else made_up_pictures(model.slot):
        found = run(picture)
        wanted = reference.logits(picture)[0].numpy()
        shrunk = max(picture.shape) > model.slot
        scale, tolerance = max(1.0, float(np.abs(wanted).max())), SHRUNK if shrunk else TOLERANCE
        difference = float(np.abs(found - wanted).max()) / scale
        first, second = np.sort(wanted)[:-3:-1]
        undecided = first - second <= 2 * tolerance * scale
        if not difference <= tolerance or (found.argmax() != wanted.argmax() and not undecided):
            raise AidgnError(
                f"The ONNX file does not agree with the model: on a picture of {picture.shape[1]} x "
                f"{picture.shape[0]} pixels logits differ by {difference:.1g} of the largest, more than "
                f"{tolerance:g}. It was not kept; export the rest with --no-onnx."
            )
        count, greatest[shrunk] = count + 1, max(greatest[shrunk], difference)
    return OnnxCheck(count, dataset is not None, greatest[False], greatest[True])


def real_pictures(dataset: Dataset) -> Iterator[np.ndarray]:
    """Pictures from all over a data set, uint8 [H, W, 3]; broken ones are left out."""
    for index in np.linspace(0, len(dataset) - 1, min(CHECKED, len(dataset))).astype(int):
        if dataset.pixels is not None:
            yield dataset.pixels[index]
            continue
        try:
            picture, _ = read_image(Path(str(dataset.root), dataset.files[index]), at_least=LONGEST)
        except AidgnError:
            continue
        picture.thumbnail((LONGEST, LONGEST))
        yield np.asarray(picture)


def made_up_pictures(slot: int) -> Iterator[np.ndarray]:
    """Coloured clouds in several sizes, some larger than what is shrunk first."""
    random = np.random.default_rng(0)
    for number in range(CHECKED):
        clouds = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        height, width = ((slot - 3, slot), (slot, slot), (slot // 2, slot - 1), (2 * slot, 3 * slot))[number % 4]
        yield np.asarray(clouds.resize((width, height), Image.Resampling.BICUBIC))


@contextmanager
def quietly() -> Iterator[None]:
    """Without the exporter's remarks to its developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


# Safetensors ----------------------------------------------------------------------------------------------------------


def write_safetensors(run: RunFolder, path: Path) -> Path:
    """The weights of the selected step with what `load_model` needs besides, in one file."""
    tensors, metadata = read_weights(run.model)
    described = run.metadata.to_dict()
    metadata["run"] = {key: described[key] for key in KEPT}
    if run.novelty.exists():
        metadata["novelty"] = read_novelty(run.novelty)
    write_weights(path, tensors, metadata)
    return path
