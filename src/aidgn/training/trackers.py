"""Trackers: a run's records shown elsewhere too, in TensorBoard, Weights & Biases or MLflow.

A tracker is told of the run when it starts, then of each record, then of the end. It works in a thread of its own, so
that nothing it does stops or slows the run; if it fails, log.txt says so once.
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

from aidgn.errors import AidgnError, did_you_mean
from aidgn.files import write_text
from aidgn.runs.folder import RunWriter

PATIENCE = 10.0  # seconds the end of a run waits for its trackers

Record = Mapping[str, Any]


class Tracker(Protocol):
    """Write a class with these three methods to track runs in another way."""

    def start(self, folder: Path, about: Mapping[str, Any], records: Sequence[Record]) -> None:
        """The run of this folder starts, or goes on after `records`: each of these belongs to it exactly once,
        whatever an earlier, killed part of the run has told."""

    def record(self, record: Record) -> None:
        """A new record."""

    def end(self, how: str) -> None:
        """The run is "finished", "interrupted" or "failed"."""


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record: accuracies as accuracy/<domain>/<split>, everything else under its own name."""
    values = {}
    for name, value in record.items():
        if isinstance(value, int | float) and name != "step":
            if found := re.fullmatch(r"env(\d+)_(in|out)_acc", name):
                domain = re.sub(r"[^\w .-]", "_", record["args"]["domains"][int(found[1])])
                name = f"accuracy/{domain}/{found[2]}"
            values[name] = float(value)
    return values


class TensorBoard:
    """RUN/tensorboard/: `tensorboard --logdir RUNS` shows them. The file is written anew when a run goes on."""

    package = "tensorboard"

    def start(self, folder: Path, about: Mapping[str, Any], records: Sequence[Record]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        for path in (folder / "tensorboard").glob("events.out.tfevents.*"):
            path.unlink()
        self.writer = EventFileWriter(str(folder / "tensorboard"))
        rows = "\n".join(f"| {name} | {value} |" for name, value in about.items())
        table = TensorProto(dtype="DT_STRING", string_val=[f"| | |\n|-|-|\n{rows}".encode()])
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self.add(0, [Summary.Value(tag="run", tensor=table, metadata=metadata)])
        for record in records:
            self.record(record)

    def record(self, record: Record) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.add(record["step"], [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()])

    def add(self, step: int, values: list[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self.writer.flush()

    def end(self, how: str) -> None:
        self.writer.close()


class WandB:
    """A run of the project $WANDB_PROJECT, or aidgn. Offline ($WANDB_MODE=offline) its files are in RUN/wandb, written
    anew when a run goes on; online the server says up to which step it knows the run."""

    package = "wandb"

    def start(self, folder: Path, about: Mapping[str, Any], records: Sequence[Record]) -> None:
        import wandb

        if os.environ.get("WANDB_MODE") not in ("offline", "disabled") and not wandb.login(prompt=False):
            raise RuntimeError("no key is known; run `wandb login`, or set WANDB_MODE=offline")
        for path in (folder / "wandb").glob("offline-run-*"):
            shutil.rmtree(path, ignore_errors=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "aidgn"),
            id=_kept_id(folder / "wandb.id", uuid.uuid4().hex),
            name=folder.name,
            config=dict(about),
            dir=str(folder),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )
        self.known = self.run.starting_step  # the next one: steps before it are there
        for record in records:
            self.record(record)

    def record(self, record: Record) -> None:
        if record["step"] >= self.known:
            self.run.log(scalars(record), step=record["step"])

    def end(self, how: str) -> None:
        self.run.finish(exit_code=0 if how == "finished" else 1)


class MLflow:
    """A run of the experiment $MLFLOW_EXPERIMENT_NAME, or aidgn, at $MLFLOW_TRACKING_URI; where there is none, in
    mlruns/ beside the run folders. What the store has already is not told again."""

    package = "mlflow"

    def start(self, folder: Path, about: Mapping[str, Any], records: Sequence[Record]) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            where = (folder.parent / "mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # version 3 wants to be asked twice
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(where)
        kept = folder / "mlflow.id"
        try:
            self.id = self.client.get_run(kept.read_text().strip()).info.run_id
            self.client.update_run(self.id, status="RUNNING")
        except (OSError, MlflowException):  # not tracked yet, or removed from there
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "aidgn")
            with suppress(MlflowException):  # it is there
                self.client.create_experiment(name)
            experiment = self.client.get_experiment_by_name(name)
            if experiment is None:
                raise RuntimeError(f"experiment {name} cannot be made") from None
            self.id = self.client.create_run(experiment.experiment_id, run_name=folder.name).info.run_id
            write_text(kept, self.id + "\n")
            self.client.log_batch(self.id, params=[Param(key, str(value)[:500]) for key, value in about.items()])
        self.known: dict[str, set[int]] = {}
        for record in records:
            self.record(record)

    def record(self, record: Record) -> None:
        from mlflow.entities import Metric

        now, new = int(1000 * time.time()), []
        for name, value in scalars(record).items():
            if name not in self.known:
                self.known[name] = {point.step for point in self.client.get_metric_history(self.id, name)}
            if record["step"] not in self.known[name]:
                new.append(Metric(name, value, now, record["step"]))
        self.client.log_batch(self.id, metrics=new)

    def end(self, how: str) -> None:
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[how]
        self.client.set_terminated(self.id, status=status)


TRACKERS: dict[str, type[TensorBoard] | type[WandB] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def find_tracker(name: str) -> type[TensorBoard] | type[WandB] | type[MLflow]:
    if name not in TRACKERS:
        raise AidgnError(f"--track {name} is not one of {', '.join(TRACKERS)}.{did_you_mean(name, TRACKERS)}")
    if importlib.util.find_spec(TRACKERS[name].package) is None:
        raise AidgnError(
            f"--track {name} needs {TRACKERS[name].package}, which is not installed: pip install 'aidgn[trackers]'."
        )
    return TRACKERS[name]


_last: dict[str, threading.Thread] = {}  # of each kind of tracker, in this process


class Tracking:
    """The trackers of one run, by name or of one's own, each in its thread."""

    def __init__(self, trackers: Sequence[str | Tracker], folder: RunWriter):
        self.trackers: list[Tracker] = [
            find_tracker(each)() if isinstance(each, str) else each for each in dict.fromkeys(trackers)
        ]
        self.folder = folder
        self.work: list[tuple[str, threading.Thread, SimpleQueue[Record | str]]] = []
        self.warned: set[str] = set()

    def __enter__(self) -> "Tracking":
        return self

    def start(self, about: Mapping[str, Any]) -> None:
        """The run starts, or goes on after the records in its folder."""
        records = self.folder.records if self.trackers else []
        for tracker in self.trackers:
            name, queue = type(tracker).__name__, SimpleQueue[Record | str]()
            if name in _last and _last[name].is_alive():
                self.warn(name, "it still hangs since an earlier run")
                continue
            _last[name] = thread = threading.Thread(
                target=self.follow, args=(tracker, name, queue, about, records), name=name, daemon=True
            )
            thread.start()
            self.work.append((name, thread, queue))

    def follow(
        self,
        tracker: Tracker,
        name: str,
        queue: "SimpleQueue[Record | str]",
        about: Mapping[str, Any],
        records: Sequence[Record],
    ) -> None:
        try:
            tracker.start(self.folder.path, about, records)
            while not isinstance(news := queue.get(), str):
                tracker.record(news)
            tracker.end(news)
        except BaseException as error:  # libraries exit, too
            self.warn(name, f"{type(error).__name__}: {error}")

    def record(self, record: Record) -> None:
        for _, _, queue in self.work:
            queue.put(record)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        how = "finished" if kind is None else "interrupted" if getattr(error, "exit_code", 2) == 130 else "failed"
        for _, _, queue in self.work:
            queue.put(how)
        until = time.monotonic() + PATIENCE
        for name, thread, _ in self.work:
            thread.join(max(until - time.monotonic(), 0))
            if thread.is_alive():
                self.warn(name, f"it has not answered for {PATIENCE:g} s")

    def warn(self, name: str, why: str) -> None:
        if name not in self.warned:
            self.warned.add(name)
            with suppress(AidgnError):  # a full disk is the run's to report
                self.folder.log(f"warning: tracking by {name} stopped: {' '.join(why.split())[:500]}")


def _kept_id(path: Path, new: str) -> str:
    """The id in this file, or the new one, kept there."""
    if not path.exists():
        write_text(path, new + "\n")
    return path.read_text().strip()
