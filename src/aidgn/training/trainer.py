"""A run, top to bottom: data, network, loop, records, and going on where it stopped."""

import logging
import platform
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch

import aidgn
from aidgn import backbones
from aidgn.algorithms import find
from aidgn.algorithms.annealed import Annealed
from aidgn.algorithms.custom import frame_in
from aidgn.data.cache import DecodedDataset, prepare
from aidgn.data.dataset import check_outside
from aidgn.data.loader import DeviceImageStore
from aidgn.errors import AidgnError, Interrupted
from aidgn.runs.checkpoints import write_novelty
from aidgn.runs.folder import RunFolder, RunWriter
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.run_id import folder_name
from aidgn.runs.spec import RunSpec
from aidgn.training import distributed as parallel
from aidgn.training import worker_group as crew
from aidgn.training.averaging import find_average
from aidgn.training.evaluation import Splits
from aidgn.training.featurizer import choose_device, choose_precision, featurizer
from aidgn.training.interrupt import stoppable
from aidgn.training.loop import Trainer
from aidgn.training.trackers import Tracker, Tracking

THREADS = torch.get_num_threads()  # of this machine
SAVE_SECONDS = 60.0  # at most this much work is lost by a crash; less where saving takes under 2 % of the time
log = logging.getLogger("aidgn")

Progress = Callable[[str, int, int, Mapping[str, Any] | None], None]  # what, done, of how many, a new record


def train(
    spec: RunSpec,
    out: str | Path = "runs",
    *,
    data_dir: str | Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    cache_dir: str | Path | None = None,
    workers: int | None = None,
    save_seconds: float = SAVE_SECONDS,
    trackers: Sequence[str | Tracker] = (),
    devices: int = 1,
    on_progress: Progress | None = None,
) -> Path:
    """Train one run and return its folder. A finished run is left as it is, an interrupted one is continued.

    devices: how many share the work of each step; `device` is the first of them."""
    report = on_progress or (lambda *_: None)
    where = choose_device(device)
    precision = choose_precision(precision, where)
    dataset = spec.load_dataset(data_dir)
    check_outside(dataset, out)
    prepared = prepare(
        dataset,
        cache_dir=Path(cache_dir) if cache_dir else None,
        workers=workers,
        skip_broken=spec.skip_broken,
        on_progress=lambda done, total: report("prepare", done, total, None),
    )
    dataset = prepared.dataset
    spec = spec.resolved(dataset)
    identity = {**spec.identity(dataset, prepared.content), "precision": precision}
    folder = RunWriter(Path(out) / folder_name(identity), enabled=parallel.rank() == 0)
    tracking = Tracking(trackers, folder)
    folder.check_identity(identity)
    if folder.exists and folder.finished:
        return folder.path
    begins = find_average(spec.average).begins(int(spec.eval_every or 0)) if spec.average else 0
    if int(spec.steps or 0) <= begins and parallel.processes() == 1:
        log.warning(
            "--average %s begins after step %d at the earliest, this run has %d steps: nothing is averaged.",
            spec.average,
            begins,
            spec.steps,
        )
    if devices != parallel.processes():
        return crew.train(
            devices,
            where,
            spec,
            out,
            report,
            trackers=trackers,
            data_dir=data_dir,
            precision=precision,
            cache_dir=cache_dir,
            workers=workers,
            save_seconds=save_seconds,
        )

    sources = [domain for domain, name in enumerate(dataset.domains) if name not in spec.target]
    with (
        _report_custom_errors(spec, folder),
        folder.locked(),
        stoppable() as stopped,
        tracking,
        _explain_out_of_memory(spec, len(sources)),
    ):
        parallel.barrier()
        folder.remove_temp_files()
        folder.check_identity(identity)
        continued = folder.exists
        if continued and folder.finished:  # by another process, meanwhile
            return folder.path
        # Sums on the CPU depend on the number of threads, so it belongs to the run, wherever it is continued.
        threads = 1 if dataset.small else THREADS
        if continued:
            threads = folder.metadata.threads or threads
        torch.set_num_threads(max(threads // devices, 1))
        seed = spec.seed(dataset)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

        targets = [dataset.domains.index(name) for name in spec.target]
        splits = Splits.of(dataset, spec.trial)
        for domain, outside in enumerate(splits.outside):
            if not len(outside):
                raise AidgnError(
                    f"Domain {dataset.domains[domain]} has {len(dataset.indices(domain))} images; at least "
                    "5 are needed to set a fifth of them aside for validation."
                )
        kind = find(spec.algorithm)
        network = featurizer(
            str(spec.backbone), spec.weights, 3 + kind.extra_channels, precision, where, spec.train_only
        )
        if devices > 1:
            parallel.split(network)
        algorithm = kind(network, len(dataset.classes), len(sources), **spec.hyper_parameters).to(where)
        algorithm.train()
        args = {
            "dataset": dataset.name,
            "algorithm": str(spec.label()),
            "test_envs": targets,
            "trial_seed": spec.trial,
            "hparams_seed": spec.draw,
            "seed": seed,
            "steps": spec.steps,
            "domains": dataset.domains,
            "backbone": spec.backbone,
            "weights": identity["weights"],
            "precision": precision,
            "skipped": len(prepared.skipped),
            "task": "domain_generalization",
            "holdout_fraction": 0.2,
        }
        if isinstance(algorithm, Annealed) and algorithm.anneal_updates >= int(spec.steps or 0) and not parallel.rank():
            log.warning(
                "%s begins after step %d, this run has %d: until then it trains another objective. --set %s=N "
                "sets that step.",
                kind.name(),
                algorithm.anneal_updates,
                spec.steps,
                algorithm.anneal,
            )
        run = Trainer(spec, algorithm, load_images(prepared, where), splits, sources, targets, seed, args)
        for other in folder.stale_versions(identity):
            log.warning(
                "%s has changed since it was trained in %s, which is not finished; this run begins anew.",
                spec.algorithm,
                other,
            )
        folder.write_metadata(
            RunMetadata(
                identity,
                steps=spec.steps,
                classes=list(dataset.classes),
                domains=list(dataset.domains),
                image_size=dataset.image_size,
                skipped=list(prepared.skipped),
                root=str(dataset.root.resolve()) if dataset.root else None,
                stride_first=backbones.is_stride_first(str(spec.backbone), spec.weights),
                precision=precision,
                threads=threads,
                device=_describe(where),
                aidgn=aidgn.__version__,
                torch=str(torch.__version__),
                python=platform.python_version(),
            )
        )
        if continued and folder.last.exists() and not parallel.rank():
            folder.log(f"{folder.last.name} is damaged: the run is not finished")
            log.warning(
                "%s is damaged: the run is trained again, from the last saved state if there is one.", folder.last
            )
        try:
            state = folder.load()
            if state is not None:
                run.load_state(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise AidgnError(
                f"{folder.state} does not fit this run ({str(error).splitlines()[0]}): it was saved by "
                "another version. Remove it to start this run from the beginning."
            ) from error
        folder.log(
            f"{'continued' if run.step else 'started'} at step {run.step} of {spec.steps} on "
            f"{f'{devices} x ' * (devices > 1)}{_describe(where)}, {precision}, torch {torch.__version__}"
        )
        tracking.start({**identity, **spec.hyper_parameters})
        report("train", run.step, run.steps, None)
        saved, wait = time.monotonic(), save_seconds
        for record in run.go():
            first = record is not None and not folder.state.exists()
            stop = stopped.is_set()  # once, so that what is said to be saved is
            due = stop or first or time.monotonic() - saved > wait
            if due or record is not None:
                run.check_finite(folder)
            if record is not None:
                folder.append(record)
                tracking.record(record)
            if due:
                began = time.monotonic()
                folder.save(run.state())
                saved = time.monotonic()
                wait = min(save_seconds, 50 * (saved - began))
            report("train", run.step, run.steps, record)
            if stop and run.step < run.steps:
                folder.log(f"interrupted at step {run.step}")
                raise Interrupted(
                    f"Stopped at step {run.step} of {run.steps}; all is saved in {folder.path}. "
                    "The same command goes on from there."
                )
        if parallel.rank() > 0:
            return folder.path
        if run.average is not None and run.average.count < 2 and begins < run.step:
            folder.log(f"{spec.average} averaged nothing")
            log.warning(
                "--average %s averaged nothing: the validation loss had no valley. The weights are those of "
                "single steps.",
                spec.average,
            )
        last = {name: tensor.clone() for name, tensor in run.last_weights().items()}
        write_novelty(folder.novelty, run.novelty().to_dict())
        folder.finish(str(spec.label()), (run.best_weights, run.best_step), (last, run.step))
        folder.log(f"finished; step {run.best_step} selected by training-domain validation")
    return folder.path


_loaded: dict[tuple[str, str, int, torch.device], DeviceImageStore] = {}


def load_images(prepared: DecodedDataset, device: torch.device) -> DeviceImageStore:
    """The images on the device; those of the last run in this process, if they are the same."""
    key = prepared.content, prepared.dataset.fingerprint, prepared.dataset.image_size, device
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = DeviceImageStore(prepared, device)
    return _loaded[key]


class CustomCodeError(AidgnError):
    """The code of an own algorithm failed."""


@contextmanager
def _report_custom_errors(spec: RunSpec, folder: RunFolder) -> Iterator[None]:
    """Where the code of an own algorithm failed, in place of a traceback, of which few lines are its own and which the
    log has. Of several processes the crew says what happened, of files and disks the system."""
    try:
        yield
    except Exception as error:
        place = frame_in(spec.algorithm, error)
        log_file = folder.log_file
        if (
            place is None
            or isinstance(error, AidgnError | OSError)
            or parallel.processes() > 1
            or not log_file.exists()
        ):
            raise
        words = ": ".join(filter(None, [type(error).__name__, shorten(str(error), 300).rstrip(".")]))
        mistake = CustomCodeError(f"{spec.algorithm} failed in `{place.name}`, line {place.lineno}: {words}.")
        mistake.add_note(f"{log_file} has the traceback.")
        raise mistake from error


class OutOfMemory(AidgnError):
    """A batch did not fit. What is left on the device, a graph half recorded above all, is unknown."""


@contextmanager
def _explain_out_of_memory(spec: RunSpec, sources: int) -> Iterator[None]:
    """What did not fit, and what to do, in place of an allocator's words."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own are RuntimeErrors, on the CPU without a class
        words = str(error)
        if (
            not isinstance(error, MemoryError | torch.OutOfMemoryError)
            and "not enough memory" not in words
            and "can't allocate memory" not in words
        ):
            raise
        size, what = int(spec.hyper_parameters["batch_size"]), re.split(r"[.;:] |\n", words)[0]
        raise OutOfMemory(
            f"Out of memory with {sources} x {size} images of {spec.image_size} pixels in a batch "
            f"({what or type(error).__name__}). Try --batch-size {max(size // 2, 1)}, or share the batch out over more "
            "--devices. What was saved is kept."
        ) from None


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
