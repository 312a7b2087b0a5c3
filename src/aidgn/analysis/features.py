"""The features of a trained run: computed once for every image, kept beside the run in an open file, read by every
analysis."""

import base64
import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aidgn.algorithms import Algorithm, find
from aidgn.algorithms.base import class_vectors
from aidgn.algorithms.custom import source_of
from aidgn.data import DATASETS, Dataset, load_dataset
from aidgn.data import transforms as augment
from aidgn.data.cache import prepare
from aidgn.data.dataset import load_folder
from aidgn.data.loader import DeviceImageStore
from aidgn.data.splits import train_val_indices
from aidgn.errors import AidgnError
from aidgn.files import atomic_write
from aidgn.inference.model import find_run, load_model
from aidgn.novelty import outputs
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import RunMetadata
from aidgn.training.evaluation import rows_of
from aidgn.training.featurizer import choose_device
from aidgn.training.trainer import load_images

VERSION = 1
ARRAYS = {
    "features": (2, np.float32),
    "logits": (2, np.float32),
    "labels": (1, np.int64),
    "domains": (1, np.int64),
    "outside": (1, np.bool_),
}
log = logging.getLogger("aidgn")

Progress = Callable[[str, int, int], None]  # what is done, how many, of how many


@dataclass(frozen=True, eq=False)
class Features:
    """N images of all domains, sources and targets, as the trained network sees them, in the data set's order."""

    features: np.ndarray  # float32 [N, n], what the classifier sees
    logits: np.ndarray  # float32 [N, C]
    labels: np.ndarray  # int64 [N]
    domains: np.ndarray  # int64 [N], index into domain_names
    outside: np.ndarray  # bool [N], of the `out` split: the fifth set aside
    files: list[str]  # relative to the data set's folder
    class_names: list[str]
    domain_names: list[str]
    targets: list[str]  # the domains that the training never saw
    weight: np.ndarray | None  # float32 [n, C], the classifier's class vectors, where it has such
    kappa: float | None  # of an AngularClassifier
    dataset: str
    algorithm: str
    trial: int
    draw: int
    model: str  # sha256 of the weights file

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, domain: str) -> tuple[np.ndarray, np.ndarray]:
        """Where the images of a domain's `in` and `out` split are, in the splits' shuffled order."""
        number = self.domain_names.index(domain)
        everywhere = np.flatnonzero(self.domains == number)
        inside, outside = train_val_indices(len(everywhere), self.trial, number)
        return everywhere[inside], everywhere[outside]

    def accuracy(self, images: np.ndarray) -> float:
        return float((self.logits[images].argmax(1) == self.labels[images]).mean())

    def about(self) -> dict[str, Any]:
        """All but the arrays and files."""
        return {
            "version": VERSION,
            **{
                key.name: getattr(self, key.name)
                for key in fields(self)
                if key.name not in (*ARRAYS, "files", "weight")
            },
        }

    def save(self, path: str | Path) -> Path:
        """One open file without objects: .npz, or .parquet with one row per image."""
        path = Path(path)
        if path.suffix not in (".npz", ".parquet"):
            raise AidgnError(f"{path} should end in .npz or .parquet, the two forms that features are written in.")
        with atomic_write(path) as temporary:
            if path.suffix == ".parquet":
                _write_parquet(self, temporary)
                return path
            arrays: dict[str, Any] = {name: getattr(self, name) for name in (*ARRAYS, "weight")}
            arrays |= {"files": np.array(self.files, dtype=np.str_), **self.about()}
            kept: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items() if value is not None}
            with temporary.open("wb") as file:
                np.savez(file, **kept)
        return path

    @classmethod
    def load(cls, path: str | Path, run: str | Path | None = None) -> "Features":
        """Features from a file; with `run`, an error if they are not of the model of that run."""
        path = Path(path)
        if not path.is_file():
            raise AidgnError(f"There is no feature file {path}. `aidgn features RUN` makes one.")
        try:
            found = _read_parquet(path) if path.suffix == ".parquet" else _read_npz(path)
            if int(found.pop("version")) > VERSION:
                raise AidgnError(f"{path} was written by a later aidgn. Install a newer one, or make the file anew.")
            features = cls(**{"weight": None, "kappa": None, **found})
            for name, (dimensions, kind) in ARRAYS.items():
                array = getattr(features, name)
                if array.ndim != dimensions or array.dtype != kind or len(array) != len(features.files):
                    raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
            for name, names in (("labels", features.class_names), ("domains", features.domain_names)):
                if not np.isin(getattr(features, name), np.arange(len(names))).all():
                    raise ValueError(f"{name} are not all from 0 to {len(names) - 1}, of {len(names)} names")
            if features.logits.shape[1] != len(features.class_names) or {*features.targets} - {*features.domain_names}:
                raise ValueError("logits of other classes or targets of other domains than it names")
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise AidgnError(
                f"{path} is not a feature file of aidgn, or it is damaged ({error}). `aidgn features RUN` makes one."
            ) from None
        if run is not None and features.model != open_run(Path(run)).model_digest:
            raise AidgnError(
                f"{path} holds features of another model ({features.algorithm} on {features.dataset}, "
                f"{', '.join(features.targets) or 'nothing'} unseen, trial {features.trial}, weights "
                f"{features.model[:8]}) than that of {run}. Make its own with `aidgn features {run}`."
            )
        return features


# From images to features ----------------------------------------------------------------------------------------------


def extract(
    run: str | Path,
    *,
    data: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    algorithm: str | Sequence[str] | None = None,
    must_keep: bool = False,
    on_progress: Progress | None = None,
) -> Features:
    """Features of RUN/model.safetensors for all images of all domains, as the run's evaluation computes them.

    They are kept as RUN/features.npz, and read back from there while that is of this model; where that cannot be
    written it is an error if they `must_keep`. `data` is the data set's folder, if it is no more where the training
    found it; `algorithm` is FILE.py:CLASS, if it is your own, or several of which one is the run's."""
    folder = open_run(Path(run))
    kept = folder.features
    digest = folder.model_digest
    if kept.exists():
        try:
            if (known := Features.load(kept)).model == digest:
                return known
        except AidgnError as error:
            log.warning("%s They are computed anew.", error)
    report = on_progress or (lambda *_: None)
    images = open_images(folder.metadata, data=data, data_dir=data_dir, device=device, on_progress=report)
    model = load_model(folder.path, device, own_algorithm(folder.metadata, algorithm))
    dataset, identity = images.decoded.dataset, folder.identity
    shape, vectors = (len(dataset), len(dataset.classes)), class_vectors(model.network.classifier)
    found = Features(
        np.empty((0, 0), np.float32),
        np.empty(shape, np.float32),
        dataset.labels.astype(np.int64),
        dataset.domain_of.astype(np.int64),
        np.zeros(len(dataset), np.bool_),
        list(dataset.files),
        list(dataset.classes),
        list(dataset.domains),
        list(identity["target"]),
        None if vectors is None else np.ascontiguousarray(vectors.float().cpu().numpy()),
        getattr(model.network.classifier, "kappa", None),
        identity["dataset"],
        identity["algorithm"],
        identity["trial"],
        identity["draw"],
        digest,
    )
    parts = [part for name in found.domain_names for part in found.split(name)]
    for _, out in map(found.split, found.domain_names):
        found.outside[out] = True
    done, features = 0, np.empty((len(dataset), 0), np.float32)
    for where, z, logits in compute(model.network, images, rows_of(parts, model.network, images.device)):
        if not features.size:
            features = np.empty((len(dataset), z.shape[1]), np.float32)
        features[where], found.logits[where] = z.cpu().numpy(), logits.cpu().numpy()
        done += len(where)
        report("computing features", done, len(dataset))
    found = replace(found, features=features)
    try:
        found.save(kept)
    except AidgnError as error:  # a folder of someone else's, or a full disk
        if must_keep:
            raise
        log.warning("%s The features are not kept.", error)
    return found


@torch.no_grad()
def compute(
    network: Algorithm, images: DeviceImageStore, rows: Sequence[Tensor]
) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """For every row of image indices: the row, features and logits, on the device in float32."""
    network.eval()
    transform = clean_transform(images)
    for row, (pixels, geometry, _) in zip(rows, images.batches(rows), strict=True):
        z, logits = outputs(network, transform(pixels, geometry))
        yield row.numpy(), z.float(), logits.float()


def clean_transform(images: DeviceImageStore) -> Callable[[Tensor, Tensor], Tensor]:
    """That of evaluation; on a GPU without compiling, which would take longer than the work."""
    return partial(augment.clean, size=images.decoded.dataset.image_size, exact_fit=images.exact_fit)


# The run and its images -----------------------------------------------------------------------------------------------


def open_run(path: Path) -> RunFolder:
    """Return the folder of a finished run, after checking what analyses need of its run.json."""
    if path.is_file():
        raise AidgnError(f"{path} is a file: give the folder of a finished run.")
    run = find_run(path, RunFolder(path).model)
    run.metadata.check_complete("dataset", "algorithm", "target", "trial", "draw", "data")
    return run


def own_algorithm(metadata: RunMetadata, given: str | Sequence[str] | None) -> str | None:
    """The FILE.py:CLASS that is the run's, of one or several given for many runs, of which only some need any: that of
    its name, and of these the one that is as it was."""
    identity = metadata.identity
    if identity.get("source") is None:
        return None

    def fits(name: str) -> tuple[bool, bool]:
        kind = find(name)
        return metadata.label.name == kind.name(), identity["source"] == source_of(kind)

    return max([given] if isinstance(given, str) else given or (), key=fits, default=None)


def open_images(
    metadata: RunMetadata,
    *,
    data: str | Path | None,
    data_dir: str | Path | None,
    device: str,
    on_progress: Progress,
) -> DeviceImageStore:
    """The very images a run was trained on, on the device."""
    dataset = find_dataset(metadata, data, data_dir)
    prepared = prepare(
        dataset,
        skip_broken=bool(metadata.skipped),
        on_progress=lambda done, total: on_progress("decoding images", done, total),
    )
    if metadata.identity["data"] != f"{prepared.dataset.fingerprint[:32]}-{prepared.content}":
        raise AidgnError(
            f"The images in {dataset.root or dataset.name} are not those that {metadata.path.parent} was trained on: "
            "files were added, removed or changed. Say where the right ones are with --data DIR."
        )
    return load_images(prepared, choose_device(device))


def find_dataset(metadata: RunMetadata, data: str | Path | None, data_dir: str | Path | None = None) -> Dataset:
    """The data set in `data`, else where the training found it, else where data sets of its name are looked for."""
    metadata.check_complete("dataset")
    name = metadata.identity["dataset"]
    entry = DATASETS.get(name)
    root = metadata.root

    def named(place: str | Path | None) -> Dataset:  # `place` is a folder that data sets are in
        try:
            return load_dataset(name, place)
        except AidgnError as error:  # says what the option for it is called in other commands
            raise AidgnError(str(error).replace("--data-dir", "--data")) from None

    if entry is not None and entry.name == "digits":
        dataset = load_dataset(name)
    elif data is not None and entry is not None and not entry.order_folders(_folders(Path(data))):
        dataset = named(data)
    elif data is not None:
        dataset = load_folder(Path(data), entry)
    elif root is not None and Path(root).is_dir():
        dataset = load_folder(Path(root), entry)
    elif entry is not None:
        dataset = named(data_dir)
    else:
        was = f"{root}, where they were, does not exist" if root else "the model does not say where they were"
        raise AidgnError(
            f"The images of {metadata.path.parent} are not here: {was}. Say where the folder of {name} "
            "is with --data DIR."
        )
    return dataset.with_image_size(metadata.image_size)


def _folders(path: Path) -> list[str]:
    return [each.name for each in path.iterdir() if each.is_dir() and each.name[0] != "."] if path.is_dir() else []


# Files ----------------------------------------------------------------------------------------------------------------


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        found: dict[str, Any] = {name: file[name] for name in file.files}
    for name in (
        "files",
        "class_names",
        "domain_names",
        "targets",
        "kappa",
        "dataset",
        "algorithm",
        "trial",
        "draw",
        "model",
        "version",
    ):
        if name in found:
            found[name] = [str(each) for each in found[name]] if found[name].ndim else found[name].item()
    return found


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise AidgnError(
            "Parquet needs pyarrow, which is not installed: pip install 'aidgn[parquet]', or choose a "
            "file name that ends in .npz."
        ) from None
    return pyarrow, parquet


def _write_parquet(features: Features, path: Path) -> None:
    arrow, parquet = _arrow()
    columns = {
        name: arrow.FixedSizeListArray.from_arrays(arrow.array(array.ravel()), array.shape[1])
        for name, array in (("features", features.features), ("logits", features.logits))
    }
    texts = [file.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for file in features.files]
    table = arrow.table(
        {
            "file": texts,
            "domain": [features.domain_names[number] for number in features.domains],
            "class": [features.class_names[number] for number in features.labels],
            "split": np.where(features.outside, "out", "in").tolist(),
            "domains": features.domains,
            "labels": features.labels,
            **columns,
        }
    )
    about = features.about()
    if features.weight is not None:
        about["weight"] = base64.b64encode(features.weight.tobytes()).decode()
    parquet.write_table(table.replace_schema_metadata({"aidgn": json.dumps(about)}), path)


def _read_parquet(path: Path) -> dict[str, Any]:
    arrow, parquet = _arrow()
    try:
        table = parquet.read_table(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(error) from None
    found = json.loads((table.schema.metadata or {})[b"aidgn"])
    for name in ("features", "logits"):
        column = table[name].combine_chunks()
        found[name] = column.flatten().to_numpy(zero_copy_only=False).reshape(len(table), column.type.list_size)
    if "weight" in found:
        found["weight"] = np.frombuffer(base64.b64decode(found["weight"]), np.float32).reshape(
            -1, len(found["class_names"])
        )
    return {
        **found,
        "labels": table["labels"].to_numpy(),
        "domains": table["domains"].to_numpy(),
        "outside": np.array(table["split"].to_pylist()) == "out",
        "files": table["file"].to_pylist(),
    }
