"""Train runs on a Ray cluster, which keeps worker processes on its nodes and restarts those that die.

Ray says which workers died; the sweep's folder says which runs are done. Every node must see that folder and the data
under the same path.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from aidgn.errors import AidgnError, ParameterError
from aidgn.runs.options import option
from aidgn.sweeps import journal
from aidgn.sweeps.launchers.base import ClusterLauncher, RunQueue
from aidgn.sweeps.launchers.ray_actors import ProgressActor, TrainingActor

RESIZE_SECONDS = 5.0  # between two checks of the size of the cluster
OBJECT_STORE = 80 * 2**20  # bytes, Ray's minimum: only small messages travel


@dataclass
class RayWorker:
    """An actor of Ray and the number of its run."""

    actor: Any
    answer: Any  # reference to the result of the last call, `ready` or `train`
    node: str = ""
    run: int | None = None
    idle: bool = False


@dataclass
class RayLauncher(ClusterLauncher):
    """Train in workers on a Ray cluster, as many as fit; more start when nodes join."""

    ray_address: str | None = option(
        "Address of a Ray cluster",
        default_help="$RAY_ADDRESS, else a cluster on this machine",
        metavar="HOST:PORT",
    )

    def check(self) -> None:
        """Raise an error if Ray is not installed or the options cannot be used."""
        super().check()
        gpus = self.gpus_per_run
        if gpus is not None and gpus > 1 and gpus % 1:
            raise ParameterError("gpus_per_run", gpus, "a fraction of one GPU, such as 0.25, or a whole number")
        if find_spec("ray") is None:
            raise AidgnError("--launcher ray needs Ray, which is not installed: pip install 'aidgn[ray]'.")

    def train(self, queue: RunQueue, device: str, training: dict[str, Any]) -> None:
        """Train the runs. The next free worker continues a run whose worker or node is lost."""
        with connect(self.ray_address) as ray:
            gpus = self.gpus_per_run
            if gpus is None:
                gpus = 1.0 if not device.startswith("cpu") and ray.cluster_resources().get("GPU") else 0.0
            cpus = self.cpus_per_run or 1
            if not self.workers and not count_room(ray, cpus, gpus):
                raise AidgnError(
                    f"No node of the Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs. Change "
                    "--cpus-per-run or --gpus-per-run, or say --workers N to wait for nodes that join later."
                )
            pool = RayPool(ray, queue, {**training, "device": "cuda" if gpus else "cpu"}, self.workers, cpus, gpus)
            try:
                pool.train()
            finally:
                pool.stop()


class RayPool:
    """The workers of one sweep on a cluster."""

    def __init__(
        self, ray: Any, queue: RunQueue, training: dict[str, Any], limit: int | None, cpus: float, gpus: float
    ):
        self.ray = ray
        self.queue = queue
        self.limit = limit  # number of workers; None for as many as fit
        self.cpus = cpus
        self.gpus = gpus
        self.workers: list[RayWorker] = []
        self.resized = float("-inf")  # when the number of workers was last compared with the cluster
        name = f"aidgn-{token_hex(8)}"
        self.progress = ray.remote(ProgressActor).options(name=name, num_cpus=0, max_restarts=-1).remote()
        environment = {name: value for name, value in os.environ.items() if name.startswith("AIDGN_")}
        self.arguments = (str(Path(queue.out).resolve()), training, name, str(Path.cwd()), environment)

    @property
    def working(self) -> list[RayWorker]:
        return [worker for worker in self.workers if worker.run is not None]

    def train(self) -> None:
        """Train until no run is left."""
        while not self.queue.empty or self.working:
            self.queue.requeue_busy()
            self.add_workers()
            self.assign_runs()
            self.handle_answers()
            self.report_progress()

    def add_workers(self) -> None:
        """Start as many workers as there is room and work for."""
        if time.monotonic() - self.resized < RESIZE_SECONDS:
            return
        self.resized = time.monotonic()
        room = self.limit or count_room(self.ray, self.cpus, self.gpus)
        runs = len(self.queue.waiting) + len(self.queue.busy) + len(self.working)
        for _ in range(len(self.workers), min(room, runs)):
            options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": -1}
            actor = self.ray.remote(TrainingActor).options(**options).remote(*self.arguments)
            self.workers.append(RayWorker(actor, ask_ready(actor)))

    def assign_runs(self) -> None:
        """Give waiting runs to idle workers."""
        for worker in self.workers:
            if worker.idle and self.queue.waiting:
                worker.run = self.queue.waiting.popleft()
                worker.idle = False
                worker.answer = worker.actor.train.remote(worker.run, self.queue.specs[worker.run])

    def handle_answers(self) -> None:
        """Wait a moment for results of calls and handle them."""
        pending = {worker.answer: worker for worker in self.workers if not worker.idle}
        if not pending:
            time.sleep(0.2)
            return
        for answer in self.ray.wait(list(pending), num_returns=len(pending), timeout=0.2)[0]:
            self.handle_answer(pending[answer])

    def handle_answer(self, worker: RayWorker) -> None:
        """Handle the result of a worker's call, or the loss of the worker."""
        try:
            outcome, text = self.ray.get(worker.answer)
        except (self.ray.exceptions.RayTaskError, self.ray.exceptions.RaySystemError) as error:
            raise AidgnError(f"A Ray worker could not start; is aidgn installed on every node?\n{error}") from None
        except self.ray.exceptions.RayError as error:  # the worker died or ran out of memory, or its node did
            self.replace_lost(worker, error)
            return
        run = worker.run
        worker.run = None
        worker.idle = True
        if run is None:
            worker.node = text
        elif outcome == "interrupted":  # Ray takes the node down
            self.queue.waiting.appendleft(run)
        else:
            self.queue.record(run, outcome, text)
        if outcome in ("crashed", "interrupted"):  # the process may be in any state
            self.ray.kill(worker.actor, no_restart=False)
            worker.answer = ask_ready(worker.actor)
            worker.idle = False

    def replace_lost(self, worker: RayWorker, error: Any) -> None:
        """Queue the run of a lost worker. Ray restarts the worker where there is room."""
        run = worker.run
        worker.run = None
        worker.idle = False
        if getattr(error, "actor_init_failed", False):
            raise AidgnError(
                "A Ray worker could not start; is aidgn installed on every node, and is the folder of "
                f"the sweep the same on all of them?\n{error}"
            ) from None
        if run is None:  # lost while it started: Ray does not restart it, so another one is started
            self.workers.remove(worker)
            return
        worker.answer = ask_ready(worker.actor)
        if any(node["NodeID"] == worker.node and node["Alive"] for node in self.ray.nodes()):
            killed = not isinstance(error, self.ray.exceptions.OutOfMemoryError)
            reason = "its process was killed, or crashed" if killed else "its node ran out of memory"
            journal.record_death(self.queue.specs[run], self.queue.out, reason, killed=killed)
            self.queue.record_failure(run, reason)
        else:
            self.queue.waiting.appendleft(run)
            self.queue.on_event(run, "retry", "its node was lost")

    def report_progress(self) -> None:
        """Pass on the events that workers sent since the last call."""
        runs = {worker.run for worker in self.working}
        with suppress(self.ray.exceptions.RayError):
            for run, event, value in self.ray.get(self.progress.take.remote(), timeout=10):
                if run in runs:
                    self.queue.on_event(run, event, value)

    def stop(self) -> None:
        """Let all workers save their runs, and end them."""
        answers = [worker.answer for worker in self.working]
        with suppress(self.ray.exceptions.RayError):
            if answers:
                self.ray.get(self.progress.stop.remote(), timeout=10)
                self.ray.wait(answers, num_returns=len(answers), timeout=30)
        for actor in (*(worker.actor for worker in self.workers), self.progress):
            with suppress(self.ray.exceptions.RayError):
                self.ray.kill(actor)


def ask_ready(actor: Any) -> Any:
    """Ask an actor for its node; the call waits while Ray restarts the actor."""
    return actor.ready.options(max_task_retries=-1).remote()


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """Connect to the cluster at this address or $RAY_ADDRESS, or start one on this machine; yield the module `ray`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # no reports of lost workers: the launcher reports them
    import ray

    if ray.is_initialized():  # by the caller
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {} if address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # Ray would try for minutes to reach an address where nobody answers
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **settings)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address:
            raise AidgnError(f"No Ray cluster could be reached at --ray-address {address}: {error}.") from None
        raise AidgnError(f"Ray could not be started on this machine: {error}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def count_room(ray: Any, cpus: float, gpus: float) -> int:
    """Return how many workers fit on the nodes of the cluster."""
    room = 0
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        workers = int(node["Resources"].get("CPU", 0) / cpus)
        whole_gpus = node["Resources"].get("GPU", 0)
        if gpus >= 1:
            workers = min(workers, int(whole_gpus / gpus))
        elif gpus:
            workers = min(workers, int(whole_gpus) * int(1 / gpus))
        room += workers
    return room
