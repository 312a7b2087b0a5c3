"""A run in a separate process, which tests wait for, kill and continue."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aidgn.training import RunSpec

SCRIPT = """
import sys
from aidgn.training import RunSpec, train
train(eval(sys.argv[1]), sys.argv[2], save_seconds=0.0, device="cpu", devices=int(sys.argv[3]),
      on_progress=lambda what, done, total, record: print(what, done, flush=True))
"""


class Process(subprocess.Popen[str]):
    def wait_for(self, line: str) -> None:
        """Until it has got as far as this, such as `train 5`: one that was killed before may go on behind it, or be
        at its end."""
        assert self.stdout and self.stderr
        what, step = line.split()
        said = (line.split() for line in self.stdout if line.startswith(f"{what} "))  # Gloo prints as well
        if not any(int(done) >= int(step) for _, done in said) and self.wait():
            raise AssertionError(self.stderr.read())


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started = []

    def start(spec: RunSpec, out: Path, devices: int = 1) -> Process:
        started.append(
            Process(
                [sys.executable, "-c", SCRIPT, repr(spec), str(out), str(devices)],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
