"""A run killed at one system call after the other: continued, it equals an undisturbed one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, train
from tests.conftest import Tally

SPEC = RunSpec("digits", "AIDGN", "chalk", steps=4, eval_every=2, hyper_parameters={"batch_size": 8})
CALLS = ("fsync", "rename", "unlink", "truncate", "mkdir", "write")
ATTEMPTS = 12  # at most, for each kind of call

# Prints a line for each attempt: call, number, how the process ended.
SCRIPT = """
import ctypes, json, os, sys
from aidgn.training import RunSpec, train

spec, out, calls, attempts = eval(sys.argv[1]), sys.argv[2], sys.argv[3].split(), int(sys.argv[4])
shim = ctypes.CDLL(None)

def attempt(call, number):
    folder = f"{out}/{call}-{number}"
    process = os.fork()  # this process has imported everything already
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    shim.arm(call.encode(), folder.encode(), number)
    train(spec, folder, save_seconds=0.0, device="cpu")
    os._exit(0 if number else min(shim.calls(), 200))

for call in calls:
    total = attempt(call, 0)
    for number in sorted({1 + i * total // attempts for i in range(attempts)}) if total else ():
        print(json.dumps([call, number, attempt(call, number)]), flush=True)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(SPEC, tmp_path_factory.mktemp("undisturbed"), save_seconds=0.0, device="cpu")


def content(folder: Path) -> tuple:
    records = [
        {key: value for key, value in record.items() if not key.endswith("_time")}
        for record in RunFolder(folder).records
    ]
    return records, *((folder / name).read_bytes() for name in ("model.safetensors", "last.safetensors"))


@pytest.mark.slow
def test_each_system_call_may_be_the_last(shim: Path, undisturbed: Path, tmp_path: Path, tally: Tally) -> None:
    command = [sys.executable, "-c", SCRIPT, repr(SPEC), str(tmp_path), " ".join(CALLS), str(ATTEMPTS)]
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    attempts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert {call for call, *_ in attempts} >= {"fsync", "rename", "unlink", "mkdir", "write"}
    for call, number, code in attempts:
        with tally(f"system calls, killed at {call}"):
            assert code == -signal.SIGKILL, done.stderr
            assert content(train(SPEC, tmp_path / f"{call}-{number}", device="cpu")) == content(undisturbed)
