"""Collect the latent space of trained runs for the report page: points, thumbnails, norms, angles, confusions."""

import base64
import hashlib
import json
import os
import zipfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from threadpoolctl import threadpool_limits

from aidgn.analysis.diagnosis import Diagnosis, diagnose
from aidgn.analysis.embedding import choose_images, tsne
from aidgn.analysis.extraction import Progress, extract_features
from aidgn.analysis.features import Features
from aidgn.analysis.summary import sentences
from aidgn.data import Dataset
from aidgn.errors import AidgnError, some
from aidgn.files import atomic_write
from aidgn.metrics import count_confusions, list_mistakes
from aidgn.novelty import norms_and_angles
from aidgn.report.overview import read_picture, to_uri
from aidgn.runs.folder import RunFolder
from aidgn.runs.inputs import find_dataset

SHEET = 16  # thumbnails per row and column of a sheet; the browser decodes a sheet when one of them is shown
MAX_WORKERS = 4  # threads that embed and diagnose runs
SIDES = (80, 56, 40, 32)  # pixels of a thumbnail, by the number of data sets on the page
FULL_MATRIX = 20  # with more classes, the most frequent confusions are listed instead of the matrix
# Errors of a stored diagnosis that is missing, was edited, or comes from another version.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


@dataclass
class Latent:
    """The latent space as plain JSON for the page."""

    points: list[dict[str, Any]] = field(default_factory=list)  # images, shared by the views of a data set
    views: list[dict[str, Any]] = field(default_factory=list)  # one per run
    diagnoses: list[dict[str, Any]] = field(default_factory=list)  # stored diagnoses of runs without features
    sheets: list[str] = field(default_factory=list)  # thumbnails, data: URIs
    notes: list[str] = field(default_factory=list)  # which parts are missing, and why


def collect_views(
    folders: Sequence[Path],
    *,
    points: int,
    permutations: int = 999,
    on_progress: Progress | None = None,
    **extraction: Any,
) -> Latent:
    """Collect features, embedding and diagnosis of each run; leave a note for a run where that fails.

    The arguments are those of `write_report`.
    """
    report = on_progress or (lambda *_: None)
    latent = Latent()
    chosen: dict[str, tuple[int, Path, Features, np.ndarray]] = {}  # by data set: its number in `points` and images
    runs: list[RunFolder] = []
    absent: list[RunFolder] = []
    for run in map(RunFolder, folders):
        if run.model.exists() or run.features.exists():
            runs.append(run)
        else:
            absent.append(run)
    if absent:
        latent.notes.append(
            "Features need the weights of a trained model or stored features, and there is neither in "
            f"{some(run.path.name for run in absent)}."
        )
    for run in absent:
        with suppress(*UNREADABLE):
            known = Diagnosis.load(run.diagnosis)
            latent.diagnoses.append(
                {"dataset": known.dataset, "algorithm": known.algorithm, "targets": known.targets, **_words(known)}
            )
    # Most of the time is t-SNE, which runs on one thread and lets other threads run. Few runs are in memory at a time.
    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    pending: deque[Future[dict[str, Any]]] = deque()

    def report_views(taken: int, finished: int) -> None:
        report("analysing features", taken + finished, len(runs))

    report_views(0, 0)
    with threadpool_limits(1), ThreadPoolExecutor(workers) as pool:
        for run in runs:
            try:
                if run.model.exists():
                    features = extract_features(run.path, on_progress=report, **extraction)
                else:
                    features = Features.load(run.features)
            except AidgnError as error:
                latent.notes.append(_shorten_paths(run.path, error))
                continue
            key = hashlib.sha256(json.dumps([features.dataset, features.files]).encode()).hexdigest()
            if key not in chosen:
                images = choose_images(features.domains, features.labels, points)
                chosen[key] = len(latent.points), run.path, features, images
                latent.points.append(_describe_images(features, chosen[key][3]))
            points_index, _, _, indices = chosen[key]
            pending.append(
                pool.submit(_make_view, run.path, features, indices, points_index, permutations, latent.notes)
            )
            latent.views += _take_finished(pending, workers, partial(report_views, len(latent.views)))
        latent.views += _take_finished(pending, 0, partial(report_views, len(latent.views)))
    report("analysing features", len(runs), len(runs))
    for entry, (_, folder, features, indices) in zip(latent.points, chosen.values(), strict=True):
        try:
            places = extraction.get("data"), extraction.get("data_dir")
            dataset = find_dataset(RunFolder(folder).metadata, *places)
            side = min(SIDES[min(len(chosen), len(SIDES)) - 1], dataset.image_size)
            entry["thumbnails"] = {"first": len(latent.sheets), "row": SHEET, "side": side}
            latent.sheets += _thumbnails(dataset, [features.files[index] for index in indices], side, report)
        except AidgnError as error:
            entry["thumbnails"] = None
            latent.notes.append(f"No thumbnails of {features.dataset}: {error}")
    return latent


def _take_finished(
    pending: deque[Future[dict[str, Any]]], most: int, report: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Wait until at most `most` futures are unfinished, then take the finished ones from the front.

    Args:
        pending: The futures in order.
        most: Futures that may stay unfinished.
        report: Called with the number of finished ones.
    """
    while len(unfinished := [future for future in pending if not future.done()]) > most:
        wait(unfinished, return_when=FIRST_COMPLETED)
        report(sum(future.done() for future in pending))
    taken = []
    while pending and pending[0].done():
        taken.append(pending.popleft().result())
    return taken


def _shorten_paths(folder: Path, error: AidgnError) -> str:
    """Return the error without the folders above the run, because other people may read the page."""
    return f"{folder.name}: {str(error).replace(str(folder), folder.name)}"


def _describe_images(features: Features, indices: np.ndarray) -> dict[str, Any]:
    return {
        "dataset": features.dataset,
        "classes": features.class_names,
        "domains": features.domain_names,
        "of": len(features),
        "labels": packed(features.labels[indices]),
        "domain": packed(features.domains[indices]),
        "files": [features.files[i].encode("utf-8", "replace").decode() for i in indices],
        "thumbnails": None,
    }


def _make_view(
    folder: Path, features: Features, indices: np.ndarray, points: int, permutations: int, notes: list[str]
) -> dict[str, Any]:
    logits = features.logits.astype(np.float64)
    predicted = logits.argmax(1)
    shifted = logits[indices] - logits[indices].max(1, keepdims=True)
    confidence = 1 / np.exp(shifted).sum(1)  # the largest softmax probability
    norms = np.linalg.norm(features.features[indices], axis=1)
    low, high = float(norms.min()), float(norms.max())
    target = np.isin(features.domains, [features.domain_names.index(name) for name in features.targets])
    position = _embedding(folder, features, indices)
    spread = np.ptp(position, axis=0).max() or 1.0
    position = (position - position.min(0)) / spread + (1 - np.ptp(position, axis=0) / spread) / 2
    return {
        "points": points,
        "dataset": features.dataset,
        "algorithm": features.algorithm,
        "targets": features.targets,
        "trial": features.trial,
        "draw": features.draw,
        "accuracy": float((predicted == features.labels)[target].mean()) if target.any() else None,
        "xy": packed(position * 65535),
        "predicted": packed(predicted[indices]),
        "confidence": packed(confidence * 1000),
        "outside": packed(features.validation[indices]),
        "norms": packed((norms - low) / ((high - low) or 1) * 65535),
        "norm_range": [low, high],
        "angles": _angles(features, indices),
        **_confusions(features, predicted, target),
        **_diagnosis(folder, features, permutations, notes),
    }


def _angles(features: Features, indices: np.ndarray) -> str | None:
    """Measure the angle between a feature and the classifier's direction of its class, in hundredths of a degree."""
    if features.weight is None:
        return None
    _, angles = norms_and_angles(features.features[indices], features.labels[indices], features.weight)
    return packed(np.degrees(angles.numpy()) * 100)


def _confusions(features: Features, predicted: np.ndarray, target: np.ndarray) -> dict[str, Any]:
    """Count the target's images by true and predicted class; list the most frequent mistakes if classes are many."""
    number = len(features.class_names)
    counts = count_confusions(features.labels[target], predicted[target], number)
    if number <= FULL_MATRIX:
        return {"confusion": counts.tolist() if target.any() else None, "mistakes": None}
    return {"confusion": None, "mistakes": list_mistakes(counts, 15)}


def _embedding(folder: Path, features: Features, indices: np.ndarray) -> np.ndarray:
    """Compute t-SNE [n, 2] of the images, or read the result of an earlier report from the run's folder."""
    stored = RunFolder(folder).embedding
    key = hashlib.sha256(features.model.encode() + indices.astype("<i8").tobytes()).hexdigest()
    try:
        with np.load(stored, allow_pickle=False) as file:
            if str(file["key"]) == key and file["position"].shape == (len(indices), 2):
                return file["position"].astype(np.float64)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # missing or damaged
    position = np.asarray(tsne(features.features[indices], seed=0), dtype=np.float64)
    with suppress(AidgnError), atomic_write(stored) as temporary, temporary.open("wb") as file:  # may be read-only
        np.savez(file, key=np.array(key), position=position.astype(np.float32))
    return position


def _words(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return both verdicts of a diagnosis and its sentences, the main ones first."""
    return {"verdicts": diagnosis.verdicts, "sentences": sentences(diagnosis)}


def _diagnosis(folder: Path, features: Features, permutations: int, notes: list[str]) -> dict[str, Any]:
    """Describe the stored diagnosis of this model if it has enough permutations; otherwise compute and store one."""
    path = RunFolder(folder).diagnosis
    with suppress(*UNREADABLE):
        known = Diagnosis.load(path)
        if known.model == features.model and known.permutations >= permutations:
            return _words(known)
    try:
        diagnosis = diagnose(features, permutations=permutations)
    except AidgnError as error:
        notes.append(f"No diagnosis: {_shorten_paths(folder, error)}")
        return {"verdicts": {}, "sentences": []}
    with suppress(AidgnError):  # the folder may be read-only
        diagnosis.save(path)
    return _words(diagnosis)


def _thumbnails(dataset: Dataset, files: Sequence[str], side: int, report: Progress) -> list[str]:
    """Return sheets of thumbnails of images, as data: URIs."""
    numbers = {name: number for number, name in enumerate(dataset.files)}
    sheets = []
    for start in range(0, len(files), SHEET * SHEET):
        part = files[start : start + SHEET * SHEET]
        sheet = Image.new("RGB", (SHEET * side, -(-len(part) // SHEET) * side), "white")
        for place, file in enumerate(part):
            report("making thumbnails", start + place, len(files))
            if file not in numbers:  # the file of features may come from others: never open a path from it
                raise AidgnError(f"{dataset.name} has no image {file}.")
            image = read_picture(dataset, numbers[file], side)
            fitted = image if image.size == (side, side) else ImageOps.fit(image, (side, side))
            sheet.paste(fitted, (place % SHEET * side, place // SHEET * side))
        sheets.append(to_uri(sheet, 90 if side < min(SIDES) else 60))
    report("making thumbnails", len(files), len(files))
    return sheets


def packed(values: np.ndarray) -> str:
    """Encode numbers from 0 to 65535 as base64 of little-endian uint16."""
    rounded = np.clip(np.round(np.asarray(values, dtype=np.float64)), 0, 65535)
    return base64.b64encode(rounded.astype("<u2").tobytes()).decode()
