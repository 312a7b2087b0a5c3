"""Read and write the files with the numbers of a run, each with a checksum that every reader compares.

    model.safetensors, last.safetensors    sha256 of metadata and tensors, as `sha256` in the file's own metadata
    backbone.safetensors                   the same
    results.jsonl of a finished run        sha256 of the records without times, as `records` in last.safetensors
    run.json of a finished run             sha256 of the values without the machine, as `metadata` in last.safetensors
    novelty.json, expectations.json        sha256 of the other values, as `sha256` in the same object
    state.pt                               CRC-32 of every record, in the zip archive that PyTorch writes
    features.npz, predictions.npz          CRC-32 of every array, in the zip archive that NumPy writes

All are plain files of their formats. Files that version 0.1.0 wrote without `sha256` are read unchecked.
PyTorch is imported by the functions that need it, so that a sweep's status is quick.
"""

import errno
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aidgn.errors import AidgnError
from aidgn.files import atomic_write, check_finite, parse_json, write_text
from aidgn.runs import names
from aidgn.runs.metadata import metadata_digest
from aidgn.runs.record_log import records_digest

if TYPE_CHECKING:
    from torch import Tensor

JSON_FILES = (names.NOVELTY, names.EXPECTATIONS)
ARRAY_FILES = (names.FEATURES, names.PREDICTIONS)
CHECKED = (names.STATE, names.MODEL, names.LAST, names.BACKBONE, *JSON_FILES, *ARRAY_FILES)
DIGESTS = {
    names.RECORDS: ("records", records_digest),
    names.METADATA: ("metadata", metadata_digest),
}  # of finished runs
WEIGHTS_KEYS = {"algorithm", "step", "run", "novelty"}  # metadata in 0.1.0; a file without sha256 has no others
NOVELTY_KEYS = {"version", "norms", "angles", "by_angle"}  # the same


class DamagedFile(AidgnError):
    """The content of a file has changed since it was written."""


def _damaged(path: Path, reason: str) -> DamagedFile:
    return DamagedFile(f"{path} is damaged: {reason}. {_remedy(path)}")


def _remedy(path: Path) -> str:
    if path.name == names.STATE:
        return "Remove it to start this run from the beginning."
    if path.name == names.NOVELTY:
        return "Remove it to predict without warnings."
    if path.name == names.EXPECTATIONS:
        return "Repeat the command `aidgn fit` to write it again, or remove it to predict without calibration."
    if path.name in ARRAY_FILES:
        return "Remove it; the command that wrote it then writes it again."
    if (path.parent / names.RECORDS).exists():
        return f"Remove {path.with_name(names.LAST)}; the command that started the run then trains it again."
    return "Copy it from its source again, or run the command that wrote it again."


# Weights --------------------------------------------------------------------------------------------------------------


def write_weights(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file with metadata and a checksum, for `read_weights`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = json.loads(json.dumps(metadata))  # in the form `read_weights` returns
    text = json.dumps({**metadata, "sha256": _weights_digest(tensors, metadata)})
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"aidgn": text})
        except SafetensorError as error:
            raise system_error(error, path.parent) from None
        temporary.chmod(path.parent.stat().st_mode & 0o666)  # private if the folder is private


def read_model(path: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Read the weights of a whole model, including its frozen network in the file next to it."""
    tensors, metadata = read_weights(path)
    digest = metadata.pop("backbone", None)
    if digest is not None:
        file = path.with_name(names.BACKBONE)
        backbone, described = read_weights(file)
        if described.get("backbone") != digest:
            raise AidgnError(f"{file} is not the network of {path}. {_remedy(path)}")
        tensors |= backbone
    return tensors, metadata


def read_weights(path: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Read the tensors and metadata of a safetensors file; an error if it is damaged or weights are not finite."""
    from safetensors import SafetensorError, safe_open

    try:
        path.open("rb").close()  # raises the exact error; safe_open reports any fault as a missing file
        with safe_open(path, framework="pt") as file:
            entries = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        metadata = parse_json(entries.pop("aidgn", "{}"))
        if not isinstance(metadata, dict):
            raise ValueError("its metadata are not those of aidgn")
    except OSError as error:
        raise AidgnError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, SafetensorError) as error:
        raise _damaged(path, f"it cannot be read as safetensors ({error})") from None
    digest = metadata.pop("sha256", None)
    if entries or (digest is None and not metadata.keys() <= WEIGHTS_KEYS):
        raise _damaged(path, "its metadata are not those of aidgn")
    if digest is not None and digest != _weights_digest(tensors, metadata):
        raise _damaged(path, "its content does not match its checksum")
    check_finite(path, tensors)
    return tensors, metadata


def _weights_digest(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, Any]) -> str:
    """Return a sha256 of the metadata, then of each tensor's name, type, shape and bytes, sorted by name."""
    import torch

    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# The state of training ------------------------------------------------------------------------------------------------


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a training state for `read_state`; PyTorch puts a checksum of each record into the archive."""
    import torch

    with atomic_write(path) as temporary:
        try:
            torch.save(dict(state), temporary)
        except RuntimeError as error:
            raise system_error(error, path.parent) from None


def read_state(path: Path) -> dict[str, Any]:
    """Read a training state without running code in it. Compare the checksums first, because PyTorch does not."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() is not None
            # PyTorch writes none; a folder's attribute makes its reader leave a tensor unread
            damaged = damaged or any(record.external_attr for record in archive.infolist())
        if damaged:
            raise _damaged(path, "its content does not match its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise _damaged(path, "it holds no state of a training")
        return state
    except (MemoryError, AidgnError):
        raise
    except Exception as error:  # a damaged archive leads to errors of any kind
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is an offset outside the file
            raise AidgnError(
                f"{path} cannot be read: {error.strerror or error}. Once it can, the same command goes on from there."
            ) from None
        raise _damaged(
            path, f"it cannot be read, or holds objects that could run code ({type(error).__name__})"
        ) from None


# Novelty and expectations ---------------------------------------------------------------------------------------------


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write values as JSON with a checksum, for `read_values`."""
    values = json.loads(json.dumps(values))  # in the form `read_values` returns
    write_text(path, json.dumps({**values, "sha256": _values_digest(values)}, allow_nan=False) + "\n")


def read_values(path: Path) -> dict[str, Any]:
    """Read values; an error if the file is damaged."""
    try:
        values = parse_json(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("no object")
    except OSError as error:
        raise AidgnError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it cannot be read as JSON ({error})") from None
    digest = values.pop("sha256", None)
    if digest is None and not values.keys() <= NOVELTY_KEYS:
        raise _damaged(path, "it holds other values than those of a model")
    if digest is not None and digest != _values_digest(values):
        raise _damaged(path, "its content does not match its checksum")
    return values


def _values_digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# Verification ---------------------------------------------------------------------------------------------------------


@dataclass
class Verification:
    """The result of `verify`."""

    files: int = 0
    unchecked: int = 0  # readable, but without a checksum
    damaged: list[AidgnError] = field(default_factory=list)


def verify(folders: Sequence[str | Path], on_progress: Callable[[int, int], None] | None = None) -> Verification:
    """Read every file of runs and models below the folders and compare its checksum.

    Args:
        folders: Folders of sweeps, runs or models, at any depth.
        on_progress: Called with the number of files read so far and the total.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise AidgnError(f"The folder {folder} does not exist.")
    paths = sorted({path for folder in folders for path in _find_checked(Path(folder))})
    result = Verification()
    finished: dict[Path, dict[str, Any]] = {}  # metadata of the last weights in the folders of finished runs
    for number, path in enumerate(paths, 1):
        try:
            if path.name == names.STATE:
                read_state(path)
            elif path.name in ARRAY_FILES:
                _verify_arrays(path)
            elif path.name in DIGESTS:
                result.unchecked += path.parent in finished and not _verify_digest(path, finished[path.parent])
            else:
                metadata = read_values(path) if path.name in JSON_FILES else read_weights(path)[1]
                if path.name == names.LAST:  # comes before the files that it has digests of
                    finished[path.parent] = metadata
                result.unchecked += not _has_checksum(path)
        except AidgnError as error:
            if not path.exists():  # a run in progress has removed or replaced it
                continue
            result.damaged.append(error)
        result.files += 1
        if on_progress:
            on_progress(number, len(paths))
    return result


def _find_checked(folder: Path) -> Iterator[Path]:
    for root, _, files in os.walk(folder):
        yield from (Path(root, name) for name in files if name in CHECKED)
        if names.LAST in files:
            yield from (Path(root, name) for name in files if name in DIGESTS)


def _has_checksum(path: Path) -> bool:
    """Return whether a file of values, or the header of a file of weights, has a checksum."""
    with path.open("rb") as file:
        length = -1 if path.name in JSON_FILES else int.from_bytes(file.read(8), "little")
        return b"sha256" in file.read(length)


def _verify_digest(path: Path, metadata: Mapping[str, Any]) -> bool:
    """Compare a file of a finished run with its digest in the metadata of the weights; return whether there is one."""
    key, compute_digest = DIGESTS[path.name]
    digest = metadata.get(key)
    try:
        changed = digest is not None and compute_digest(path.read_bytes()) != digest
    except (ValueError, AttributeError):
        changed = True
    if changed:
        raise _damaged(path, "its values are not those that the training wrote")
    return digest is not None


def _verify_arrays(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(path, f"it cannot be read ({error})") from None
    if damaged:
        raise _damaged(path, f"{damaged} has another checksum")


def system_error(error: Exception, folder: Path) -> OSError:
    """Return the operating-system error behind an error of PyTorch's or safetensors' writers."""
    status = os.statvfs(folder)
    full = status.f_bavail * status.f_frsize < 2**20
    return OSError(errno.ENOSPC if full else errno.EIO, str(error).splitlines()[0])
