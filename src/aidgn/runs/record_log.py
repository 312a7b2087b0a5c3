"""Write results.jsonl during a training: append records, notice changes by others, restore from the saved state."""

import hashlib
import json
import os
import shlex
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from aidgn.errors import AidgnError
from aidgn.files import atomic_write, open_no_link, parse_json, translate_os_errors
from aidgn.terminal import log

TIMES = ("step_time", "eval_time")


class LostRecords(AidgnError):
    """The records of a run were changed or removed."""


class RecordLog:
    """The records that a process has written, and their file.

    Every saved state holds a copy, so that records which were changed or removed afterwards are restored.
    """

    def __init__(self, path: Path):
        self.path = path
        self._content: bytes | None = None

    @property
    def content(self) -> bytes:
        """The expected content of the file; at first, its content."""
        if self._content is None:
            self._content = self._read()
        return self._content

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record to the file."""
        self.check()
        line = (json.dumps(record) + "\n").encode()
        with translate_os_errors(self.path), open_no_link(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._content = self.content + line

    def check(self) -> None:
        """Raise `LostRecords` if another program changed or removed the file."""
        if self._read() != self.content:
            change = "changed" if self.path.exists() else "removed"
            raise LostRecords(
                f"{self.path} was {change} by another program while this run was training, so the training has "
                "stopped. The same command restores the records and continues from the last saved state."
            )

    def to_state(self) -> dict[str, Any]:
        """Return the content for a saved state, after comparing the file with it."""
        import torch

        self.check()
        packed = bytearray(zlib.compress(self.content))  # small, because records repeat each other
        return {"results_bytes": len(self.content), "results": torch.frombuffer(packed, dtype=torch.uint8)}

    def clear(self) -> None:
        """Remove all records, for a run from the beginning."""
        self.path.unlink(missing_ok=True)
        self._content = b""

    def restore(self, state: Mapping[str, Any], state_file: Path, eval_every: int | None) -> None:
        """Restore the content that the file had when a state was saved.

        Args:
            state: The state.
            state_file: Its file, for messages.
            eval_every: Steps between evaluations. States of version 0.1.0 hold only the length of the records; such
                records are kept if there is one for every evaluation until then.
        """
        size = int(state["results_bytes"])
        present = self._read()
        if "results" in state:
            wanted = _unpack(state["results"], size)
        else:
            wanted = present[:size]
            if len(present) < size or not _is_complete(wanted, int(state["step"]), eval_every):
                raise LostRecords(
                    f"{self.path} was changed or removed after step {state['step']} was saved, and {state_file.name} "
                    "has no copy of the records. To train this run from the beginning, remove the state: "
                    f"`rm {shlex.quote(str(state_file))}`, then run the same command."
                )
        if present[:size] != wanted:
            log.warning("%s was changed or removed; its records were restored from the saved state.", self.path)
            with atomic_write(self.path) as temporary:
                temporary.write_bytes(wanted)
        elif len(present) > size:
            with translate_os_errors(self.path), open_no_link(self.path, "r+b") as file:
                file.truncate(size)
        self._content = wanted

    def _read(self) -> bytes:
        content = b""
        with translate_os_errors(self.path), suppress(FileNotFoundError), open_no_link(self.path, "r+b") as file:
            content = file.read()  # opened for writing too, so that it is the file that `append` would write
        return content


def records_digest(content: bytes) -> str:
    """Return a sha256 of records without their times, so that equal runs have equal files; ValueError for no JSON."""
    records = [parse_json(line) for line in content.splitlines()]
    kept = [{key: value for key, value in record.items() if key not in TIMES} for record in records]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _unpack(packed: Any, size: int) -> bytes:
    """Decompress the records in a state, up to their size, because the file may come from others."""
    try:
        content = zlib.decompressobj().decompress(packed.numpy().tobytes(), size + 1)
    except (AttributeError, OverflowError, zlib.error) as error:
        raise ValueError(f"its records cannot be read: {error}") from None
    if len(content) != size:
        raise ValueError("its records have another length")
    return content


def _is_complete(content: bytes, step: int, eval_every: int | None) -> bool:
    """Return whether the lines are the records of the evaluated steps up to this one."""
    try:
        steps = [parse_json(line)["step"] for line in content.splitlines()]
    except (ValueError, TypeError, KeyError):
        return False
    if not eval_every:
        return all(isinstance(number, int) and number <= step for number in steps)
    expected = list(range(eval_every, step + 1, eval_every))
    return content.endswith(b"\n") == bool(steps) and steps in (expected, [*expected, step])
