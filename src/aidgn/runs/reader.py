"""Read the results.jsonl of runs of aidgn and DomainBed, thousands of them in seconds, and their adaptation.jsonl."""

import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any

import numpy as np

from aidgn.data.row_cache import usable_cores
from aidgn.errors import AidgnError
from aidgn.files import is_of_type, parse_json
from aidgn.runs import names
from aidgn.runs.accuracy_key import accuracy_key
from aidgn.runs.folder import RunFolder
from aidgn.runs.label import Label
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.packed import SUFFIX, unpack
from aidgn.runs.records import (
    ACCURACY,
    Floats,
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

# Types of the values in a line of adaptation.jsonl
ADAPTED: dict[str, Any] = {
    "dataset": str,
    "algorithm": str,
    "target": list[str],
    "trial": int,
    "draw": int,
    "method": str,
    "settings": dict,
    "source_accuracy": float,
    "target_accuracy": float,
    "selected": bool,
    "model": str,
}
CHUNK = 250  # files read at a time by one process
REPEATED = {key: re.compile(rf'"{key}":\s*') for key in ("args", "hparams")}
DECODER = json.JSONDecoder()
NO_METADATA = RunMetadata()  # of runs of DomainBed
NO_STRUCTURE = bytes(set(range(256)) - set(b"{}[]\\\n"))
NUMBERS = re.compile(rb"\[[-+.\deE, nulNa]*\]")  # a list of numbers, in which no key can hide
# Finds an accuracy that may be wrong, so that the file is parsed in full; skips 0.93, 1.0, 5e-05, NaN and null.
DOUBTFUL = re.compile(rb'_acc"(?!: 0\.\d+[,}]|: ?(?:0\.\d+|[01]|1\.0|\d(?:\.\d+)?e-0?[1-9]\d*|NaN|null)[,}])')


def load_records(*folders: str | Path) -> list[Record]:
    """Return the records of all runs.

    Args:
        folders: Folders of runs, or folders around them at any depth; or files of `aidgn.runs.packed.pack`.
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
            run.relabel(replace(run.label, version=run.source[:4]))


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
        lines = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        wrong = [
            f"{key} is {line[key]!r}"
            for line in lines
            for key, value_type in ADAPTED.items()
            if not is_of_type(line[key], value_type) or (value_type is float and not 0 <= line[key] <= 1)
        ]
        if wrong:
            raise ValueError(wrong[0])
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _metadata(folder: Path) -> RunMetadata:
    """Return the metadata of a run; runs of DomainBed have none."""
    run = RunFolder(folder)
    return run.metadata if run.exists else NO_METADATA


def _read_files(paths: list[Path]) -> Iterator[File]:
    """Read files; split many files over all cores."""
    for path in paths:
        if isinstance(path, zipfile.Path):
            yield path, None, *_read(path.read_bytes(), path, _metadata(path.parent))
    paths = [path for path in paths if not isinstance(path, zipfile.Path)]
    chunks = [paths[i : i + CHUNK] for i in range(0, len(paths), CHUNK)]
    cores = usable_cores()
    if min(len(chunks), cores) < 2 or parent_process() is not None:
        for chunk in chunks:
            yield from _read_chunk(chunk)
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(min(len(chunks), cores), get_context("fork"), signal, (SIGINT, SIG_IGN)) as pool:
        for files in pool.map(_read_chunk_lightly, chunks):
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
        files.append((path, inode, *_read(text, path, _metadata(path.parent))))
    return files


def _read_chunk_lightly(paths: list[Path]) -> list[File]:
    """Read files for another process, without their texts: reading a text again is faster than sending it."""
    files = _read_chunk(paths)
    for run in (run for _, _, runs, _ in files for run in runs):
        run.rest = None if isinstance(run.rest, bytes) else run.rest
    return files


def _read(text: bytes, path: Path, metadata: RunMetadata) -> tuple[list[RunRecords], bool]:
    """Return the runs in one file, usually one, and whether its last line is cut in half."""
    was_cut = False
    if not text.endswith(b"\n"):
        complete, newline, tail = text.rpartition(b"\n")
        try:
            was_cut = bool(tail.strip()) and not isinstance(parse_json(tail), dict)
        except ValueError:
            was_cut = True
        text = complete + newline if was_cut else text + b"\n"
    run = _read_fast(text, path, metadata)
    if run is not None:
        return [run], was_cut
    lines = [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
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


def _read_fast(text: bytes, path: Path, metadata: RunMetadata) -> RunRecords | None:
    """Read a file without parsing the args and hparams of every line; return None if it must be parsed in full.

    All lines must repeat the args and hparams of the first line byte by byte, and hold no other object except lists of
    numbers. Args and hparams are nearly all of the text, so comparing them instead of parsing saves nearly all time.
    """
    line = text[: text.find(b"\n")].decode(errors="replace")
    values: Record = {}
    repeated = []  # (position, key and colon, value), as written
    try:
        for key, pattern in REPEATED.items():
            colon = pattern.search(line)
            if colon is None:
                return None
            values[key], stop = DECODER.raw_decode(line, colon.end())
            repeated.append((colon.start(), colon[0].encode(), line[colon.end() : stop].encode()))
            line = line[: colon.end()] + "0" + line[stop:]
        first = parse_json(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(first, dict) or first.get("args") != 0 or first.get("hparams") != 0:
        return None  # the two values belong to an object inside the record
    first |= values
    (_, *first_member), (_, *second_member) = sorted(repeated)
    pieces = _cut_out(text, *first_member, *second_member)
    if pieces is None:
        return None
    number = len(pieces) // 2
    rest = b"0".join(pieces)
    structure = NUMBERS.sub(b"0", rest) if b"[" in rest else rest
    if structure.translate(None, NO_STRUCTURE) != b"{}\n" * number:
        return None
    check(first, f"{path}, line 1", metadata.aidgn, accuracies=False)
    last = parse(rest[rest.rfind(b"\n", 0, -1) + 1 :], path, number)
    run = RunRecords(first, last, rest, number, path, metadata)
    try:
        if np.isnan(run.column("step")).any():
            return None
    except AidgnError:  # a boolean or a text; parsing in full names the line
        return None
    # Selection reads these columns of every run, and others of selected runs only.
    target = [accuracy_key(i, "in") for i in run.targets] if len(run.targets) == 2 else []
    sources = [accuracy_key(i, "out") for i in run.domains if [i] != run.targets] if len(run.targets) == 1 else []
    wanted = run.keys.intersection(target + sources)
    columns = _plain_accuracies(first, wanted, rest, number)
    if columns is None and DOUBTFUL.search(rest):
        return None
    run.columns |= columns or {key: run.column(key) for key in wanted}
    return run


def _plain_accuracies(first: Record, wanted: Set[str], rest: bytes, number: int) -> dict[str, Floats] | None:
    """Return the wanted columns if all accuracies of all records are numbers like 0.93 or 1.0, None otherwise.

    Accuracies follow each other in a record, so one search finds and checks all of them.
    """
    value = rb"0\.\d++|1\.0"
    group = {True: b"(" + value + b")", False: b"(?:" + value + b")"}
    keys = [key for key in first if ACCURACY.fullmatch(key)]
    pattern = b", ".join(b'"%s": %s' % (key.encode(), group[key in wanted]) for key in keys)
    rows = re.findall(pattern + rb"(?=[,}])", rest)
    if not wanted or len(rows) != number:
        return None
    columns = zip(*rows, strict=True) if len(wanted) > 1 else [rows]
    names = [key for key in keys if key in wanted]
    return {name: np.fromiter(map(float, column), float, number) for name, column in zip(names, columns, strict=True)}


def _cut_out(text: bytes, key_1: bytes, value_1: bytes, key_2: bytes, value_2: bytes) -> list[bytes] | None:
    """Return the pieces of the text around both values; None if another value follows one of the keys."""
    pieces: list[bytes] = []
    find, has_value, keep = text.find, text.startswith, pieces.append  # local names: this loop is a bottleneck
    position = 0
    key = find(key_1)
    while key >= 0:
        start = key + len(key_1)
        stop = start + len(value_1)
        other = find(key_2, stop) + len(key_2)
        if not (has_value(value_1, start) and has_value(value_2, other)):
            return None
        keep(text[position:start])
        keep(text[stop:other])
        position = other + len(value_2)
        key = find(key_1, position)
    keep(text[position:])
    return pieces
