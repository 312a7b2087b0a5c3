"""Write a model as ONNX, from pictures of any size to probabilities, and compare the file with the model."""

import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from aidgn import backbones
from aidgn.algorithms import Algorithm
from aidgn.data import Dataset
from aidgn.data.images import read_image
from aidgn.data.transforms import limit, weights
from aidgn.errors import AidgnError
from aidgn.files import atomic_write
from aidgn.inference.ensemble import SMALLEST, Ensemble
from aidgn.inference.model import Model
from aidgn.runs.metadata import RunMetadata
from aidgn.training.featurizer import Featurizer

TOLERANCE = 1e-3  # difference of logits between ONNX and the model, relative to the largest logit
SHRUNK_TOLERANCE = 2e-2  # the same for pictures above `slot`, which Pillow shrinks to whole grey levels first
CHECK_PICTURES = 24  # pictures in the comparison of ONNX with the model
CHECK_SIDE = 1024  # largest side of these pictures in pixels, to save memory
OPSET = 18
ONNX_FILE = "model.onnx"


@dataclass(frozen=True)
class OnnxCheck:
    """The comparison of ONNX's logits with the model's on the same pictures."""

    pictures: int  # number of pictures
    real: bool  # whether the pictures are from the data set, not generated
    difference: float  # largest difference relative to the largest logit, on pictures that are not shrunk first
    # The same on larger pictures. Either is 0 without such pictures.
    shrunk_difference: float

    def __str__(self) -> str:
        differences = []
        if self.difference:
            differences.append(f"{self.difference:.1g} of the largest (allowed: {TOLERANCE:g})")
        if self.shrunk_difference:
            differences.append(f"{self.shrunk_difference:.1g} for large pictures (allowed: {SHRUNK_TOLERANCE:g})")
        source = "" if self.real else "generated "
        return (
            f"onnxruntime gives the same labels for {self.pictures} {source}pictures; "
            f"logits differ by {', '.join(differences) or 'nothing'}"
        )


class OnnxModel(nn.Module):
    """Compute logits and probabilities [N, C] of uint8 pictures [N, H, W, 3] of any height and width.

    The pictures are prepared as in `Model`: sides above `slot` are shrunk to it in whole grey levels, then both sides
    are resized to the network's input, then the pixels are normalised.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.network = copy_in_float32(model)
        backbones.unfold(self.network)  # other programs fold batch norm themselves
        self.size = model.image_size
        self.slot = model.slot
        self.preprocessing = model.preprocessing
        self.temperature = model.temperature
        self.eval()

    def resize_weights(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [slot, n] and [size, slot] of the two resizings of a side with pixels 0 to n - 1."""
        length = pixels[-1:] + 1
        shrunk_length = length.clamp(max=self.slot)
        scale = length / shrunk_length
        centre = (torch.arange(self.slot)[:, None] + 0.5) * scale
        triangle = (1 - (pixels + 0.5 - centre).abs() / scale).clamp(min=0)
        to_slot = triangle / triangle.sum(1, keepdim=True).clamp(min=1e-6)  # rows beyond `shrunk_length` are 0
        no_flip = torch.zeros(1, dtype=torch.bool)
        interpolation = self.preprocessing.interpolation
        to_size = weights(torch.zeros(1), shrunk_length, no_flip, self.size, self.slot, interpolation)[0]
        return to_slot, to_size / to_size.sum(1, keepdim=True)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rows_to_slot, rows_to_size = self.resize_weights(torch.arange(images.shape[1]).float())
        columns_to_slot, columns_to_size = self.resize_weights(torch.arange(images.shape[2]).float())
        x = images.permute(0, 3, 1, 2).float()
        x = torch.floor(x @ columns_to_slot.T + 0.5)  # Pillow resizes rows first, then columns, and rounds each time
        x = torch.floor(rows_to_slot @ x + 0.5)
        x = limit(rows_to_size @ x @ columns_to_size.T / 255, self.preprocessing.interpolation)
        mean, std = (
            torch.tensor(values)[:, None, None] for values in (self.preprocessing.mean, self.preprocessing.std)
        )
        x = (x - mean) / std
        logits = self.network.predict(x)
        return logits, (logits / self.temperature).softmax(1)


class OnnxEnsemble(nn.Module):
    """Compute the mean of the probabilities of several models, and its logarithm in place of logits."""

    def __init__(self, ensemble: Ensemble):
        super().__init__()
        self.members = nn.ModuleList(OnnxModel(member) for member in ensemble.members)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.stack([member(images)[1] for member in self.members]).mean(0)
        return probabilities.clamp(min=SMALLEST).log(), probabilities


def copy_model_in_float32(model: Model) -> Model:
    """Return the model, or an ensemble, with networks that compute in float32."""
    copied = copy.copy(model)
    if isinstance(copied, Ensemble):
        copied.members = [copy_model_in_float32(member) for member in copied.members]
    else:
        copied.network = copy_in_float32(model)
    return copied


def copy_in_float32(model: Model) -> Algorithm:
    """Copy the network of a model, set to compute in float32."""
    network = copy.deepcopy(model.network)
    assert isinstance(network.featurizer, Featurizer)
    network.featurizer.runner.precision = "float32"
    return network


def check_exportable(model: Model) -> None:
    """Raise an error if ONNX cannot represent a model, or packages are missing."""
    for member in model.members if isinstance(model, Ensemble) else ():
        check_exportable(member)
    group_size = model.network.group_size
    if group_size > 1:
        raise AidgnError(
            f"{model.algorithm} describes a domain by {group_size} neighbouring images, so its answer for a picture "
            "depends on the others. ONNX for one picture at a time would be a different model. Export the other files "
            "with --no-onnx."
        )
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise AidgnError(
            f"ONNX needs {' and '.join(missing)}, not installed here: pip install 'aidgn[onnx]', or export the other "
            "files with --no-onnx."
        )


def write_onnx(model: Model, metadata: RunMetadata, path: Path, dataset: Dataset | None = None) -> OnnxCheck:
    """Write a model as one ONNX file, kept only if onnxruntime agrees with the model.

    Args:
        model: The model, on the CPU.
        metadata: Metadata of its run.
        path: The file.
        dataset: Images for the comparison; by default they are generated.
    """
    import onnx

    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    example = torch.zeros(2, model.slot + 3, model.slot + 5, 3, dtype=torch.uint8)
    try:
        with silence_exporter(), torch.no_grad():
            program = torch.onnx.export(
                OnnxEnsemble(model) if isinstance(model, Ensemble) else OnnxModel(model),
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
            f"{model.algorithm} with {metadata.identity['backbone']} cannot be written as ONNX "
            f"({backbones.summarize(error)}). Export the other files with --no-onnx."
        ) from error
    onnx.helper.set_model_props(
        graph,
        {
            "classes": json.dumps(model.classes),
            "algorithm": model.algorithm,
            "image_size": str(model.image_size),
            "domains": json.dumps(model.domains),
            "temperature": str(model.temperature),
            "dataset": metadata.identity["dataset"],
            "input": "images: uint8 [batch, height, width, 3], RGB, upright, any size; resized and normalised inside",
        },
    )
    with atomic_write(path) as temporary:
        try:
            onnx.save(graph, str(temporary))
        except ValueError as error:  # protobuf holds 2 GiB
            raise AidgnError(
                f"{path} would be larger than ONNX files may be ({backbones.summarize(error)}). Export the other files "
                "with --no-onnx."
            ) from error
        return compare_with_model(temporary, model, dataset)


def compare_with_model(path: Path, model: Model, dataset: Dataset | None) -> OnnxCheck:
    """Compare an ONNX file in onnxruntime with the model in float32.

    Args:
        path: The ONNX file.
        model: The model, on the CPU.
        dataset: Source of the pictures; None: they are generated.

    Raises:
        AidgnError: The labels or the logits differ.
    """
    import onnxruntime

    reference = copy_model_in_float32(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leave the processor to others
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    count = 0
    largest_difference = {False: 0.0, True: 0.0}  # by whether the picture was shrunk first
    for picture in read_pictures(dataset) if dataset else generate_pictures(model.slot):
        size = f"{picture.shape[1]} x {picture.shape[0]} pixels"
        try:
            actual = session.run(["logits"], {"images": picture[None]})[0][0]
        except Exception as error:  # onnxruntime does not name the class
            raise AidgnError(
                f"onnxruntime cannot run the ONNX file on a picture of {size} ({backbones.summarize(error)}). The file "
                "was deleted. Export the other files with --no-onnx."
            ) from error
        expected = reference.logits(picture)[0].numpy()
        shrunk = max(picture.shape) > model.slot
        tolerance = SHRUNK_TOLERANCE if shrunk else TOLERANCE
        scale = max(1.0, float(np.abs(expected).max()))
        difference = float(np.abs(actual - expected).max()) / scale
        first, second = np.sort(expected)[:-3:-1]
        undecided = first - second <= 2 * tolerance * scale
        if not difference <= tolerance or (actual.argmax() != expected.argmax() and not undecided):
            raise AidgnError(
                f"The ONNX file does not agree with the model: on a picture of {size}, logits differ by "
                f"{difference:.1g} of the largest, more than {tolerance:g}. The file was deleted. Export the other "
                "files with --no-onnx."
            )
        count += 1
        largest_difference[shrunk] = max(largest_difference[shrunk], difference)
    return OnnxCheck(count, dataset is not None, largest_difference[False], largest_difference[True])


def read_pictures(dataset: Dataset) -> Iterator[np.ndarray]:
    """Yield pictures from all parts of a data set, uint8 [H, W, 3], without the broken ones."""
    for index in np.linspace(0, len(dataset) - 1, min(CHECK_PICTURES, len(dataset))).astype(int):
        if dataset.pixels is not None:
            yield dataset.pixels[index]
            continue
        try:
            picture, _ = read_image(Path(str(dataset.root), dataset.files[index]), at_least=CHECK_SIDE)
        except AidgnError:
            continue
        picture.thumbnail((CHECK_SIDE, CHECK_SIDE))
        yield np.asarray(picture)


def generate_pictures(slot: int) -> Iterator[np.ndarray]:
    """Yield coloured clouds in four sizes, one of them larger than `slot`."""
    random = np.random.default_rng(0)
    sizes = ((slot - 3, slot), (slot, slot), (slot // 2, slot - 1), (2 * slot, 3 * slot))
    for number in range(CHECK_PICTURES):
        clouds = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        height, width = sizes[number % len(sizes)]
        yield np.asarray(clouds.resize((width, height), Image.Resampling.BICUBIC))


@contextmanager
def silence_exporter() -> Iterator[None]:
    """Hide the exporter's warnings, which are for its developers."""
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
