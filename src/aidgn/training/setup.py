"""Set up a run: put images on the device, create the algorithm, describe the run, and warn of likely mistakes."""

import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aidgn
from aidgn import backbones
from aidgn.algorithms import Algorithm, find
from aidgn.algorithms.annealed import Annealed
from aidgn.algorithms.optimization import Optimization
from aidgn.backbones import Preprocessing
from aidgn.data.cache import DecodedDataset
from aidgn.data.loader import BatchStore, DeviceImageStore
from aidgn.devices import describe_cpu, limit_threads
from aidgn.errors import Interrupted, ParameterError
from aidgn.runs.folder import RunWriter
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.records import domainbed_names
from aidgn.terminal import log
from aidgn.training import distributed
from aidgn.training.averaging import WeightAverage
from aidgn.training.featurizer import create_featurizer
from aidgn.training.frozen import FeatureInput, FeatureStore, FrozenNetwork, load_features, load_network
from aidgn.training.prepare import PreparedRun, Progress

THREADS = torch.get_num_threads()  # of this machine

_loaded_images: dict[tuple[str, str, int, torch.device], DeviceImageStore] = {}
_loaded_features: dict[tuple[object, ...], FeatureStore] = {}


def load_images(prepared: DecodedDataset, device: torch.device) -> DeviceImageStore:
    """Return the images on the device, from the last run of this process if they are the same."""
    key = prepared.content, prepared.dataset.fingerprint, prepared.dataset.image_size, device
    if key not in _loaded_images:
        _loaded_images.clear()
        _loaded_images[key] = DeviceImageStore(prepared, device)
    return _loaded_images[key]


def load_batches(
    run: PreparedRun, device: torch.device, cache_dir: str | Path | None, report: Progress, stopped: threading.Event
) -> BatchStore:
    """Return the store that a run takes its batches from: images on the device, or features of a frozen network."""
    spec = run.spec
    images = load_images(run.images, device)
    if not spec.trains_head:
        return images
    network = load_network(
        str(spec.backbone),
        str(spec.weights),
        run.identity["weights"],
        run.precision,
        run.preprocessing,
        int(spec.image_size or 0),
        device,
    )

    def report_features(done: int, total: int) -> None:
        report("features", done, total, None)
        if stopped.is_set():
            raise Interrupted(f"Stopped with {done} of {total} features computed. The same command continues.")

    return load_frozen_features(images, network, int(spec.views or 0), cache_dir, report_features)


def load_frozen_features(
    images: DeviceImageStore,
    network: FrozenNetwork,
    views: int = 0,
    cache_dir: str | Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> FeatureStore:
    """Return a frozen network's features of images, from the last run of this process if they are the same."""
    key = network.digest, network.precision, network.preprocessing, images, views, str(cache_dir)
    if key not in _loaded_features:
        torch.set_num_threads(limit_threads(THREADS))
        directory = Path(cache_dir) if cache_dir else None
        features = load_features(images, network, views, cache_dir=directory, on_progress=on_progress)
        _loaded_features.clear()
        _loaded_features[key] = features
    return _loaded_features[key]


def find_features(
    images: DeviceImageStore, digest: str | None, precision: str, preprocessing: Preprocessing
) -> FeatureStore | None:
    """Return the features of the last run of this process if they are of these images and this network, else None."""
    for key, features in _loaded_features.items():
        if key[:4] == (digest, precision, preprocessing, images):
            return features
    return None


def latest_features() -> FeatureStore | None:
    """Return the features that the last run of this process on a frozen network used, None if there are none."""
    return next(iter(_loaded_features.values()), None)


def create_algorithm(run: PreparedRun, images: BatchStore) -> Algorithm:
    """Create the algorithm of a run, in training mode on the device of the images or features."""
    spec = run.spec
    algorithm_class = find(spec.algorithm)
    featurizer: nn.Module
    if isinstance(images, FeatureStore):
        featurizer = FeatureInput(images.features.shape[1])
    else:
        channels = 3 + algorithm_class.extra_channels
        featurizer = create_featurizer(
            str(spec.backbone),
            spec.weights,
            channels,
            run.precision,
            images.device,
            spec.train_only,
            spec.image_size,
            spec.batch_norm,
        )
        if distributed.world_size() > 1:
            featurizer, _ = distributed.shard_featurizer(featurizer)
    num_classes = len(run.dataset.classes)
    algorithm = algorithm_class(featurizer, num_classes, run.num_sources, **spec.hyper_parameters)
    algorithm.optimization = Optimization(spec.optimizer or "adam", spec.layer_decay or 1.0, spec.accumulate)
    algorithm = algorithm.to(images.device).train()
    live = bool(algorithm.live_batch_norms())
    if spec.batch_norm == "live" and not live:
        raise ParameterError("batch_norm", "live", f"none for {spec.backbone}, which has no batch norm")
    if spec.accumulate > 1 and live:
        raise ParameterError(
            "accumulate",
            spec.accumulate,
            f"1 for {spec.backbone} with live batch norm, whose statistics are those of the whole batch",
        )
    return algorithm


def share_threads(recorded: int | None, small: bool, processes: int) -> int:
    """Set the number of CPU threads of this process, and return the number of threads of the run.

    Sums on the CPU depend on the number of threads, so it belongs to the run, wherever the run is continued.

    Args:
        recorded: Number of the run so far; None for a new run.
        small: Whether steps on small images or on cached features are too short for several threads.
        processes: Processes that share the threads.
    """
    threads = recorded or (1 if small else THREADS)
    wanted = max(threads // processes, 1)
    allowed = limit_threads(wanted)
    torch.set_num_threads(allowed)
    return threads if allowed == wanted else allowed * processes


def describe_device(device: torch.device, count: int = 1) -> str:
    """Return the name of the hardware, such as "2 x NVIDIA H200"."""
    names = {"cpu": f"{platform.machine()} CPU", "mps": f"{platform.machine()} GPU of Apple"}
    name = names.get(device.type) or torch.cuda.get_device_name(device)
    return f"{count} x {name}" if count > 1 else name


def describe_run(run: PreparedRun, threads: int, device: torch.device) -> RunMetadata:
    """Return the metadata of a run."""
    spec, dataset = run.spec, run.dataset
    return RunMetadata(
        dict(run.identity),
        steps=spec.steps,
        classes=list(dataset.classes),
        class_images=dataset.count_images().sum(0).tolist(),
        domains=list(dataset.domains),
        image_size=dataset.image_size,
        skipped=list(run.images.skipped),
        root=dataset.location,
        stride_first=backbones.is_stride_first(str(spec.backbone), spec.weights),
        precision=run.precision,
        threads=threads,
        device=describe_device(device),
        cpu=describe_cpu(),
        aidgn=aidgn.__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
    )


def constant_fields(run: PreparedRun) -> dict[str, Any]:
    """Return the fields that all records of a run share, named like DomainBed's `args` and `hparams`."""
    spec, dataset = run.spec, run.dataset
    args = {
        "dataset": dataset.name,
        "algorithm": str(spec.label()),
        "test_envs": [dataset.domains.index(name) for name in spec.target],
        "trial_seed": spec.trial,
        "hparams_seed": spec.draw,
        "seed": spec.seed(dataset),
        "steps": spec.steps,
        "domains": dataset.domains,
        "backbone": spec.backbone,
        "weights": run.identity["weights"],
        "precision": run.precision,
        "skipped": len(run.images.skipped),
        "task": "domain_generalization",
        "holdout_fraction": 0.2,
    }
    names = domainbed_names(find(spec.algorithm).name())
    return {"args": args, "hparams": {names.get(name, name): value for name, value in spec.hyper_parameters.items()}}


def warn_before_start(run: PreparedRun, algorithm: Algorithm, average: WeightAverage | None) -> None:
    """Warn if a run will never reach its objective or its average, or repeats work; rank 0 only."""
    if distributed.rank() > 0:
        return
    spec, folder = run.spec, run.folder
    steps = int(spec.steps or 0)
    first_step = average.first_step(int(spec.eval_every or 0)) if average else 0
    if steps <= first_step:
        log.warning(
            "--average %s begins after step %d at the earliest, this run has %d steps: nothing is averaged.",
            spec.average,
            first_step,
            steps,
        )
    if isinstance(algorithm, Annealed) and algorithm.anneal_updates >= steps:
        log.warning(
            "%s begins after step %d, this run has %d: until then it trains another objective. --set %s=N sets that "
            "step.",
            algorithm.name(),
            algorithm.anneal_updates,
            steps,
            algorithm.anneal,
        )
    for other in folder.stale_versions(run.identity):
        log.warning(
            "%s has changed since it was trained in %s, which is not finished; this run starts from step 0.",
            spec.algorithm,
            other,
        )
    if folder.exists and folder.last.exists():
        folder.log(f"{folder.last.name} is damaged: the run is not finished")
        log.warning("%s is damaged: the run is trained again, from the last saved state if there is one.", folder.last)


def warn_of_no_average(run: PreparedRun, average: WeightAverage | None) -> None:
    """Warn at the end of a run whose average holds no more than one step."""
    steps, eval_every = int(run.spec.steps or 0), int(run.spec.eval_every or 0)
    if average and average.count < 2 and average.first_step(eval_every) < steps:
        run.folder.log(f"{run.spec.average} averaged nothing")
        log.warning(
            "--average %s averaged nothing: the validation loss had no valley. The weights are those of single steps.",
            run.spec.average,
        )


def note_start(run: PreparedRun, step: int, threads: int, device: torch.device, devices: int) -> None:
    """Write run.json if it is missing or the run starts, warn if it continues elsewhere, and add a line to log.txt."""
    metadata = describe_run(run, threads, device)
    if step and run.folder.exists:
        _warn_of_changes(run.folder, metadata)
    else:
        run.folder.write_metadata(metadata)
    verb, hardware = "continued" if step else "started", describe_device(device, devices)
    run.folder.log(
        f"{verb} at step {step} of {run.spec.steps} on {hardware}, {run.precision}, torch {torch.__version__}"
    )


def _warn_of_changes(folder: RunWriter, now: RunMetadata) -> None:
    """Warn of a run that continues on another device, processor, number of threads or PyTorch; rank 0 only."""
    if distributed.rank() > 0:
        return
    before = folder.metadata
    names = ["device", "torch"]
    if now.device.endswith("CPU"):
        names += ["cpu", "threads"]
    changes = [
        f"{name} was {getattr(before, name)} and is {getattr(now, name)}"
        for name in names
        if getattr(before, name) not in (None, "", getattr(now, name))
    ]
    if changes:
        folder.log(f"continues elsewhere: {'; '.join(changes)}")
        log.warning(
            "This run continues elsewhere: %s. It goes on, but its last digits will differ from those of a run that "
            "was not interrupted.",
            "; ".join(changes),
        )
