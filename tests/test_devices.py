"""Devices: threads within OpenMP's limit, and what a processor is called."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from aidgn.devices import choose_device, choose_precision, describe_cpu, limit_threads
from aidgn.errors import ParameterError

CONVOLUTIONS = """
import torch
from aidgn.devices import choose_device
from aidgn.training.setup import share_threads

def convolve():
    torch.nn.Conv2d(3, 64, 7)(torch.randn(8, 3, 224, 224)).sum().backward()
    print(torch.get_num_threads())

choose_device("cpu")
convolve()
print(share_threads(2, False, 1))  # a run that was begun with two threads
convolve()
"""


def test_a_limit_of_threads_does_not_hang() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", CONVOLUTIONS], env=environment, capture_output=True, timeout=120)
    assert done.stdout.split() == [b"1", b"1", b"1"], done.stderr.decode()


@pytest.mark.parametrize(("limit", "threads"), [("1", 1), ("3", 3), ("8", 4), ("0", 4), ("-1", 4), ("many", 4)])
def test_limits_of_threads(limit: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    assert limit_threads(4) == threads


def test_the_instruction_set_in_use_is_named() -> None:
    """The one that PyTorch uses, not all that the processor has."""
    code = "from aidgn.devices import describe_cpu; print(describe_cpu())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    limited = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
    assert limited.split(",")[0].strip() in ("DEFAULT", "NO AVX")
    assert limited.partition(",")[2].strip() == describe_cpu().partition(",")[2].strip()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again() -> None:
    """A block of 64 MiB has 16,384 pages, which the system would provide for every new tensor."""
    code = """
import resource, torch
from aidgn.devices import choose_device
choose_device("cpu")
faults = []
for _ in range(20):
    torch.ones(2**24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[9])
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(printed) < 16_384


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has mps")
def test_mps_is_a_name_that_may_not_work() -> None:
    with pytest.raises(ParameterError, match="a device that works") as caught:
        choose_device("mps")
    assert caught.value.parameter == "device" and len(str(caught.value)) < 100
    with pytest.raises(ParameterError, match="cuda:N or mps"):
        choose_device("gpu")


def test_mps_computes_in_float32() -> None:
    assert choose_precision("auto", torch.device("mps")) == "float32"
    with pytest.raises(ParameterError, match="float32 on mps"):
        choose_precision("bfloat16", torch.device("mps"))
