"""Train several runs at a time on a GPU: start NVIDIA's MPS, and count the runs that fit."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aidgn.terminal import log

MAX_RUNS = 4  # runs at a time on a GPU; more are not faster (benchmarks/README.md)
CORES = 2  # cores of the processor for each run
MEMORY_SHARE = 0.6  # share of a GPU's memory to fill; later runs may have larger batches than the measured one
SECONDS = 60.0  # time limit of each of NVIDIA's commands
CONTROL = "nvidia-cuda-mps-control"
PROBE = "import torch; torch.zeros(1, device='cuda')"


@contextmanager
def start_mps() -> Iterator[bool]:
    """Run NVIDIA's MPS for the processes started in the block, so that their kernels run side by side.

    A server that the environment names is used and not stopped. Yields whether a server works.
    """
    if os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        yield True
        return
    if not shutil.which(CONTROL):
        log.warning("Runs do not share GPUs: %s is not installed.", CONTROL)
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="aidgn-mps-") as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        # A server that sees only some GPUs would give them other numbers.
        everything = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        problem = _run([CONTROL, "-d"], everything | names)
        if problem is None:
            problem = _run([sys.executable, "-c", PROBE], {**os.environ, **names})
            if problem is not None:
                _run([CONTROL], everything | names, "quit\n")
        if problem is not None:
            log.warning("Runs do not share GPUs: NVIDIA's MPS does not work here (%s).", problem)
            yield False
            return
        os.environ.update(names)
        try:
            yield True
        finally:
            for name in names:
                del os.environ[name]
            _run([CONTROL], everything | names, "quit\n")


def _run(command: list[str], environment: Mapping[str, str], text: str = "") -> str | None:
    """Run a command; return None, or if it fails its last line of output or the exception."""
    try:
        result = subprocess.run(
            command,
            env=environment,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return None
    lines = result.stdout.strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"


def count_runs(gpu: str, gpus: int, cores: int) -> int:
    """Return how many runs a GPU can train at a time, from the memory in use while it trains one.

    Args:
        gpu: The number or UUID of the GPU.
        gpus: Number of GPUs that share the cores.
        cores: Cores of the processor.
    """
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        used, total = (float(number) for number in printed.split(","))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("GPU %s trains one run at a time: nvidia-smi does not tell its memory (%s).", gpu, error)
        return 1
    by_memory = int(MEMORY_SHARE * total / used) if used else 1
    by_cores = cores // (CORES * gpus)
    return max(min(MAX_RUNS, by_memory, by_cores), 1)
