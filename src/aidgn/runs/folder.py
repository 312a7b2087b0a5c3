"""The folder of a run: its files, who may write to them, and how a run survives a crash at any moment.

    run.json            identity of the run, data set, versions
    results.jsonl       one record per evaluation
    state.pt            state to continue from, with a copy of the records; removed when the run is finished
    novelty.json        norms and angles of features of validation images
    expectations.json   what to expect at a new site; `fit` writes it for its model
    model.safetensors   weights of the selected step
    backbone.safetensors    weights of a frozen network, not in the two others; a link to a file shared in .backbones
    last.safetensors    weights of the last step; written last: a run is finished when this file is complete
    log.txt             events, in words
    features.npz, predictions.npz, embedding.npz, adaptation.jsonl, diagnosis.json, figures/, export/
                        written by the commands that analyse a finished run

Progress has one commit point, the renaming of `state.pt`. The state holds the records so far; later records are dropped
and measured again. The end has one commit point, the renaming of `last.safetensors`.
"""

import glob
import hashlib
import json
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aidgn.errors import AidgnError, Interrupted
from aidgn.files import (
    FolderLock,
    link_or_copy,
    open_no_link,
    parse_json,
    remove_temp_files,
    translate_os_errors,
    write_text,
)
from aidgn.runs import names
from aidgn.runs.accuracy_key import accuracy_key
from aidgn.runs.checkpoints import read_state, write_state, write_weights
from aidgn.runs.metadata import RunMetadata, metadata_digest
from aidgn.runs.record_log import LostRecords, RecordLog, records_digest
from aidgn.runs.records import Record, check, parse, sort_into_runs, train_again

if TYPE_CHECKING:
    from torch import Tensor


class Busy(AidgnError):
    """Another process is training the run."""


class _File:
    """The path of a file in the folder of a run, composed on access, because a table reads thousands of folders."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, run: "RunFolder", owner: type) -> Path:
        return run.path / self.name


class RunFolder:
    """The files of a run, for reading.

    Args:
        path: The folder, which need not exist; or a folder in an archive, a `zipfile.Path`.
    """

    metadata_file = _File(names.METADATA)
    results = _File(names.RECORDS)
    state = _File(names.STATE)
    model = _File(names.MODEL)
    last = _File(names.LAST)
    backbone = _File(names.BACKBONE)
    novelty = _File(names.NOVELTY)
    expectations = _File(names.EXPECTATIONS)
    log_file = _File(names.LOG)
    features = _File(names.FEATURES)
    predictions = _File(names.PREDICTIONS)
    embedding = _File(names.EMBEDDING)
    adaptation = _File(names.ADAPTATION)
    adaptation_lock = _File(f".{names.ADAPTATION}.lock")
    diagnosis = _File(names.DIAGNOSIS)
    figures = _File("figures")
    export = _File("export")

    def __init__(self, path: str | Path):
        self.path = Path(path) if isinstance(path, str) else path

    def __str__(self) -> str:
        return str(self.path).rstrip("/")

    @classmethod
    def find(cls, folder: str | Path, *patterns: str) -> "list[RunFolder]":
        """Find the folders of runs in a folder, sorted by path.

        Args:
            folder: The folder around them.
            patterns: Their paths in the folder, such as "*" or "runs/*". By default any depth, and links are followed;
                then runs of DomainBed, which have only records, are found too, and models without records are not.
        """
        if patterns:
            paths = {path for pattern in patterns for path in Path(folder).glob(f"{pattern}/{names.METADATA}")}
            return [cls(path.parent) for path in sorted(paths)]
        return [cls(path) for path in sorted(_walk(Path(folder)), key=lambda path: f"{path}{os.sep}{names.RECORDS}")]

    @property
    def exists(self) -> bool:
        """Whether the folder has a run.json."""
        return self.metadata_file.is_file()

    @cached_property
    def metadata(self) -> RunMetadata:
        """The content of run.json, read once."""
        return RunMetadata.read(self.metadata_file)

    @property
    def identity(self) -> dict[str, Any]:
        return self.metadata.identity

    @property
    def finished(self) -> bool:
        """Whether last.safetensors, which is written last, is as long as its header says."""
        try:
            with self.last.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = os.fstat(file.fileno()).st_size
                if not 0 < length < size:
                    return False
                header = parse_json(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return bool(ends) and size == 8 + length + max(ends)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return False

    @property
    def model_digest(self) -> str:
        """The sha256 of the weights of the selected step."""
        with self.model.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @property
    def records(self) -> list[Record]:
        """The records so far, read from the file."""
        if not self.results.exists():
            return []
        lines = self.results.read_bytes().splitlines()
        return [parse(line, self.results, number) for number, line in enumerate(lines, 1)]

    def check_records(self) -> None:
        """Raise `LostRecords` if the records of a finished run lack its last step, or an accuracy."""
        run, records = self.metadata, self.records
        if run.steps is None or not run.domains:
            return
        unseen = [number for number, name in enumerate(run.domains) if name in run.identity.get("target", [])]
        keys = [accuracy_key(i, "in" if i in unseen else "out") for i in range(len(run.domains))]
        for number, record in enumerate(records, 1):
            check(record, f"{self.results}, line {number}")
            args = record["args"]
            described = args.get("domains") == run.domains and sorted(args["test_envs"]) == unseen
            lacking = [key for key in keys if not isinstance(record.get(key), float | int)]
            if lacking or not described:
                problem = f"has no {lacking[0]}" if lacking else f"is not of the run in {self.metadata_file.name}"
                raise LostRecords(f"{self.results}, line {number} {problem}.{train_again(self.results)}")
        if not records or records[-1]["step"] != run.steps:
            raise LostRecords(
                f"{self.results} lacks the record of step {run.steps}, the last.{train_again(self.results)}"
            )

    @property
    def selected(self) -> Record:
        """The record of the step that training-domain validation selects."""
        (run,) = sort_into_runs(self.records, self.results, self.metadata)
        return run.record(run.select()[1])


class RunWriter(RunFolder):
    """The folder of a run in training.

    Args:
        path: The folder.
        enabled: Whether this process writes. In distributed training only rank 0 does; elsewhere every method that
            would write does nothing.
    """

    def __init__(self, path: str | Path, enabled: bool = True):
        super().__init__(path)
        self.enabled = enabled
        self.record_log = RecordLog(self.results)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process; the system releases the lock when the process ends.

        A folder with no other file than the lock is removed at the end.
        """
        if not self.enabled:
            yield
            return
        lock = FolderLock(self.path / ".lock")
        if not lock.try_acquire() or not lock.path.exists():  # another process may have removed it, see below
            lock.release()
            raise Busy(
                f"Another process is training this run: {self.path} is locked. "
                "Wait for it, or stop it, and run the same command again to continue."
            )
        with lock:
            try:
                yield
            except Exception as error:
                if self.exists and not isinstance(error, Interrupted):
                    reason = str(error) if isinstance(error, AidgnError) else traceback.format_exc().rstrip()
                    with suppress(AidgnError):  # the disk may be what failed
                        self.log(f"failed: {reason}")
                raise
            finally:
                with suppress(OSError):
                    if list(self.path.iterdir()) == [lock.path]:
                        lock.path.unlink()
                        self.path.rmdir()

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Raise an error if the folder holds another run."""
        if not self.exists or self.identity == identity:
            return
        keys = {*self.identity, *identity}
        differing = sorted(key for key in keys if self.identity.get(key) != identity.get(key))
        raise AidgnError(
            f"{self.path} holds a run of another specification (different: {', '.join(differing)}). Move it away, or "
            "choose another folder with --out."
        )

    def stale_versions(self, identity: Mapping[str, Any]) -> list[Path]:
        """Find unfinished runs of the same custom algorithm before its file was edited, if this run is new."""
        if not self.enabled or self.exists or "source" not in identity:
            return []
        stale = []
        for other in RunFolder.find(self.path.parent, glob.escape(self.path.name.rpartition("-")[0]) + "-*"):
            with suppress(AidgnError):
                same = {**other.identity, "source": identity["source"]} == identity
                if same and not other.finished:
                    stale.append(other.path)
        return stale

    def write_metadata(self, metadata: RunMetadata) -> None:
        """Write run.json."""
        if self.enabled:
            write_text(self.metadata_file, json.dumps(metadata.to_dict(), indent=1) + "\n")

    def remove_temp_files(self) -> None:
        """Remove temporary files of killed processes, and the state of a finished run, which needs none."""
        if not self.enabled:
            return
        remove_temp_files(self.path)
        remove_temp_files(self.path.parent / names.BACKBONES, in_use=True)
        if self.finished:
            self.state.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Call `remove_temp_files` for a finished run, unless the folder is locked or read-only."""
        if self.enabled and (self.state.exists() or any(self.path.glob(".*tmp*"))) and self.finished:
            with suppress(OSError, AidgnError), self.locked():
                self.remove_temp_files()

    def log(self, text: str) -> None:
        """Add a line with the time to log.txt."""
        if self.enabled:
            with translate_os_errors(self.log_file), open_no_link(self.log_file, "a", encoding="utf-8") as file:
                file.write(time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        if self.enabled:
            self._check_present()
            self.record_log.append(record)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state to continue from."""
        if self.enabled:
            self._check_present()
            write_state(self.state, {**state, **self.record_log.to_state()})

    def load(self) -> dict[str, Any] | None:
        """Read the last saved state and bring the records back to it; None to start from the beginning."""
        if not self.state.exists():
            if self.enabled:
                self.record_log.clear()
            return None
        state = read_state(self.state)
        if self.enabled:
            eval_every = self.identity.get("eval_every") if self.exists else None
            self.record_log.restore(state, self.state, eval_every)
        return state

    def _check_present(self, *paths: Path) -> None:
        for path in (self.path, *paths):
            if not path.exists():
                raise LostRecords(
                    f"{path} was removed while this run was training, so the training has stopped. The same command "
                    "goes on from the last saved state, if there is one."
                )

    def finish(
        self,
        algorithm: str,
        selected: "tuple[Mapping[str, Tensor], int]",
        last: "tuple[Mapping[str, Tensor], int]",
        backbone: "tuple[str, Mapping[str, Tensor]] | None" = None,
    ) -> None:
        """Write both sets of weights with their steps. From then on the run is finished and needs no state.

        Args:
            algorithm: Label of the algorithm.
            selected: Weights of the selected step.
            last: Weights of the last step.
            backbone: Digest and weights of a frozen network, which are not among the others.
        """
        self._check_present(self.metadata_file)
        self.record_log.check()
        metadata: dict[str, Any] = {"algorithm": algorithm}
        if backbone:
            metadata["backbone"], tensors = backbone
            shared = self.path.parent / names.BACKBONES / f"{metadata['backbone']}.safetensors"
            if not shared.exists():
                write_weights(shared, tensors, {"backbone": metadata["backbone"]})
            link_or_copy(shared, self.backbone)
        write_weights(self.model, selected[0], {**metadata, "step": selected[1]})
        metadata |= {"step": last[1], "records": records_digest(self.record_log.content)}
        metadata["metadata"] = metadata_digest(self.metadata_file.read_bytes())
        write_weights(self.last, last[0], metadata)
        self.state.unlink(missing_ok=True)


def _walk(folder: Path) -> Iterable[Path]:
    """Find folders with records, and folders of runs that have no record yet. Models of `aidgn fit` are neither."""
    links: set[Path] = set()  # each target is visited once, because links may form a circle
    for root, folders, files in os.walk(folder, followlinks=True):
        for name in list(folders):
            link = Path(root, name)
            if link.is_symlink():
                if link.resolve() in links:
                    folders.remove(name)
                links.add(link.resolve())
        has_no_record_yet = names.METADATA in files and names.MODEL not in files
        if names.RECORDS in files or (has_no_record_yet and RunFolder(root).metadata.steps):
            yield Path(root)
