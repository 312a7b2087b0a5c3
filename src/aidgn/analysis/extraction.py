"""Compute the features of a trained run: find the run's images, compute, keep the result in the run's folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aidgn.analysis.features import Features
from aidgn.data.cache import prepare
from aidgn.data.loader import BatchStore, DeviceImageStore
from aidgn.devices import choose_device, single_thread
from aidgn.errors import AidgnError
from aidgn.inference import Model, load_model
from aidgn.inference.loading import find_preprocessing, precision_on
from aidgn.objective import class_vectors
from aidgn.runs.checkpoints import read_weights
from aidgn.runs.folder import RunFolder
from aidgn.runs.inputs import choose_custom_algorithm, find_dataset, open_run
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.options import HEAD
from aidgn.runs.run_id import identify_images
from aidgn.terminal import log
from aidgn.training.evaluation import compute_outputs, index_batches
from aidgn.training.featurizer import Featurizer
from aidgn.training.frozen import FeatureInput, FeatureStore, FrozenNetwork
from aidgn.training.setup import find_features, load_frozen_features, load_images

Progress = Callable[[str, int, int], None]  # part of the work, done, total


def extract_features(
    run: str | Path,
    *,
    data: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    algorithm: str | Sequence[str] | None = None,
    must_keep: bool = False,
    on_progress: Progress | None = None,
) -> Features:
    """Compute the features of RUN/model.safetensors for all images of all domains, as the run's evaluation does.

    The features are kept in RUN/features.npz and read from there as long as the model is the same.

    Args:
        run: Folder of a finished run.
        data: The data set's folder, if it is no longer where the training found it.
        data_dir: Folder in which data sets are looked for.
        device: "auto", "cpu", "cuda" or "cuda:N".
        algorithm: FILE.py:CLASS of a custom algorithm, or several of which one is the run's.
        must_keep: Raise an error if the features cannot be written to the run's folder.
        on_progress: Called with the part of the work, the number done and the total.
    """
    report = on_progress or (lambda *_: None)
    folder = open_run(run)
    digest = folder.model_digest
    if folder.features.exists():
        try:
            known = Features.load(folder.features)
            if known.model == digest:
                return known
        except AidgnError as error:
            log.warning("%s They are computed again.", error)
    images = open_images(folder.metadata, data=data, data_dir=data_dir, device=device, on_progress=report)
    custom = choose_custom_algorithm(folder.metadata, algorithm)
    batches: BatchStore = images
    if folder.identity.get("train_only") == HEAD:
        model, batches = open_head(folder, images, custom, report)
    else:
        model = load_model(folder.path, device, custom)
    features = _compute_all(model, batches, folder.identity, digest, report)
    try:
        features.save(folder.features)
    except AidgnError as error:  # somebody else's folder, or a full disk
        if must_keep:
            raise
        log.warning("%s The features are not kept.", error)
    return features


def _compute_all(model: Model, images: BatchStore, identity: dict[str, Any], digest: str, report: Progress) -> Features:
    dataset = images.decoded.dataset
    parts: list[np.ndarray] = []
    for number in range(len(dataset.domains)):
        parts += dataset.split(number, identity["trial"])
    validation = np.zeros(len(dataset), np.bool_)
    if not identity.get("train_on_all"):
        validation[np.concatenate(parts[1::2])] = True
    features = np.empty((0, 0), np.float32)
    logits = np.empty((len(dataset), len(dataset.classes)), np.float32)
    done = 0
    rows = index_batches(parts, model.network, images.device)
    # Training also computes such short passes on one thread.
    short_passes = dataset.small or isinstance(images, FeatureStore)
    with single_thread() if short_passes else nullcontext():
        for indices, z, batch_logits in compute_features(model, images, rows):
            if not features.size:
                features = np.empty((len(dataset), z.shape[1]), np.float32)
            features[indices] = z.cpu().numpy()
            logits[indices] = batch_logits.cpu().numpy()
            done += len(indices)
            report("computing features", done, len(dataset))
    vectors = class_vectors(model.network.classifier)
    return Features(
        features=features,
        logits=logits,
        labels=dataset.labels.astype(np.int64),
        domains=dataset.domain_of.astype(np.int64),
        validation=validation,
        files=list(dataset.files),
        class_names=list(dataset.classes),
        domain_names=list(dataset.domains),
        targets=list(identity["target"]),
        weight=None if vectors is None else np.ascontiguousarray(vectors.float().cpu().numpy()),
        kappa=getattr(model.network.classifier, "kappa", None),
        dataset=identity["dataset"],
        algorithm=identity["algorithm"],
        trial=identity["trial"],
        draw=identity["draw"],
        model=digest,
    )


@torch.no_grad()
def compute_features(
    model: Model, images: BatchStore, rows: Sequence[Tensor]
) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Yield each row of image indices with its features and logits, on the device in float32."""
    model.network.eval()
    _, transform = images.transforms(model.preprocessing.transform_settings())
    for row, (pixels, geometry, _) in zip(rows, images.batches(rows), strict=True):
        z, logits = compute_outputs(model.network, transform(pixels, geometry))
        yield row.numpy(), z.float(), logits.float()


def open_head(
    folder: RunFolder, images: DeviceImageStore, algorithm: str | None, report: Progress
) -> tuple[Model, FeatureStore]:
    """Load the classifier of a run on a frozen network, and the features of images that it was trained on.

    The network is not loaded again if the last run of this process had the same one.
    """
    metadata, device = folder.metadata, str(images.device)
    digest = read_weights(folder.model)[1].get("backbone")
    features = find_features(images, digest, precision_on(images.device, metadata), find_preprocessing(metadata))
    if features is not None:
        head = FeatureInput(features.features.shape[1])
        return load_model(folder.path, device, algorithm, featurizer=head), features
    model = load_model(folder.path, device, algorithm)
    featurizer = model.network.featurizer
    assert isinstance(featurizer, Featurizer)
    network = FrozenNetwork(featurizer.network, featurizer.runner.precision, model.preprocessing)
    model.network.featurizer = FeatureInput(network.num_features)
    return model, load_frozen_features(images, network, on_progress=partial(report, "computing features"))


# The run and its images -----------------------------------------------------------------------------------------------


def open_images(
    metadata: RunMetadata,
    *,
    data: str | Path | None,
    data_dir: str | Path | None,
    device: str,
    on_progress: Progress,
) -> DeviceImageStore:
    """Load the images that a run was trained on to the device; an error if the images have changed."""
    dataset = find_dataset(metadata, data, data_dir)
    decoded = prepare(
        dataset,
        skip_broken=bool(metadata.skipped),
        on_progress=lambda done, total: on_progress("decoding images", done, total),
    )
    if metadata.identity["data"] != identify_images(decoded.dataset.fingerprint, decoded.content):
        raise AidgnError(
            f"The images in {dataset.root or dataset.name} are not those that {metadata.path.parent} was trained on: "
            "files were added, removed or changed. Give the right folder with --data DIR."
        )
    return load_images(decoded, choose_device(device))
