"""Errors of a run, with messages that name the run's files and options."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

import torch

from aidgn.algorithms.custom import frame_in
from aidgn.errors import AidgnError
from aidgn.runs.spec import RunSpec
from aidgn.training import distributed

# On the CPU and on MPS, PyTorch raises a plain RuntimeError.
OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "MPS backend out of memory")


class NotFinite(AidgnError):
    """A loss, a weight or a prediction is NaN or infinite.

    The cause may be the training, or damaged memory of the device: only a run in another process can tell.
    """

    def __init__(self, subject: str, step: int, state: Path, lr: float, precision: str):
        kept = f"The last good state is in {state}" if state.exists() else "No state was saved yet"
        alternative = "" if precision == "float32" else ", or --precision float32"
        super().__init__(
            f"{subject} became NaN or infinite at step {step}. {kept}. Try a smaller learning rate, for example "
            f"--set lr={lr / 10:g}{alternative}."
        )
        self.step = step


class OutOfMemory(AidgnError):
    """A batch did not fit. The state of the device is unknown: a CUDA graph may be half recorded."""


class CustomCodeError(AidgnError):
    """The code of a custom algorithm failed."""


@contextmanager
def report_custom_errors(algorithm: str, log_file: Path) -> Iterator[None]:
    """Say where the code of a custom algorithm failed; log.txt has the traceback.

    With several processes, the process that started them reports errors.
    """
    try:
        yield
    except (AidgnError, OSError):
        raise
    except SystemExit as end:  # even with status 0 the run is not finished
        frame = frame_in(algorithm, end)
        if frame is None:
            raise
        raise CustomCodeError(f"{algorithm} ended the process in `{frame.name}`, line {frame.lineno}.") from end
    except Exception as error:
        frame = frame_in(algorithm, error)
        if frame is None or distributed.world_size() > 1 or not log_file.exists():
            raise
        message = shorten(str(error), 300).rstrip(".")
        reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
        failure = CustomCodeError(f"{algorithm} failed in `{frame.name}`, line {frame.lineno}: {reason}.")
        failure.add_note(f"{log_file} has the traceback.")
        raise failure from error


@contextmanager
def explain_out_of_memory(spec: RunSpec, sources: int) -> Iterator[None]:
    """Replace an allocator's message by the size of the batch and what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        message = str(error)
        has_class = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not has_class and not any(text in message for text in OUT_OF_MEMORY):
            raise
        size = int(spec.hyper_parameters["batch_size"])
        reason = re.split(r"[.;:] |\n", message)[0] or type(error).__name__
        raise OutOfMemory(
            f"Out of memory with {sources} x {size} images of {spec.image_size} pixels in a batch ({reason}). "
            f"Try --batch-size {max(size // 2, 1)}, or split the batch over more --devices. Saved progress is kept."
        ) from None


@contextmanager
def explain_state_mismatch(state: Path) -> Iterator[None]:
    """Say what to do with a saved state that does not fit the run."""
    try:
        yield
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise AidgnError(
            f"{state} does not fit this run ({str(error).splitlines()[0]}): it was saved by another version. "
            "Remove it to start this run from the beginning."
        ) from error
