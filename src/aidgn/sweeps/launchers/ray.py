"""Runs on a Ray cluster, which keeps worker processes alive on its nodes and replaces those it loses.

Ray says what died, the records in the sweep's folder say what is done: every node must see that folder (and the data)
under the same path.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from aidgn.errors import AidgnError
from aidgn.runs.spec import RunSpec
from aidgn.sweeps import journal as attempts
from aidgn.sweeps.launchers.local import RETRIES, OnEvent, RunQueue

LOOK = 5.0  # seconds between two looks at the size of the cluster
OBJECT_STORE = 80 * 2**20  # bytes, Ray's least: nothing but small messages travels


@dataclass
class RayWorker:
    actor: Any
    answer: Any  # to its last question: ready, or train
    node: str = ""
    run: int | None = None
    idle: bool = False


def check() -> None:
    """Whether Ray is here, to be said before anything is prepared for it."""
    if find_spec("ray") is None:
        raise AidgnError("--launcher ray needs Ray, which is not installed: pip install 'aidgn[ray]'.")


def run_all(
    specs: Sequence[RunSpec],
    out: str | Path,
    *,
    on_event: OnEvent = lambda *_: None,
    retries: int = RETRIES,
    workers: int | None = None,
    ray_address: str | None = None,
    cpus_per_run: float = 1,
    gpus_per_run: float | None = None,
    device: str = "auto",
    **options: Any,
) -> dict[int, str]:
    """Train every run; returns the errors of those that were set aside, by run number. Finished runs are not repeated.

    As many workers as the cluster has room for, now and when nodes join; each takes run after run. A run whose node
    or worker is lost is continued by the next free worker."""
    for option, value in (("workers", workers), ("cpus-per-run", cpus_per_run)):
        if value is not None and value <= 0:
            raise AidgnError(f"--{option} is {value:g}; expected a number above 0.")
    if gpus_per_run is not None and (gpus_per_run < 0 or (gpus_per_run > 1 and gpus_per_run % 1)):
        raise AidgnError(
            f"--gpus-per-run is {gpus_per_run:g}; expected a fraction of one GPU, such as 0.25, or a whole number."
        )
    if not specs:
        return {}
    check()
    out = Path(out).resolve()
    with _cluster(ray_address) as ray:
        gpus = gpus_per_run
        if gpus is None:
            gpus = 1.0 if not device.startswith("cpu") and ray.cluster_resources().get("GPU") else 0.0
        if not workers and not _room(ray, cpus_per_run, gpus):
            raise AidgnError(
                f"No node of the Ray cluster has {cpus_per_run:g} CPUs and {gpus:g} GPUs. Change "
                "--cpus-per-run or --gpus-per-run, or say --workers N to wait for nodes that join later."
            )
        name = f"aidgn-{token_hex(8)}"
        board = ray.remote(ProgressActor).options(name=name, num_cpus=0, max_restarts=-1).remote()
        places = {name: value for name, value in os.environ.items() if name.startswith("AIDGN_")}
        about = str(out), {**options, "device": "cuda" if gpus else "cpu"}, name, str(Path.cwd()), places
        work = RunQueue(specs, out, retries, on_event)
        crew: list[RayWorker] = []
        looked = float("-inf")

        def start() -> RayWorker:
            actor = ray.remote(_Worker).options(num_cpus=cpus_per_run, num_gpus=gpus, max_restarts=-1).remote(*about)
            return RayWorker(actor, ready(actor))

        def ready(actor: Any) -> Any:
            return actor.ready.options(max_task_retries=-1).remote()  # it waits while Ray starts the actor again

        def lost(member: RayWorker, error: Any) -> None:
            """Ray starts it again where there is room; meanwhile others go on with its run."""
            run, member.run, member.idle = member.run, None, False
            if getattr(error, "actor_init_failed", False):
                raise AidgnError(
                    "A Ray worker could not start; is aidgn installed on every node, and is the folder of "
                    f"the sweep the same on all of them?\n{error}"
                ) from None
            if run is None:  # not restarted either: another one in its place
                crew.remove(member)
                return
            member.answer = ready(member.actor)
            if any(node["NodeID"] == member.node and node["Alive"] for node in ray.nodes()):
                why = "its process died"
                attempts.died(specs[run], out, why)
                work.record_failure(run, why)
            else:
                work.waiting.appendleft(run)
                on_event(run, "retry", "its node was lost")

        def answered(member: RayWorker) -> None:
            try:
                kind, what = ray.get(member.answer)
            except (ray.exceptions.RayTaskError, ray.exceptions.RaySystemError) as error:
                raise AidgnError(f"A Ray worker could not start; is aidgn installed on every node?\n{error}") from None
            except ray.exceptions.RayError as error:  # it died, ran out of memory, or its node did
                return lost(member, error)
            run, member.run, member.idle = member.run, None, True
            if run is None:
                member.node = what
            elif kind == "done":
                on_event(run, kind, what)
            elif kind == "stop":
                raise AidgnError(what)
            elif kind == "busy":
                work.busy(run)
            elif kind == "interrupted":  # not by us: Ray takes this node down
                work.waiting.appendleft(run)
            else:
                work.record_failure(run, what)
            if kind in ("crashed", "interrupted"):  # what is left in that process is unknown
                ray.kill(member.actor, no_restart=False)
                member.answer, member.idle = ready(member.actor), False

        try:
            while work.waiting or work.later or any(member.run is not None for member in crew):
                work.look_again()
                if time.monotonic() - looked > LOOK:
                    looked = time.monotonic()
                    wanted = min(
                        workers or _room(ray, cpus_per_run, gpus),
                        len(work.waiting) + len(work.later) + sum(member.run is not None for member in crew),
                    )
                    crew += [start() for _ in range(len(crew), wanted)]
                for member in crew:
                    if member.idle and work.waiting:
                        member.run, member.idle = work.waiting.popleft(), False
                        member.answer = member.actor.train.remote(member.run, specs[member.run])
                asked = {member.answer: member for member in crew if not member.idle}
                if not asked:
                    time.sleep(0.2)
                    continue
                for answer in ray.wait(list(asked), num_returns=len(asked), timeout=0.2)[0]:
                    answered(asked[answer])
                with suppress(ray.exceptions.RayError):
                    for run, kind, what in ray.get(board.take.remote(), timeout=10):
                        if any(member.run == run for member in crew):
                            on_event(run, kind, what)
        finally:
            busy = [member.answer for member in crew if member.run is not None]
            with suppress(ray.exceptions.RayError):
                if busy:
                    ray.get(board.stop.remote(), timeout=10)
                    ray.wait(busy, num_returns=len(busy), timeout=30)  # they save their state, then answer
            for actor in (*(member.actor for member in crew), board):
                with suppress(ray.exceptions.RayError):
                    ray.kill(actor)
    return work.failed


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected: to the cluster at this address or $RAY_ADDRESS, else to one started on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # reports of lost workers and nodes: we give our own
    import ray

    if ray.is_initialized():  # by whoever calls this
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS")
    started: dict[str, Any] = {} if address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **started)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise AidgnError(
            f"No Ray cluster could be reached at --ray-address {address}: {error}."
            if address
            else f"Ray could not be started on this machine: {error}"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _room(ray: Any, cpus: float, gpus: float) -> int:
    """How many workers fit on the nodes that are there."""
    room = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            fit = int(has.get("CPU", 0) / cpus)
            if gpus:
                whole = has.get("GPU", 0)
                fit = min(fit, int(whole) * int(1 / gpus) if gpus < 1 else int(whole / gpus))
            room += fit
    return room


class ProgressActor:
    """Where workers leave news, and see whether they are to stop. If it is lost, so is only what was to be shown."""

    def __init__(self) -> None:
        self.news: dict[int, tuple[str, Any]] = {}
        self.over = False

    def tell(self, run: int, kind: str, what: Any) -> bool:
        self.news[run] = (kind, what)
        return self.over

    def take(self) -> list[tuple[int, str, Any]]:
        news, self.news = self.news, {}
        return [(run, *said) for run, said in news.items()]

    def stop(self) -> None:
        self.over = True

    def stopping(self) -> bool:
        return self.over


class _Worker:
    """A process on a node that loads data and compiled code once and takes run after run."""

    def __init__(self, out: str, options: dict[str, Any], board: str, where: str, environment: dict[str, str]) -> None:
        with suppress(OSError):  # so that relative paths mean what they mean to the user
            os.chdir(where)
        os.environ.update(environment)
        self.out, self.options, self.board = out, options, board
        self.run: int | None = None
        self.news: tuple[str, Any] | None = None
        threading.Thread(target=self.talk, daemon=True).start()

    def ready(self) -> tuple[str, str]:
        import ray

        return "ready", ray.get_runtime_context().get_node_id()

    def train(self, run: int, spec: RunSpec) -> tuple[str, str]:
        def report(what: str, done: int, total: int, record: Any) -> None:
            self.news = ("step", done) if what == "train" else ("prepare", (done, total))

        self.run = run
        try:
            return attempts.attempt(spec, self.out, on_progress=report, **self.options)
        finally:
            self.run = self.news = None

    def talk(self) -> None:
        """Tell the news twice a second; save and end the run when told to."""
        import ray

        board: Any = None
        while True:
            time.sleep(0.5)
            run, news, self.news = self.run, self.news, None
            try:
                board = board or ray.get_actor(self.board)
                over = ray.get(
                    board.tell.remote(run, *news) if run is not None and news else board.stopping.remote(), timeout=10
                )
            except Exception:
                continue  # the board is being started again
            if over and self.run is not None:
                os.kill(os.getpid(), signal.SIGTERM)
                return
