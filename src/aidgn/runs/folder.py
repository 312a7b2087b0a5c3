"""The folder of a run: what is in it, who may write to it, and how it survives a crash at any moment.

    run.json            the specification, its identity, versions
    results.jsonl       one record per evaluation
    state.pt            everything needed to go on; removed when the run is finished
    novelty.json        norms and angles of features of images set aside
    model.safetensors   weights of the selected step
    last.safetensors    weights of the last step; written last: a run is finished when this file is complete
    log.txt             what happened, in words

Progress has one commit point, the renaming of `state.pt`, which knows how long `results.jsonl` was; records behind that
are dropped and measured again. The end has one commit point, the renaming of `last.safetensors`.
"""

import glob
import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from aidgn.errors import AidgnError, Interrupted
from aidgn.files import lock, open_no_link, storage_error, write_text
from aidgn.runs.checkpoints import LAST, MODEL, STATE, is_finished, read_state, write_state, write_weights


class Busy(AidgnError):
    """Another process is training the run."""


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.results = path / "results.jsonl"
        self.state = path / STATE
        self.model = path / MODEL
        self.last = path / LAST

    @property
    def finished(self) -> bool:
        return is_finished(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the lock goes with the process, however it ends, and the folder with it
        where the run did not come to begin."""
        path = self.path / ".lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open_no_link(path, "a")
        except OSError as error:
            raise storage_error(self.path, error) from None
        with file:
            if not lock(file, self.path, wait=False) or not path.exists():  # it was removed, below, between the two
                raise Busy(
                    f"Another process is training this run: {self.path} is locked. "
                    "Wait for it, or stop it, and run the same command again to continue."
                )
            try:
                yield
            except Exception as error:
                if (self.path / "run.json").exists() and not isinstance(error, Interrupted):
                    told = str(error) if isinstance(error, AidgnError) else traceback.format_exc().rstrip()
                    with suppress(AidgnError):  # the disk may be what failed
                        self.log(f"failed: {told}")
                raise
            finally:
                with suppress(OSError):
                    if list(self.path.iterdir()) == [path]:
                        path.unlink()
                        self.path.rmdir()

    def about(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """What run.json says, {} if there is none; an error if it is of another run."""
        path = self.path / "run.json"
        if not path.exists():
            return {}
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            found = about["identity"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AidgnError(f"{path} cannot be read ({error}). Move the folder away to start anew.") from None
        if found != identity:
            differing = sorted(key for key in {*found, *identity} if found.get(key) != identity.get(key))
            raise AidgnError(
                f"{self.path} holds a run of another specification (different: "
                f"{', '.join(differing)}). Move it away, or choose another folder with --out."
            )
        return about

    def versions(self, identity: Mapping[str, Any]) -> list[Path]:
        """Unfinished runs beside this one, if it is a new one, that differ in the text of an own algorithm alone."""
        if "source" not in identity or (self.path / "run.json").exists():
            return []
        found = []
        for path in self.path.parent.glob(glob.escape(self.path.name.rpartition("-")[0]) + "-*"):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                other = json.loads((path / "run.json").read_text(encoding="utf-8"))["identity"]
                if {**other, "source": identity["source"]} == identity and not RunFolder(path).finished:
                    found.append(path)
        return found

    def claim(self, identity: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write run.json, unless it is there."""
        if not (self.path / "run.json").exists():
            write_text(self.path / "run.json", json.dumps({"identity": identity, **about}, indent=1) + "\n")

    def tidy(self) -> None:
        """Remove what killed processes left half written, and a state that a finished run does not need."""
        for path in self.path.glob(".*.tmp"):
            path.unlink()
        if self.finished:
            self.state.unlink(missing_ok=True)

    def log(self, text: str) -> None:
        try:
            with open_no_link(self.path / "log.txt", "a", encoding="utf-8") as file:
                file.write(time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n")
        except OSError as error:
            raise storage_error(self.path / "log.txt", error) from None

    def append(self, record: Mapping[str, Any]) -> None:
        try:
            with open_no_link(self.results, "ab") as file:
                file.write((json.dumps(record) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(self.results, error) from None

    def save(self, state: Mapping[str, Any]) -> None:
        size = self.results.stat().st_size if self.results.exists() else 0
        write_state(self.state, {**state, "results_bytes": size})

    def load(self) -> dict[str, Any] | None:
        """The last saved state, with the records cut back to it; None to start from the beginning."""
        if not self.state.exists():
            if self.results.exists():
                self.results.unlink()
            return None
        state = read_state(self.state)
        size = int(state["results_bytes"])
        records = self.results.stat().st_size if self.results.exists() else 0
        if records < size:
            raise AidgnError(
                f"{self.results} is shorter than when {self.state.name} was saved: records were removed. "
                f"Remove {self.state} to start this run from the beginning."
            )
        if records > size:
            try:
                with open_no_link(self.results, "r+b") as file:
                    file.truncate(size)
            except OSError as error:
                raise storage_error(self.results, error) from None
        return state

    def finish(
        self, algorithm: str, selected: tuple[Mapping[str, Tensor], int], last: tuple[Mapping[str, Tensor], int]
    ) -> None:
        """Write both sets of weights with their steps; from then on the run is finished and needs no state."""
        for path, (weights, step) in ((self.model, selected), (self.last, last)):
            write_weights(path, weights, {"algorithm": algorithm, "step": step})
        self.state.unlink(missing_ok=True)

    def records(self) -> list[dict[str, Any]]:
        if not self.results.exists():
            return []
        return [json.loads(line) for line in self.results.read_text(encoding="utf-8").splitlines()]
