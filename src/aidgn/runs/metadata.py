"""The content of run.json: a run's identity and data set, and the machine and versions that trained it."""

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import shorten
from typing import Any, get_type_hints

from aidgn.errors import AidgnError, ParameterError
from aidgn.files import is_of_type, parse_json
from aidgn.runs import names
from aidgn.runs.label import Label
from aidgn.runs.options import MAX_NUMBER, run_options

MODEL_NEEDS = ("algorithm", "average", "backbone", "weights", "target", "hyper_parameters")  # of the identity
# The largest accepted values; larger ones would exhaust memory or threads.
LARGEST = {"steps": MAX_NUMBER, "image_size": 1 << 14, "threads": 1 << 10}
IDENTITY_TYPES: dict[str, Any] = {
    **dict.fromkeys(("algorithm", "dataset", "data", "precision", "source"), str),
    **dict.fromkeys(("hyper_parameters", "preprocessing"), dict),
    **dict.fromkeys(("trial", "draw"), int),
    "target": list[str],
}
MACHINE = {"root", "threads", "device", "cpu", "aidgn", "torch", "python"}  # where and with what a run was trained
OPTIONS = {option.name: option for option in run_options()}


class DamagedMetadata(AidgnError):
    """A run.json cannot be used."""

    def __init__(self, path: Path, reason: str):
        super().__init__(
            f"{path} does not describe a run: {reason}. It was changed, or written by another version of aidgn. "
            "Move its folder away to go on without it."
        )
        self.path = path


@dataclass(frozen=True)
class RunMetadata:
    """The content of run.json. Values that an earlier version did not write have their defaults."""

    # `RunSpec.identity` and the precision, which together distinguish the run from all others
    identity: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None  # step at which the run is finished
    classes: list[str] = field(default_factory=list)  # names of the classes
    class_images: list[int] = field(default_factory=list)  # images of each class in all domains
    domains: list[str] = field(default_factory=list)  # names of the domains, sources and targets
    image_size: int = 0  # side of the network's input in pixels
    skipped: list[str] = field(default_factory=list)  # images that could not be decoded and were left out
    root: str | None = None  # folder of the images at the time of training
    # Whether a ResNet from a file of weights has its strides in the first convolution of a block
    stride_first: bool | None = None
    precision: str = ""  # arithmetic of the training
    # Number of CPU threads. Sums depend on it, so a continued run uses the same number.
    threads: int | None = None
    device: str = ""  # name of the device
    # Instruction set and model of the CPU. Sums on the CPU depend on them.
    cpu: str = ""
    aidgn: str = ""  # version of aidgn
    torch: str = ""  # version of PyTorch
    python: str = ""  # version of Python
    path: Path = field(default=Path(names.METADATA), compare=False)  # the file, for messages

    @classmethod
    def read(cls, path: Path) -> "RunMetadata":
        """Read and check a run.json."""
        try:
            values = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DamagedMetadata(path, f"it cannot be read ({error})") from None
        return cls.from_dict(values, path)

    @classmethod
    def from_dict(cls, values: Any, path: Path) -> "RunMetadata":
        """Check values that were read from `path`."""
        if not isinstance(values, dict):
            raise DamagedMetadata(path, "it holds no object")
        names = {key.name for key in fields(cls)} - {"path"}
        known = {name: value for name, value in values.items() if name in names and value is not None}
        for name, value in known.items():
            if not _is_valid(name, value):
                raise DamagedMetadata(path, f"{name} is {_shorten(value)}")
        for name, value in known.get("identity", {}).items():
            if not _is_valid_in_identity(name, value):
                raise DamagedMetadata(path, f"identity.{name} is {_shorten(value)}")
        return cls(**known, path=path)

    def to_dict(self) -> dict[str, Any]:
        """Return the values for `from_dict`."""
        return {key.name: getattr(self, key.name) for key in fields(self) if key.name != "path"}

    @property
    def is_described(self) -> bool:
        """Whether the identity says how the run was trained."""
        return "hyper_parameters" in self.identity

    @property
    def sources(self) -> list[str]:
        """Names of the domains that the run was trained on."""
        return [name for name in self.domains if name not in self.identity["target"]]

    @property
    def label(self) -> Label:
        """The label of the algorithm."""
        return Label.parse(self.identity["algorithm"])

    def check_complete(self, *needed: str) -> None:
        """Raise `DamagedMetadata` if a value of the identity, the classes, the domains or the image size is missing."""
        missing = [f"identity.{name}" for name in needed if name not in self.identity]
        missing += [name for name in ("classes", "domains", "image_size") if not getattr(self, name)]
        if missing:
            raise DamagedMetadata(self.path, f"it has no {missing[0]}")
        empty = [name for name in needed if self.identity[name] is None and name not in OPTIONS]
        if empty:
            raise DamagedMetadata(self.path, f"identity.{empty[0]} is null")
        unknown = [name for name in self.identity.get("target", []) if name not in self.domains]
        if unknown:
            raise DamagedMetadata(self.path, f"{unknown[0]} is in identity.target, but not in domains")


TYPES = get_type_hints(RunMetadata)


def metadata_digest(content: bytes) -> str:
    """Return a sha256 of a run.json without the machine, equal for equal runs; ValueError for no JSON."""
    kept = {key: value for key, value in parse_json(content).items() if key not in MACHINE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _is_valid(name: str, value: Any) -> bool:
    if not is_of_type(value, TYPES[name]):
        return False
    if name in ("classes", "domains"):
        return len(set(value)) == len(value)
    return name not in LARGEST or 0 < value <= LARGEST[name]


def _is_valid_in_identity(name: str, value: Any) -> bool:
    if name in OPTIONS:
        try:
            OPTIONS[name].convert(value)
        except ParameterError:
            return value is None
        return True
    if value is None or name not in IDENTITY_TYPES:
        return True
    return is_of_type(value, IDENTITY_TYPES[name]) and (type(value) is not int or 0 <= value <= MAX_NUMBER)


def _shorten(value: Any) -> str:
    try:
        return shorten(repr(value), 80)
    except ValueError:
        return "a number with thousands of digits"
