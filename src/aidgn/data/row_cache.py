"""The base class of the caches of decoded images and of features: rows are computed once, by one process at a time.

A cache lies in a folder of its user, not among the images, where others may write. A killed process loses the rows of
its last moments only, and the next one continues. Every run verifies the checksums.
"""

import os
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from aidgn.data.cache_index import CacheEntry, CacheIndex, reliable, stamp_of
from aidgn.errors import AidgnError, amount
from aidgn.files import FolderLock, translate_os_errors
from aidgn.terminal import log

COMMIT_SECONDS = 0.5  # between two commits of rows to the index

Progress = Callable[[int, int], None]

_verified: dict[Path, tuple[list[int], list[str]]] = {}


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(eq=False)
class RowCache(ABC):
    """Rows of one kind for the images of a data set."""

    index_type: ClassVar[type[CacheIndex]]

    folder: Path
    key: str | int  # distinguishes the rows from others in the folder
    names: Sequence[str]  # of the rows that are needed
    content: str  # what the rows are, for messages
    on_progress: Progress  # called with the number of rows ready and of all

    @abstractmethod
    def find_missing(self, index: CacheIndex) -> Iterator[tuple[str, Any]]:
        """Yield the names of rows that are not in the index or no longer valid."""

    @abstractmethod
    def add_missing(self, suspects: Sequence[str]) -> set[str]:
        """Compute missing rows and damaged ones among the suspects; return their names. The caller holds the lock."""

    @property
    def index_path(self) -> Path:
        return self.folder / f"{self.index_type.index_name}-{self.key}.jsonl"

    def open(self) -> tuple[CacheIndex, set[str]]:
        """Return an index with all rows, and the names of the rows that this call computed."""
        make_private(self.folder, self.content)
        added: set[str] = set()
        index = self.load()
        if index is None or any(self.find_missing(index)):
            index, added = self._update()
        others = [name for name in self.names if name not in added]
        stamp: list[int] = []
        with suppress(OSError):  # another process replaced the file; the map stays valid
            stamp = reliable(stamp_of(str(index.pixels)))
        if not stamp or _verified.get(index.pixels) != (stamp, others):  # else this process has just verified them
            damaged = index.find_damaged(others, usable_cores())
            if damaged:
                log.warning("%d of the %s in %s: damaged, made again.", len(damaged), self.content, self.folder)
                index, repaired = self._update(damaged)
                added |= repaired
            else:
                _verified[index.pixels] = stamp, others
        return index, added

    def load(self) -> CacheIndex | None:
        """Read the index; None if there is none that can be used."""
        return self.index_type.load(self.index_path)

    def _update(self, suspects: Sequence[str] = ()) -> tuple[CacheIndex, set[str]]:
        """Compute missing rows; one process at a time."""
        lock = FolderLock(self.folder / f"{self.index_type.lock_name}-{self.key}")
        while not lock.try_acquire():  # another process computes: show its progress
            with suppress(OSError):
                stored = self.index_type.count_stored(self.index_path)
                if stored is not None:
                    self.on_progress(min(stored, len(self.names)), len(self.names))
            time.sleep(0.1)
        with translate_os_errors(self.folder), lock:
            added = self.add_missing(suspects)
            index = self.load()
        if index is None:
            raise AidgnError(f"{self.folder} was changed while {self.content} were stored. Run the same command again.")
        return index, added

    def remove_left_overs(self, index: CacheIndex) -> None:
        """Remove files of interrupted processes. The caller holds the lock."""
        rows = self.folder.glob(f"{index.rows_name}-{self.key}-*")
        for left_over in chain(rows, self.folder.glob(f".{self.index_path.name}.*.tmp")):
            if left_over != index.pixels:
                left_over.unlink()

    def commit(
        self,
        index: CacheIndex,
        entries: Iterable[CacheEntry],
        is_stored: Callable[[CacheEntry], bool] = lambda entry: True,
    ) -> Generator[CacheEntry, None, None]:
        """Yield entries, and add those with a stored row to the index now and then."""
        pending: list[CacheEntry] = []
        committed = time.monotonic()
        try:
            for entry in entries:
                if is_stored(entry):
                    pending.append(entry)
                yield entry
                if time.monotonic() - committed > COMMIT_SECONDS:
                    index.append(pending)
                    pending = []
                    committed = time.monotonic()
        except BaseException:
            with suppress(OSError):  # must not hide the first error
                index.append(pending)
            raise
        index.append(pending)

    def free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def check_space(self, needed: int) -> None:
        if needed > self.free():
            raise AidgnError(
                f"The {self.content} need {amount(needed)} in {self.folder}, where {amount(self.free())} are free. "
                "Free some, or set AIDGN_CACHE to a folder on another disk."
            )


def make_private(folder: Path, content: str) -> None:
    """Make a folder for this user alone; refuse one that is a link or another user's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise AidgnError(f"The {content} cannot be stored in {folder} ({error.strerror}). Set AIDGN_CACHE.") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise AidgnError(
            f"{folder} is a link or belongs to another user, who could change the {content}. Set AIDGN_CACHE to a "
            "folder that is yours."
        )
