"""The predictions of a trained run for images that it was not trained on, and the file that keeps them.

RUN/predictions.npz has a row for every image of the domains that the run never saw, and for every validation image of
the domains that it was trained on. The runs of a fit leave out each domain once, so together they have one prediction
of every image by a network that never saw its domain. The zip archive holds a CRC-32 of each array, and no objects.
"""

import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.analysis.extraction import extract_features
from aidgn.analysis.features import Features, check_numbers, read_npz, write_npz
from aidgn.errors import AidgnError
from aidgn.files import atomic_write
from aidgn.runs.inputs import open_run
from aidgn.trust import SCORES, sample_references, trust_scores

VERSION = 1
ARRAYS = ("labels", "domains", "unseen", "validation", "logits", "scores")  # with an entry per image


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a run for N images that it was not trained on."""

    files: list[str]  # paths relative to the data set's folder
    labels: np.ndarray  # true class of each image, int64 [N], index into `class_names`
    domains: np.ndarray  # domain (site) of each image, int64 [N], index into `domain_names`
    # Whether the run never saw the domain, bool [N]; the others are validation images of the sources
    unseen: np.ndarray
    validation: np.ndarray  # whether the image is in the validation fifth of its domain, bool [N]
    logits: np.ndarray  # float32 [N, C]
    scores: np.ndarray  # scores of `aidgn.trust.SCORES`, float64 [N, K]
    score_names: list[str]  # names of the K scores
    class_names: list[str]  # names of the C classes
    domain_names: list[str]  # names of all domains
    targets: list[str]  # domains that the run never saw
    algorithm: str  # label of the algorithm
    trial: int  # seed of the splits
    model: str  # sha256 of the weights file

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def predicted(self) -> np.ndarray:
        """The predicted class of each image, int64 [N]."""
        return self.logits.argmax(1)

    @property
    def right(self) -> np.ndarray:
        """Whether each prediction is right, bool [N]."""
        return self.predicted == self.labels

    def score(self, name: str) -> np.ndarray:
        """Return a score of each image; a higher one means more trust."""
        return self.scores[:, self.score_names.index(name)]

    def where(self, mask: np.ndarray) -> "Predictions":
        """Return the predictions for the images of a mask, bool [N]."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["files"] = [file for file, kept in zip(self.files, mask, strict=True) if kept]
        values |= {name: values[name][mask] for name in ARRAYS}
        return Predictions(**values)

    @property
    def out_of_site(self) -> "Predictions":
        """The predictions for images of the domains that the run never saw."""
        return self.where(self.unseen)

    @property
    def in_site(self) -> "Predictions":
        """The predictions for validation images of the domains that the run was trained on."""
        return self.where(~self.unseen)

    @classmethod
    def of(cls, features: Features) -> "Predictions":
        """Take the predictions from the features of a run."""
        shown = np.flatnonzero(features.unseen | features.validation)
        trained_on = features.features[~(features.unseen | features.validation)]
        scores = trust_scores(
            features.features[shown], features.logits[shown], features.weight, sample_references(trained_on)
        )
        return cls(
            files=[features.files[i] for i in shown],
            labels=features.labels[shown],
            domains=features.domains[shown],
            unseen=features.unseen[shown],
            validation=features.validation[shown],
            logits=features.logits[shown],
            scores=np.stack(list(scores.values()), axis=1),
            score_names=list(scores),
            class_names=features.class_names,
            domain_names=features.domain_names,
            targets=features.targets,
            algorithm=features.algorithm,
            trial=features.trial,
            model=features.model,
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        with atomic_write(path) as temporary:
            write_npz(temporary, {"version": VERSION, **values})

    @classmethod
    def load(cls, path: str | Path) -> "Predictions":
        """Read a file of `save`; an error if it is damaged."""
        try:
            values = read_npz(path, ARRAYS)
            if int(values.pop("version")) > VERSION:
                raise AidgnError(f"{path} was written by a later aidgn. Install a newer one, or remove the file.")
            predictions = cls(**values)
            predictions._check()
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise AidgnError(
                f"{path} cannot be used ({error}): it is damaged, or no file of predictions. Remove it; the command "
                "that wrote it then writes it again."
            ) from None
        return predictions

    def _check(self) -> None:
        """Raise ValueError if the arrays do not fit together."""
        columns = {"logits": (len(self.class_names),), "scores": (len(self.score_names),)}
        for name in ARRAYS:
            if getattr(self, name).shape != (len(self.files), *columns.get(name, ())):
                raise ValueError(f"{name} has the shape {getattr(self, name).shape}")
        if {*self.score_names} - {*SCORES}:
            raise ValueError("it has unknown scores")
        check_numbers(self.labels, self.class_names)
        check_numbers(self.domains, self.domain_names)


def load_predictions(run: str | Path, **options: Any) -> Predictions:
    """Read RUN/predictions.npz, or compute and write it if it is missing, damaged or of another model.

    Args:
        run: Folder of a finished run.
        options: Arguments of `extract_features`, in case predictions must be computed.
    """
    folder = open_run(run)
    if folder.predictions.exists():
        try:
            known = Predictions.load(folder.predictions)
            if known.model == folder.model_digest:
                return known
        except AidgnError:
            pass  # computed again below
    predictions = Predictions.of(extract_features(run, **options))
    predictions.save(folder.predictions)
    return predictions
