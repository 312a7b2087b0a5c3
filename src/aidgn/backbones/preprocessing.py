"""How the images for a network are resized and normalised."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aidgn.backbones.weights import WeightsError, read_file_metadata

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """How images were prepared for the published weights of a network.

    The defaults are those of many networks for ImageNet, and of all runs of version 0.1.0.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN  # mean of each channel, subtracted from images with values from 0 to 1
    std: tuple[float, ...] = IMAGENET_STD  # standard deviation of each channel, which divides them afterwards
    interpolation: str = "bilinear"  # name of the resampling filter: `bilinear` or `bicubic`
    input_size: tuple[int, int] = (224, 224)  # height and width of an image

    @classmethod
    def recorded(cls, identity: Mapping[str, Any]) -> "Preprocessing":
        """Return the preprocessing of a run from its identity; a run that records none has the defaults.

        Raises:
            ValueError: The identity records something else.
        """
        values = identity.get("preprocessing")
        return cls() if values is None else replace(cls(), **check_values(values))

    def to_record(self) -> dict[str, Any] | None:
        """Return the entry of a run's identity, None for the defaults; the input size is the run's image size."""
        values = self.transform_settings()
        if values == Preprocessing().transform_settings():
            return None
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}

    def transform_settings(self) -> dict[str, Any]:
        """Return the settings of the functions in `aidgn.data.transforms`."""
        return {"mean": self.mean, "std": self.std, "interpolation": self.interpolation}

    def updated(self, weights: Path) -> "Preprocessing":
        """Return this preprocessing with the values in the metadata of a weights file.

        The entries are `mean` and `std`, three numbers each in JSON, and `interpolation`.
        """
        metadata = read_file_metadata(weights)
        values: dict[str, Any] = {}
        if "ImageNet mean/std" in metadata.get("input", ""):
            values = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
        try:
            for name in ("mean", "std"):
                if name in metadata:
                    values[name] = json.loads(metadata[name])
            if "interpolation" in metadata:
                values["interpolation"] = metadata["interpolation"]
            return replace(self, **check_values(values))
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"The metadata of {weights} do not describe how to prepare images: {error}.") from None


IMAGENET = Preprocessing()


def check_values(values: Any) -> dict[str, Any]:
    """Return mean, std and interpolation as `Preprocessing` has them; ValueError if they cannot be used."""
    if not isinstance(values, Mapping) or not set(values) <= {"mean", "std", "interpolation"}:
        raise ValueError("expected mean, std and interpolation")
    checked = dict(values)
    for name in ("mean", "std"):
        if name not in values:
            continue
        numbers = values[name]
        valid = isinstance(numbers, list | tuple) and len(numbers) == 3
        if not valid or not all(type(number) in (int, float) and abs(number) < 1e6 for number in numbers):
            raise ValueError(f"{name} is {numbers!r}, expected three numbers")
        checked[name] = tuple(map(float, numbers))
    if min(checked.get("std", (1,))) <= 0:
        raise ValueError(f"std is {values['std']!r}, expected numbers above 0")
    if checked.get("interpolation", "bilinear") not in INTERPOLATIONS:
        raise ValueError(f"interpolation is {checked['interpolation']!r}, expected {' or '.join(INTERPOLATIONS)}")
    return checked
