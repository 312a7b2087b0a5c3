"""Read the results.jsonl of runs of aidgn and DomainBed, thousands of them in seconds, and their adaptation.jsonl."""

import os
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np

from aidgn.data.row_cache import usable_cores
from aidgn.errors import AidgnError
from aidgn.files import parse_json
from aidgn.runs import names
from aidgn.runs.accuracy_key import accuracy_key
from aidgn.runs.folder import RunFolder
from aidgn.runs.label import Label
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.packed import SUFFIX, unpack
from aidgn.runs.records import (
    ACCURACY,
    RECORD_VERSION,
    Record,
    Records,
    RunRecords,
    check,
    parse,
    sort_into_runs,
    train_again,
)

# Path, inode, runs in the file, whether its last line is cut in half
File = tuple[Path, tuple[int, int] | None, list[RunRecords], bool]

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
CHUNK = 250  # files read at a time by one process
NO_METADATA = RunMetadata()  # of runs of DomainBed


class Adapted(TypedDict):
    """A line of adaptation.jsonl."""

    dataset: str
    algorithm: str
    target: list[str]
    trial: int
    draw: int
    method: str
    settings: dict[str, Any]
    source_accuracy: Share
    target_accuracy: Share
    selected: bool
    model: str


def load_records(*folders: str | Path) -> list[Record]:
    """Return the records of all runs.

    Args:
        folders: Folders of runs, or folders around them at any depth; or files of `aidgn.runs.pack`.
    """
    return list(read_runs(*folders))


def read_runs(*folders: str | Path) -> Records:
    """Return the records of `load_records` sorted into runs, in a fraction of the time and memory."""
    paths: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.exists():
            raise AidgnError(f"{folder} does not exist. Give the folder of a run or of a sweep.")
        files = _find_files(folder)
        if not files:
            lost = RunFolder(folder).last.exists() and RunFolder(folder).exists
            raise AidgnError(
                f"There is no {names.RECORDS} in {folder} or below."
                + (train_again(folder / names.RECORDS) if lost else " Give the folder of a run or of a sweep.")
            )
        paths.update(dict.fromkeys(files))
    runs: dict[Any, RunRecords] = {}
    seen: set[tuple[int, int]] = set()
    empty: list[Path] = []
    cut = twice = 0
    for path, inode, runs_of_file, was_cut in _read_files(list(paths)):
        if inode in seen:
            continue  # the same file under another path
        if inode is not None:
            seen.add(inode)
        cut += was_cut
        if not runs_of_file:
            empty.append(path.parent)
        for run in runs_of_file:
            other = runs.setdefault(run.identity, run)
            if other is not run:
                twice += 1
                if (run.last_step, len(run)) > (other.last_step, len(other)):
                    runs[run.identity] = run
    label_versions(runs.values())
    return Records(list(runs.values()), cut, twice, empty)


def label_versions(runs: Iterable[RunRecords]) -> None:
    """Label runs of a custom algorithm by version if its file was changed between them.

    The versions are different algorithms, each with a row in a table.
    """
    sources: dict[Label, set[str]] = {}
    for run in runs:
        if run.source:
            sources.setdefault(run.label, set()).add(run.source)
    for run in runs:
        if run.source and len(sources[run.label]) > 1:
            run.relabel(run.label.with_source(run.source))


def read_adaptation(run: Path, model: str | None) -> list[Record]:
    """Return the lines of a run's adaptation.jsonl.

    Args:
        run: Folder of the run.
        model: The sha256 of a model's weights, for the lines of that model only.
    """
    path = RunFolder(run).adaptation
    if not path.exists():
        return []
    try:
        lines: list[Any] = msgspec.json.Decoder(Adapted).decode_lines(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise AidgnError(f"{path} cannot be read ({error}). Remove it; `aidgn adapt {run}` writes it again.") from None
    return [line for line in lines if model in (None, line["model"])]


def _find_files(path: Path) -> list[Path]:
    if path.is_dir():
        return [run.results for run in RunFolder.find(path)]
    if path.suffix == SUFFIX:
        return [run.results for run in unpack(path)]
    if path.suffix != ".jsonl":
        raise AidgnError(f"{path} is no {names.RECORDS}. Give the folder of a run or of a sweep.")
    return [path]


def _read_files(paths: list[Path]) -> Iterator[File]:
    """Read files; share many files out among all cores."""
    for path in paths:
        if isinstance(path, zipfile.Path):
            yield path, None, *_read(path.read_bytes(), path)
    paths = [path for path in paths if not isinstance(path, zipfile.Path)]
    chunks = [paths[i : i + CHUNK] for i in range(0, len(paths), CHUNK)]
    cores = usable_cores()
    if min(len(chunks), cores) < 2 or parent_process() is not None:
        for chunk in chunks:
            yield from _read_chunk(chunk)
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(min(len(chunks), cores), get_context("fork"), signal, (SIGINT, SIG_IGN)) as pool:
        for files in pool.map(_read_chunk, chunks):
            yield from files


def _read_chunk(paths: list[Path]) -> list[File]:
    files: list[File] = []
    for path in paths:
        text, inode = b"", None
        try:
            with path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                text, inode = file.readall(), (status.st_dev, status.st_ino)
        except FileNotFoundError:
            pass  # the run has a run.json and nothing else yet
        except OSError as error:
            raise AidgnError(f"{path} cannot be read: {error.strerror or error}.") from None
        files.append((path, inode, *_read(text, path)))
    return files


def _read(text: bytes, path: Path) -> tuple[list[RunRecords], bool]:
    """Return the runs in one file, usually one, and whether its last line is cut in half."""
    folder = RunFolder(path.parent)
    metadata = folder.metadata if folder.exists else NO_METADATA
    was_cut = False
    if not text.endswith(b"\n"):
        complete, newline, tail = text.rpartition(b"\n")
        try:
            was_cut = bool(tail.strip()) and not isinstance(parse_json(tail), dict)
        except ValueError:
            was_cut = True
        text = complete + newline if was_cut else text
    lines = [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    run = _read_fast(text, lines, path, metadata)
    if run is not None:
        return [run], was_cut
    records = []
    for number, line in lines:
        try:
            records.append(parse(line, path, number))
        except AidgnError:
            if was_cut or (number, line) != lines[-1]:
                raise
            was_cut = True
        else:
            check(records[-1], f"{path}, line {number}", metadata.aidgn)
    return sort_into_runs(records, path, metadata), was_cut


def _read_fast(text: bytes, lines: list[tuple[int, bytes]], path: Path, metadata: RunMetadata) -> RunRecords | None:
    """Read a file whose lines repeat the args and hparams of the first line to the byte, which are parsed once.

    Return None for any other file, and for one with a broken line or an impossible value: reading it in full names the
    line.
    """
    try:
        first, last = (parse(line, path, number) for number, line in (lines[0], lines[-1]))
        check(first, f"{path}, line {lines[0][0]}", metadata.aidgn)
        records = _decoder(tuple(filter(ACCURACY.fullmatch, first))).decode_lines(text)
    except (IndexError, ValueError, RecursionError, AidgnError):
        return None
    if any(record.args != records[0].args or record.hparams != records[0].hparams for record in records):
        return None
    last |= {"args": first["args"], "hparams": first["hparams"]}
    run = RunRecords(first, last, None, len(records), path, metadata)
    # Selection reads these columns of every run, and others of selected runs only.
    target = [accuracy_key(i, "in") for i in run.targets] if len(run.targets) == 2 else []
    sources = [accuracy_key(i, "out") for i in run.domains if [i] != run.targets] if len(run.targets) == 1 else []
    for key in ("step", *run.keys.intersection(target + sources)):
        run.columns[key] = np.array([getattr(record, key) for record in records], float)
    return run


@cache
def _decoder(accuracies: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of records that checks these accuracies and leaves args and hparams unparsed."""
    fields: list[Any] = [("args", msgspec.Raw), ("hparams", msgspec.Raw), ("step", float)]
    fields.append(("version", Annotated[int, msgspec.Meta(le=RECORD_VERSION)], RECORD_VERSION))
    fields += [(name, Share | None, None) for name in accuracies]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields))
