"""The content of run.json: a run's identity and data set, and the machine and versions that trained it."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from aidgn.errors import AidgnError, ParameterError, clip
from aidgn.files import parse_json
from aidgn.runs import names
from aidgn.runs.label import Label
from aidgn.runs.options import MAX_NUMBER, run_options

MODEL_NEEDS = ("algorithm", "average", "backbone", "weights", "target", "hyper_parameters")  # of the identity
OPTIONS = {option.name: option for option in run_options()}
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]


class IdentityTypes(TypedDict, total=False):
    """Types of values in an identity that are not a run's options."""

    algorithm: str | None
    dataset: str | None
    data: str | None
    precision: str | None
    source: str | None
    target: list[str] | None
    hyper_parameters: dict[str, Any] | None
    preprocessing: dict[str, Any] | None
    trial: Number | None
    draw: Number | None


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
    """The content of run.json. Values that the writing version did not know have their defaults.

    Args:
        identity: `RunSpec.identity` and the precision, which together distinguish the run from all others.
        steps: Step at which the run is finished.
        classes: Names of the classes.
        domains: Names of the domains, sources and targets.
        image_size: Side of the network's input in pixels.
        skipped: Images that could not be decoded and were left out.
        root: Folder of the images at the time of training.
        stride_first: Whether a ResNet from a file of weights has its strides in the first convolution of a block.
        precision: Arithmetic of the training.
        threads: Number of CPU threads. Sums depend on it, so a continued run uses the same number.
        device: Name of the device.
        cpu: Instruction set and model of the CPU. Sums on the CPU depend on them.
        aidgn: Version of aidgn.
        torch: Version of PyTorch.
        python: Version of Python.
        path: The file, for messages.
    """

    identity: dict[str, Any] = field(default_factory=dict)
    steps: Annotated[int, msgspec.Meta(gt=0, le=MAX_NUMBER)] | None = None
    classes: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    image_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 14)] = 0
    skipped: list[str] = field(default_factory=list)
    root: str | None = None
    stride_first: bool | None = None
    precision: str = ""
    threads: Annotated[int, msgspec.Meta(gt=0, le=1 << 10)] | None = None
    device: str = ""
    cpu: str = ""
    aidgn: str = ""
    torch: str = ""
    python: str = ""
    path: Path = field(default=Path(names.METADATA), compare=False)

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
        known = {name: value for name, value in values.items() if name != "path" and value is not None}
        try:
            metadata = msgspec.convert(known, cls)
            msgspec.convert(metadata.identity, IdentityTypes)
            for name in OPTIONS.keys() & metadata.identity.keys():
                if metadata.identity[name] is not None:
                    OPTIONS[name].convert(metadata.identity[name])
            for names in (metadata.classes, metadata.domains):
                if len(set(names)) < len(names):
                    raise ValueError(f"{clip(names)} has a name twice")
        except (ValueError, ParameterError) as error:
            raise DamagedMetadata(path, str(error).rstrip(".")) from None
        return replace(metadata, path=path)

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
