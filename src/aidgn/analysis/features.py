"""The features of a trained run, and their files in open formats."""

import base64
import json
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.data.splits import train_val_indices
from aidgn.data.table_reader import import_pyarrow
from aidgn.errors import AidgnError
from aidgn.files import atomic_write
from aidgn.runs.inputs import open_run

VERSION = 1
# Fields that hold an array with an entry per image: name in files, dimensions and type.
ARRAYS: dict[str, tuple[str, int, type[np.generic]]] = {
    "features": ("features", 2, np.float32),
    "logits": ("logits", 2, np.float32),
    "labels": ("labels", 1, np.int64),
    "domains": ("domains", 1, np.int64),
    "validation": ("outside", 1, np.bool_),
}


@dataclass(frozen=True, eq=False)
class Features:
    """Features and predictions of a trained network for N images of all domains, in the data set's order."""

    features: np.ndarray  # float32 [N, n], the classifier's input
    logits: np.ndarray  # float32 [N, C]
    labels: np.ndarray  # int64 [N]
    domains: np.ndarray  # int64 [N], index into domain_names
    validation: np.ndarray  # bool [N], the fifth of each domain that is not trained on
    files: list[str]  # relative to the data set's folder
    class_names: list[str]
    domain_names: list[str]
    targets: list[str]  # domains that the training never saw
    weight: np.ndarray | None  # float32 [n, C], the classifier's class vectors if it has them
    kappa: float | None  # of an AngularClassifier
    dataset: str
    algorithm: str
    trial: int
    draw: int
    model: str  # sha256 of the weights file

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def source_names(self) -> list[str]:
        return [name for name in self.domain_names if name not in self.targets]

    @property
    def unseen(self) -> np.ndarray:
        """Mask of the images of the targets, bool [N]."""
        return np.isin(self.domains, [self.domain_names.index(name) for name in self.targets])

    def split(self, domain: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of a domain's train and validation images, in the splits' shuffled order."""
        number = self.domain_names.index(domain)
        indices = np.flatnonzero(self.domains == number)
        train, validation = (indices[part] for part in train_val_indices(len(indices), self.trial, number))
        if not self.validation[indices].any():  # trained on all images
            return train, validation
        shuffled = np.concatenate([train, validation])  # groups may have moved images to the other side
        return shuffled[~self.validation[shuffled]], shuffled[self.validation[shuffled]]

    def representative(self) -> dict[str, np.ndarray]:
        """Return the indices of the images that represent each domain: a source's validation images, else all images.

        A network treats images that it was trained on differently.
        """
        indices = {}
        for number, name in enumerate(self.domain_names):
            mask = self.domains == number
            if name not in self.targets and (mask & self.validation).any():
                mask &= self.validation
            indices[name] = np.flatnonzero(mask)
        return indices

    def accuracy(self, images: np.ndarray) -> float:
        return float((self.logits[images].argmax(1) == self.labels[images]).mean())

    def save(self, path: str | Path) -> Path:
        """Write an open file without objects: .npz, or .parquet with a row per image."""
        path = Path(path)
        if path.suffix not in (".npz", ".parquet"):
            raise AidgnError(f"{path} should end in .npz or .parquet, the two formats of feature files.")
        if path.suffix == ".parquet":
            _write_parquet(self, path)
            return path
        arrays = {key: getattr(self, name) for name, (key, _, _) in ARRAYS.items()}
        with atomic_write(path) as temporary:
            write_npz(temporary, {**arrays, "weight": self.weight, "files": self.files, **self._metadata()})
        return path

    @classmethod
    def load(cls, path: str | Path, run: str | Path | None = None) -> "Features":
        """Read features from a file.

        Args:
            path: File that `save` wrote.
            run: Folder of a run; features of another model are refused.
        """
        path = Path(path)
        if not path.is_file():
            raise AidgnError(f"There is no feature file {path}. `aidgn features RUN` makes one.")
        try:
            if path.suffix == ".parquet":
                values = _read_parquet(path)
            else:
                values = read_npz(path, [*(key for key, _, _ in ARRAYS.values()), "weight"])
                values["validation"] = values.pop("outside")
            if int(values.pop("version")) > VERSION:
                raise AidgnError(f"{path} was written by a later aidgn. Install a newer one, or make the file again.")
            features = cls(**{"weight": None, "kappa": None, **values})
            features._check()
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise AidgnError(
                f"{path} is not a feature file of aidgn, or it is damaged ({error}). `aidgn features RUN` makes one."
            ) from None
        if run is not None and features.model != open_run(run).model_digest:
            raise AidgnError(
                f"{path} holds features of another model ({features.algorithm} on {features.dataset}, "
                f"{', '.join(features.targets) or 'nothing'} unseen, trial {features.trial}, weights "
                f"{features.model[:8]}) than that of {run}. `aidgn features {run}` makes the right ones."
            )
        return features

    def _check(self) -> None:
        """Raise ValueError if the arrays do not fit together."""
        for name, (_, dimensions, dtype) in ARRAYS.items():
            array = getattr(self, name)
            if array.ndim != dimensions or array.dtype != dtype or len(array) != len(self.files):
                raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
        check_numbers(self.labels, self.class_names)
        check_numbers(self.domains, self.domain_names)
        if self.logits.shape[1] != len(self.class_names) or {*self.targets} - {*self.domain_names}:
            raise ValueError("logits or targets do not fit the names of classes and domains")

    def _metadata(self) -> dict[str, Any]:
        """Return everything but arrays and files."""
        names = [field.name for field in fields(self) if field.name not in (*ARRAYS, "files", "weight")]
        return {"version": VERSION, **{name: getattr(self, name) for name in names}}


# Files ----------------------------------------------------------------------------------------------------------------


def write_npz(path: Path, values: Mapping[str, Any]) -> None:
    """Write arrays, texts, lists of texts and numbers by name, for `read_npz`; leave out None."""
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in values.items() if value is not None}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def read_npz(path: str | Path, arrays: Collection[str]) -> dict[str, Any]:
    """Read a file of `write_npz`; values not named in `arrays` become texts, lists of texts and numbers."""
    with np.load(path, allow_pickle=False) as file:
        values: dict[str, Any] = {name: file[name] for name in file.files}
    for name in values.keys() - set(arrays):
        value = values[name]
        values[name] = [str(item) for item in value] if value.ndim else value.item()
    return values


def check_numbers(numbers: np.ndarray, names: Sequence[str]) -> None:
    """Raise ValueError unless each number is an index into the names."""
    if not np.isin(numbers, np.arange(len(names))).all():
        raise ValueError(f"classes or domains are not all from 0 to {len(names) - 1}, of {len(names)} names")


def _write_parquet(features: Features, path: Path) -> None:
    arrow = import_pyarrow(path, "pyarrow.parquet")
    columns = {
        name: arrow.FixedSizeListArray.from_arrays(arrow.array(array.ravel()), array.shape[1])
        for name, array in (("features", features.features), ("logits", features.logits))
    }
    table = arrow.table(
        {
            "file": [
                file.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for file in features.files
            ],
            "domain": [features.domain_names[number] for number in features.domains],
            "class": [features.class_names[number] for number in features.labels],
            "split": np.where(features.validation, "out", "in").tolist(),
            "domains": features.domains,
            "labels": features.labels,
            **columns,
        }
    )
    metadata = features._metadata()
    if features.weight is not None:
        metadata["weight"] = base64.b64encode(features.weight.tobytes()).decode()
    with atomic_write(path) as temporary:
        arrow.parquet.write_table(table.replace_schema_metadata({"aidgn": json.dumps(metadata)}), temporary)


def _read_parquet(path: Path) -> dict[str, Any]:
    arrow = import_pyarrow(path, "pyarrow.parquet")
    try:
        table = arrow.parquet.read_table(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(error) from None
    values = json.loads((table.schema.metadata or {})[b"aidgn"])
    for name in ("features", "logits"):
        column = table[name].combine_chunks()
        values[name] = column.flatten().to_numpy(zero_copy_only=False).reshape(len(table), column.type.list_size)
    if "weight" in values:
        weight = np.frombuffer(base64.b64decode(values["weight"]), np.float32)
        values["weight"] = weight.reshape(-1, len(values["class_names"]))
    return {
        **values,
        "labels": table["labels"].to_numpy(),
        "domains": table["domains"].to_numpy(),
        "validation": np.array(table["split"].to_pylist()) == "out",
        "files": table["file"].to_pylist(),
    }
