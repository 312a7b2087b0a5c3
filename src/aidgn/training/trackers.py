"""Trackers show the records of a run in TensorBoard, Weights & Biases or MLflow.

A tracker gets the run when it starts, then each record, then the end. It works in a separate thread, so that it cannot
stop or slow the run. If it fails, log.txt says so once.
"""

import importlib.util
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol

from aidgn.errors import AidgnError, Interrupted, UnknownNameError
from aidgn.files import check_no_link, write_text
from aidgn.runs.accuracy_key import parse_metric_key
from aidgn.runs.folder import RunWriter

PATIENCE = 10.0  # seconds that the end of a run waits for its trackers

Record = Mapping[str, Any]


class Tracker(Protocol):
    """Interface of a tracker. Write a class with these three methods to track runs in another way."""

    def start(self, folder: Path, metadata: Mapping[str, Any], records: Sequence[Record]) -> None:
        """Start a run, or continue it.

        Args:
            folder: Folder of the run.
            metadata: Identity and hyper-parameters of the run.
            records: Records so far. Each must show exactly once, even if the run was killed after it sent some.
        """

    def record(self, record: Record) -> None:
        """Add a record."""

    def end(self, status: str) -> None:
        """End the run, which is "finished", "interrupted" or "failed"."""


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record: metrics as accuracy/<domain>/<split>, the others by their names."""
    values = {}
    for name, value in record.items():
        if isinstance(value, int | float) and name != "step":
            if parsed := parse_metric_key(name):
                domain, split, metric = parsed
                domain_name = re.sub(r"[^\w .-]", "_", record["args"]["domains"][domain])
                name = f"{metric}/{domain_name}/{split}"
            values[name] = float(value)
    return values


class TensorBoard:
    """RUN/tensorboard/, which `tensorboard --logdir RUNS` shows. A continued run writes its file again."""

    package = "tensorboard"

    def start(self, folder: Path, metadata: Mapping[str, Any], records: Sequence[Record]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        check_no_link(folder / "tensorboard")
        for path in (folder / "tensorboard").glob("events.out.tfevents.*"):
            path.unlink()
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        rows = "\n".join(f"| {name} | {value} |" for name, value in metadata.items())
        self.writer.add_text("run", f"| | |\n|-|-|\n{rows}", 0)
        for record in records:
            self.record(record)

    def record(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def end(self, status: str) -> None:
        self.writer.close()


class WandB:
    """A run of the project $WANDB_PROJECT, or aidgn.

    Offline ($WANDB_MODE=offline) the files are in RUN/wandb, and a continued run writes them again. Online the server
    says up to which step it has the run.
    """

    package = "wandb"

    def start(self, folder: Path, metadata: Mapping[str, Any], records: Sequence[Record]) -> None:
        import wandb

        if os.environ.get("WANDB_MODE") not in ("offline", "disabled") and not wandb.login(prompt=False):
            raise RuntimeError("no key is known; run `wandb login`, or set WANDB_MODE=offline")
        check_no_link(folder / "wandb")
        for path in (folder / "wandb").glob("offline-run-*"):
            shutil.rmtree(path, ignore_errors=True)
        id_file = folder / "wandb.id"
        if not id_file.exists():
            write_text(id_file, uuid.uuid4().hex + "\n")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "aidgn"),
            id=id_file.read_text().strip(),
            name=folder.name,
            config=dict(metadata),
            dir=str(folder),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )
        self.known = self.run.starting_step  # first step that the server lacks
        for record in records:
            self.record(record)

    def record(self, record: Record) -> None:
        if record["step"] >= self.known:
            self.run.log(scalars(record), step=record["step"])

    def end(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """A run of the experiment $MLFLOW_EXPERIMENT_NAME, or aidgn, at $MLFLOW_TRACKING_URI.

    Without that address the store is mlruns/, in the folder of runs. Records that the store has are not sent again.
    """

    package = "mlflow"

    def start(self, folder: Path, metadata: Mapping[str, Any], records: Sequence[Record]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (folder.parent / "mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # version 3 refuses folders otherwise
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(uri)
        id_file = folder / "mlflow.id"
        try:
            self.id = self.client.get_run(id_file.read_text().strip()).info.run_id
            self.client.update_run(self.id, status="RUNNING")
        except (OSError, MlflowException):  # not tracked yet, or removed from there
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "aidgn")
            with suppress(MlflowException):  # it exists
                self.client.create_experiment(name)
            experiment = self.client.get_experiment_by_name(name)
            if experiment is None:
                raise RuntimeError(f"experiment {name} cannot be created") from None
            self.id = self.client.create_run(experiment.experiment_id, run_name=folder.name).info.run_id
            write_text(id_file, self.id + "\n")
            self.client.log_batch(self.id, params=[Param(key, str(value)[:500]) for key, value in metadata.items()])
        self.known: dict[str, set[int]] = {}
        for record in records:
            self.record(record)

    def record(self, record: Record) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        new = []
        for name, value in scalars(record).items():
            if name not in self.known:
                self.known[name] = {point.step for point in self.client.get_metric_history(self.id, name)}
            if record["step"] not in self.known[name]:
                new.append(Metric(name, value, now, record["step"]))
        self.client.log_batch(self.id, metrics=new)

    def end(self, status: str) -> None:
        statuses = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self.client.set_terminated(self.id, status=statuses[status])


TRACKERS: dict[str, type[TensorBoard] | type[WandB] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def find_tracker(name: str) -> type[TensorBoard] | type[WandB] | type[MLflow]:
    """Return the tracker of this name; an error if its package is not installed."""
    if name not in TRACKERS:
        raise UnknownNameError("tracker", name, TRACKERS, f"Trackers are {', '.join(TRACKERS)}.")
    if importlib.util.find_spec(TRACKERS[name].package) is None:
        raise AidgnError(
            f"Tracking by {name} needs the package {TRACKERS[name].package}: pip install 'aidgn[trackers]'."
        )
    return TRACKERS[name]


_last_threads: dict[str, threading.Thread] = {}  # by the name of the tracker, in this process


class Tracking:
    """The trackers of one run, each in a thread."""

    def __init__(self, trackers: Sequence[str | Tracker], folder: RunWriter):
        self.trackers: list[Tracker] = []
        for tracker in dict.fromkeys(trackers):
            self.trackers.append(find_tracker(tracker)() if isinstance(tracker, str) else tracker)
        self.folder = folder
        self.threads: list[tuple[threading.Thread, SimpleQueue[Record | str]]] = []
        self.warned: set[str] = set()

    def __enter__(self) -> "Tracking":
        return self

    def start(self, metadata: Mapping[str, Any]) -> None:
        """Start the run, or continue it after the records in its folder."""
        records = self.folder.records if self.trackers else []
        for tracker in self.trackers:
            name = type(tracker).__name__
            if name in _last_threads and _last_threads[name].is_alive():
                self.warn(name, "it still hangs since an earlier run")
                continue
            queue = SimpleQueue[Record | str]()
            thread = threading.Thread(
                target=self._follow, args=(tracker, queue, metadata, records), name=name, daemon=True
            )
            thread.start()
            _last_threads[name] = thread
            self.threads.append((thread, queue))

    def _follow(
        self,
        tracker: Tracker,
        queue: "SimpleQueue[Record | str]",
        metadata: Mapping[str, Any],
        records: Sequence[Record],
    ) -> None:
        """Pass records on until a status comes."""
        try:
            tracker.start(self.folder.path, metadata, records)
            while not isinstance(message := queue.get(), str):
                tracker.record(message)
            tracker.end(message)
        except BaseException as error:  # libraries raise SystemExit, too
            self.warn(type(tracker).__name__, f"{type(error).__name__}: {error}")

    def record(self, record: Record) -> None:
        for _, queue in self.threads:
            queue.put(record)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "finished"
        if error is not None:
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
        for _, queue in self.threads:
            queue.put(status)
        deadline = time.monotonic() + PATIENCE
        for thread, _ in self.threads:
            thread.join(max(deadline - time.monotonic(), 0))
            if thread.is_alive():
                self.warn(thread.name, f"it has not answered for {PATIENCE:g} s")

    def warn(self, name: str, reason: str) -> None:
        """Say in log.txt, once, that a tracker has stopped."""
        if name not in self.warned:
            self.warned.add(name)
            with suppress(AidgnError):  # the run reports a full disk
                self.folder.log(f"warning: tracking by {name} stopped: {' '.join(reason.split())[:500]}")
