"""Devices and precisions by name. Functions import PyTorch when they need it, so that listing the names is quick."""

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aidgn.errors import ParameterError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Precision:
    """How networks compute."""

    autocast: str | None  # name of the dtype of autocast; None computes in the dtype of weights and images
    tf32: bool  # whether float32 matrix products and convolutions may use TF32


PRECISIONS = {
    "bfloat16": Precision(autocast="bfloat16", tf32=True),
    "tf32": Precision(autocast=None, tf32=True),
    "float32": Precision(autocast=None, tf32=False),
}
PRECISION_NAMES = ("auto", *PRECISIONS)
MALLOC_SETTINGS = (-1, -3)  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
KEPT_BYTES = 1 << 30  # freed memory that a process on the CPU keeps

passes = 0  # calls of `begin_pass`


def choose_device(name: str = "auto") -> "torch.device":
    """Return the device of this name, after checking that it works; `auto` is the CUDA GPU if there is one."""
    import torch

    allowed = limit_threads(torch.get_num_threads())
    if allowed < torch.get_num_threads():
        torch.set_num_threads(allowed)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda", "mps"):
        raise ParameterError("device", name, "auto, cpu, cuda, cuda:N or mps")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels of Triton and CUDA graphs run on the current device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        if name.startswith("mps"):  # the error lists all that PyTorch can be built with
            reason = "this PyTorch has no MPS"
        raise ParameterError("device", name, f"a device that works ({reason})") from None
    if device.type == "cpu":
        keep_freed_memory()
    return device


def keep_freed_memory() -> None:
    """Let this process keep up to 1 GiB that is freed, for the next layer of a network.

    By default glibc returns large blocks to the system at once and gets new pages, which the kernel fills with zeros,
    for every layer of every batch. That takes longer than the arithmetic of a small network. Other C libraries have no
    such setting.
    """
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        for setting in MALLOC_SETTINGS:
            libc.mallopt(setting, KEPT_BYTES)


def limit_threads(count: int) -> int:
    """Return `count`, or `OMP_THREAD_LIMIT` if it is lower: with more threads than OpenMP grants, convolutions hang."""
    with suppress(ValueError):  # OpenMP ignores an invalid limit too
        limit = int(os.environ.get("OMP_THREAD_LIMIT", count))
        return min(count, limit) if limit > 0 else count
    return count


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute with one CPU thread inside the context, for operations too short to split."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronize(device: "torch.device") -> None:
    """Wait until the device has finished all work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


@functools.cache
def has_triton() -> bool:
    """Return whether kernels written in Triton can be compiled; PyTorch installs it on Linux."""
    return importlib.util.find_spec("triton") is not None


def begin_pass() -> None:
    """Allow CUDA graphs to reuse the memory of earlier passes through networks: nobody needs their outputs any more."""
    global passes
    passes += 1
    if "torch._inductor.cudagraph_trees" in sys.modules:  # else no code is compiled; the import takes seconds
        import torch

        torch.compiler.cudagraph_mark_step_begin()


def describe_cpu() -> str:
    """Return instruction set and model, such as "AVX2, AMD EPYC": the last digits of sums depend on both."""
    import torch

    with suppress(OSError):  # Linux only
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{torch.backends.cpu.get_cpu_capability()}, {line.partition(':')[2].strip()}"
    return torch.backends.cpu.get_cpu_capability()


def choose_precision(name: str, device: "torch.device") -> str:
    """Set up this process for a precision and return its name; `auto` is bfloat16 on CUDA, float32 elsewhere."""
    import torch

    if name not in PRECISION_NAMES:
        raise ParameterError("precision", name, f"one of {', '.join(PRECISION_NAMES)}")
    if device.type == "mps" and name not in ("auto", "float32"):
        raise ParameterError("precision", name, "auto or float32 on mps")
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    tf32 = PRECISIONS[name].tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    return name
