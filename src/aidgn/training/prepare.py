"""Prepare a run before its first step: decoded images, resolved specification, identity and folder."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aidgn.backbones import Preprocessing
from aidgn.data import Dataset
from aidgn.data.cache import DecodedDataset, prepare
from aidgn.data.dataset import check_outside
from aidgn.runs.folder import RunWriter
from aidgn.runs.run_id import folder_name, without_preprocessing
from aidgn.runs.spec import RunSpec
from aidgn.terminal import log
from aidgn.training import distributed
from aidgn.training.errors import explain_out_of_memory, report_custom_errors
from aidgn.training.interrupt import stoppable
from aidgn.training.trackers import Tracking

# Phase ("prepare": decode images; "features": compute features of a frozen network; "train"), done, total, new record
Progress = Callable[[str, int, int, Mapping[str, Any] | None], None]


@dataclass(frozen=True)
class PreparedRun:
    """A run before its first step."""

    spec: RunSpec  # the resolved run
    images: DecodedDataset  # the decoded images
    identity: Mapping[str, Any]  # everything that the results depend on, also the precision and the images' content
    folder: RunWriter  # the folder of the run, which may not exist yet

    @property
    def dataset(self) -> Dataset:
        return self.images.dataset

    @property
    def num_sources(self) -> int:
        return len(self.dataset.domains) - len(self.spec.target)

    @property
    def precision(self) -> str:
        return str(self.identity["precision"])

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing.recorded(self.identity)

    @property
    def finished(self) -> bool:
        return self.folder.exists and self.folder.finished


def prepare_run(
    spec: RunSpec,
    out: str | Path,
    data_dir: str | Path | None,
    cache_dir: str | Path | None,
    workers: int | None,
    precision: str,
    report: Progress,
    dataset: Dataset | None = None,
) -> PreparedRun:
    """Find and decode the images of a run, and find its folder, which must not hold another run."""
    if dataset is None:
        dataset = spec.load_dataset(data_dir)
        check_outside(dataset, out)
    images = prepare(
        dataset,
        cache_dir=Path(cache_dir) if cache_dir else None,
        workers=workers,
        skip_broken=spec.skip_broken,
        on_progress=lambda done, total: report("prepare", done, total, None),
    )
    spec = spec.resolved(images.dataset)
    identity = {**spec.identity(images.dataset, images.content), "precision": precision}
    writes = distributed.rank() == 0
    folder = RunWriter(Path(out) / folder_name(identity), enabled=writes)
    earlier = RunWriter(Path(out) / folder_name(without_preprocessing(identity)), enabled=writes)
    if earlier.exists and not folder.exists:
        log.warning(
            "%s is a run of version 0.1.0, which keeps ImageNet's mean and standard deviation; %s expects other "
            "values. Move the folder away to train with them.",
            earlier.path,
            spec.backbone,
        )
        identity, folder = without_preprocessing(identity), earlier
    folder.check_identity(identity)
    return PreparedRun(spec, images, identity, folder)


@contextmanager
def locked(run: PreparedRun, tracking: Tracking) -> Iterator[threading.Event]:
    """Lock the folder of a run, start its trackers and explain errors; yield the event that a signal to stop sets."""
    with (
        report_custom_errors(run.spec.algorithm, run.folder.log_file),
        run.folder.locked(),
        stoppable() as stopped,
        tracking,
        explain_out_of_memory(run.spec, run.num_sources),
    ):
        distributed.barrier()
        run.folder.remove_temp_files()
        run.folder.check_identity(run.identity)
        yield stopped
