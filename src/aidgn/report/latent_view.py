"""The latent space of trained runs for the report page: points, thumbnails, norms and angles, confusions, diagnosis."""

import base64
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from aidgn.analysis.diagnosis import Diagnosis, diagnose
from aidgn.analysis.embedding import subsample, tsne
from aidgn.analysis.extraction import extract_features
from aidgn.analysis.features import Features
from aidgn.analysis.summary import sentences
from aidgn.data.images import read_image
from aidgn.errors import AidgnError, some
from aidgn.files import atomic_write
from aidgn.runs.folder import RunFolder
from aidgn.runs.inputs import find_dataset

SHEET = 16  # thumbnails per row and column of a sheet, which is decoded when one of them is looked at
SIDES = (80, 56, 40, 32)  # of a thumbnail, by the number of data sets in the page
FULL_MATRIX = 20  # classes that a confusion matrix is drawn for; of more, the most frequent confusions are listed
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # no diagnosis yet, or of another version
Progress = Callable[[str, int, int], None]  # what is done, how many, of how many


@dataclass
class Latent:
    """What the page shows of the latent space; all of it plain JSON."""

    points: list[dict[str, Any]] = field(default_factory=list)  # images, shared by the views of a data set
    views: list[dict[str, Any]] = field(default_factory=list)  # one per run
    told: list[dict[str, Any]] = field(default_factory=list)  # diagnoses that were kept of runs without features
    sheets: list[str] = field(default_factory=list)  # thumbnails, data: URIs
    notes: list[str] = field(default_factory=list)  # what could not be shown, and why


def look_inside(
    folders: Sequence[Path],
    *,
    data: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    algorithm: str | Sequence[str] | None = None,
    points: int = 2000,
    permutations: int = 999,
    on_progress: Progress | None = None,
) -> Latent:
    """Features, embedding and diagnosis of each run; a run for which that is impossible leaves a note."""
    report = on_progress or (lambda *_: None)
    latent = Latent()
    chosen: dict[str, tuple[int, np.ndarray]] = {}  # by the data set's images: number in `points`, which of them
    drawn: list[tuple[Path, Features]] = []  # a run and its images, per entry of `points`
    absent = [
        folder for folder in folders if not RunFolder(folder).model.exists() and not RunFolder(folder).features.exists()
    ]
    if absent:
        latent.notes.append(
            "Features need the weights of a trained model or features that were kept, and there "
            f"is neither in {some(folder.name for folder in absent)}."
        )
    for folder in absent:
        with suppress(*UNREADABLE):
            found = Diagnosis.load(RunFolder(folder).diagnosis)
            latent.told.append(
                {"dataset": found.dataset, "algorithm": found.algorithm, "targets": found.targets, **_words(found)}
            )
    folders = [folder for folder in folders if folder not in absent]
    for number, folder in enumerate(folders):
        report("looking inside", number, len(folders))
        try:
            features = _features(folder, data, data_dir, device, algorithm, report)
        except AidgnError as error:
            latent.notes.append(_brief(folder, error))
            continue
        key = hashlib.sha256(json.dumps([features.dataset, features.files]).encode()).hexdigest()
        if key not in chosen:
            chosen[key] = len(latent.points), np.sort(subsample(features, points, 0))
            drawn.append((folder, features))
            latent.points.append(_images(features, chosen[key][1]))
        which, indices = chosen[key]
        latent.views.append(_view(folder, features, indices, permutations, latent.notes) | {"points": which})
    report("looking inside", len(folders), len(folders))
    side = SIDES[min(len(drawn), len(SIDES)) - 1] if drawn else 0
    for entry, (_, indices), (folder, features) in zip(latent.points, chosen.values(), drawn, strict=True):
        try:
            entry["thumbnails"] = _thumbnails(folder, features, indices, side, data, data_dir, latent.sheets, report)
        except AidgnError as error:
            latent.notes.append(f"No thumbnails of {features.dataset}: {error}")
    return latent


def _brief(folder: Path, error: AidgnError) -> str:
    """The error without the folders above the run: the page goes to other people."""
    return f"{folder.name}: {str(error).replace(str(folder), folder.name)}"


def _features(
    folder: Path,
    data: str | Path | None,
    data_dir: str | Path | None,
    device: str,
    algorithm: str | Sequence[str] | None,
    report: Progress,
) -> Features:
    """The features of a run; those that are kept will do where its weights are no more."""
    run = RunFolder(folder)
    if not run.model.exists() and run.features.exists():
        return Features.load(run.features)
    return extract_features(
        folder, data=data, data_dir=data_dir, device=device, algorithm=algorithm, on_progress=report
    )


def _images(features: Features, indices: np.ndarray) -> dict[str, Any]:
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


def _view(folder: Path, features: Features, indices: np.ndarray, permutations: int, notes: list[str]) -> dict[str, Any]:
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
    """Hundredths of a degree between a feature and the classifier's direction of its class."""
    if features.weight is None:
        return None
    z, own = features.features[indices].astype(np.float64), features.weight.T[features.labels[indices]]
    cosine = (z * own).sum(1) / np.maximum(np.linalg.norm(z, axis=1) * np.linalg.norm(own, axis=1), 1e-12)
    return packed(np.degrees(np.arccos(np.clip(cosine, -1, 1))) * 100)


def _confusions(features: Features, predicted: np.ndarray, target: np.ndarray) -> dict[str, Any]:
    """Counts [true][predicted] of the target's images, or the most frequent mistakes where there are many classes."""
    number = len(features.class_names)
    counts = np.zeros((number, number), dtype=np.int64)
    np.add.at(counts, (features.labels[target], predicted[target]), 1)
    if number <= FULL_MATRIX:
        return {"confusion": counts.tolist() if target.any() else None, "mistakes": None}
    wrong = counts * (1 - np.eye(number, dtype=np.int64))
    order = np.argsort(-wrong, axis=None, kind="stable")[:15]
    pairs = [
        (int(i), int(j), int(wrong[i, j]), int(counts[i].sum()))
        for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True)
        if wrong[i, j]
    ]
    return {"confusion": None, "mistakes": pairs}


def _embedding(folder: Path, features: Features, indices: np.ndarray) -> np.ndarray:
    """t-SNE [n, 2] of the drawn images, kept beside the run so that the next report need not wait for it."""
    kept = folder / "embedding.npz"
    key = hashlib.sha256(features.model.encode() + indices.astype("<i8").tobytes()).hexdigest()
    try:
        with np.load(kept, allow_pickle=False) as file:
            if str(file["key"]) == key and file["position"].shape == (len(indices), 2):
                return file["position"].astype(np.float64)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # none yet, of other images, or damaged
    position = np.asarray(tsne(features.features[indices], seed=0), dtype=np.float64)
    try:
        with atomic_write(kept) as temporary, temporary.open("wb") as file:
            np.savez(file, key=np.array(key), position=position.astype(np.float32))
    except AidgnError:
        pass  # a folder of someone else's: it is computed again next time
    return position


def _diagnosis(folder: Path, features: Features, permutations: int, notes: list[str]) -> dict[str, Any]:
    try:
        found = _diagnosed(RunFolder(folder).diagnosis, features, permutations)
    except AidgnError as error:
        notes.append(f"No diagnosis: {_brief(folder, error)}")
        return {"verdicts": {}, "sentences": []}
    return _words(found)


def _words(diagnosis: Diagnosis) -> dict[str, Any]:
    """Both verdicts, and the sentences of a diagnosis: the main ones first."""
    return {"verdicts": diagnosis.verdicts, "sentences": sentences(diagnosis)}


def _diagnosed(kept: Path, features: Features, permutations: int) -> Diagnosis:
    """The diagnosis of this model that `aidgn diagnose` or an earlier report left, if it rests on permutations enough;
    else a new one, which is left for the next."""
    try:
        known = Diagnosis.load(kept)
        if known.model == features.model and known.permutations >= permutations:
            return known
    except UNREADABLE:
        pass
    found = diagnose(features, permutations=permutations)
    with suppress(AidgnError):  # a folder of someone else's
        found.save(kept)
    return found


# Thumbnails -----------------------------------------------------------------------------------------------------------


def _thumbnails(
    folder: Path,
    features: Features,
    indices: np.ndarray,
    side: int,
    data: str | Path | None,
    data_dir: str | Path | None,
    sheets: list[str],
    report: Progress,
) -> dict[str, Any]:
    """Add sheets of thumbnails of the images; how large they are, how many there are to a row, and the first sheet."""
    dataset = find_dataset(RunFolder(folder).metadata, data, data_dir)
    numbers = {name: number for number, name in enumerate(dataset.files)}
    side, first = min(side, dataset.image_size), len(sheets)
    for start in range(0, len(indices), SHEET * SHEET):
        part = indices[start : start + SHEET * SHEET]
        sheet = Image.new("RGB", (SHEET * side, -(-len(part) // SHEET) * side), "white")
        for place, index in enumerate(part):
            report("making thumbnails", start + place, len(indices))
            file = features.files[index]
            if file not in numbers:  # the file of features may be anybody's: no other picture goes into the page
                raise AidgnError(f"{dataset.name} has no image {file}.")
            image = (
                read_image(Path(str(dataset.root), file), at_least=side)[0]
                if dataset.pixels is None
                else Image.fromarray(dataset.pixels[numbers[file]])
            )
            fitted = image if image.size == (side, side) else ImageOps.fit(image, (side, side))
            sheet.paste(fitted, (place % SHEET * side, place // SHEET * side))
        buffer = io.BytesIO()
        sheet.save(buffer, "WEBP", quality=90 if side < min(SIDES) else 60, method=4)
        sheets.append("data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode())
    report("making thumbnails", len(indices), len(indices))
    return {"first": first, "row": SHEET, "side": side}


def packed(values: np.ndarray) -> str:
    """Numbers from 0 to 65535 as base64 of little-endian uint16."""
    return base64.b64encode(
        np.clip(np.round(np.asarray(values, dtype=np.float64)), 0, 65535).astype("<u2").tobytes()
    ).decode()
