"""The result of `fit`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from aidgn.algorithms.custom import is_custom
from aidgn.analysis.predictions import Predictions
from aidgn.errors import AidgnError
from aidgn.fitting.estimate import Estimate
from aidgn.fitting.pictures import DoubtfulPictures
from aidgn.fitting.plan import name_of
from aidgn.fitting.store import FitFolder
from aidgn.inference import Model, load_model
from aidgn.new_site.expectations import Expectations
from aidgn.report.export import write_rows
from aidgn.results import html_table
from aidgn.runs.spec import RunSpec


@dataclass(frozen=True)
class FitResult:
    """A model for unseen domains, and how accurate it will be there.

    Args:
        folder: Folder with `model`, `REPORT.md`, `summary.json` and the runs.
        estimates: Accuracies on unseen domains of the algorithm and of ERM; none if there is only one domain.
        seen_accuracy: Accuracy of the model on validation images of the domains it has seen.
        findings: Facts about the images, a sentence each.
        summary: What to expect of the model, a sentence each.
        final: The run that made the model.
        predictions: Predictions of the runs of the final model's algorithm for images they were not trained on, one
            entry for each run; `out_of_site` selects the images of domains that a run never saw.
        page: The report page, if there is one.
        expectations: What to expect at a new site, with an interval; None with fewer than two domains.
        pictures: Pictures whose label looks wrong, and copies across domains.
    """

    folder: Path
    estimates: Sequence[Estimate]
    seen_accuracy: float
    findings: Sequence[str]
    summary: Sequence[str]
    final: RunSpec
    predictions: Sequence[Predictions] = ()
    page: Path | None = None
    expectations: Expectations | None = None
    pictures: DoubtfulPictures = field(default_factory=DoubtfulPictures)

    @property
    def expected(self) -> Estimate | None:
        """The estimate of the final model's algorithm: `expected.mean` is the accuracy to expect on an unseen domain.

        None if there is only one domain.
        """
        return next((estimate for estimate in self.estimates if estimate.algorithm == name_of(self.final)), None)

    @property
    def report(self) -> Path:
        """REPORT.md: findings, estimates and counts of images."""
        return FitFolder(self.folder).report

    @property
    def model_folder(self) -> Path:
        return FitFolder(self.folder).model

    @cached_property
    def model(self) -> Model:
        """The model, loaded on first use."""
        return load_model(
            self.model_folder, algorithm=self.final.algorithm if is_custom(self.final.algorithm) else None
        )

    def save_predictions(self, path: str | Path) -> None:
        """Write a row for each picture with the prediction of a run that never saw its site, as CSV or .parquet.

        The columns are file, site, label, predicted, confidence, and p_CLASS for each class.
        """
        if self.pictures.out_of_site is None:
            raise AidgnError("There are no out-of-site predictions: they need two domains or more.")
        write_rows(path, self.pictures.out_of_site.header, self.pictures.out_of_site.rows())

    @property
    def predict_command(self) -> str:
        """The command that classifies new images."""
        command = f"aidgn predict {shlex.quote(str(self.model_folder))} NEW_PICTURES/"
        if is_custom(self.final.algorithm):
            command += f" --algorithm {shlex.quote(self.final.algorithm)}"
        return command

    def __repr__(self) -> str:
        return "\n".join([f"<Model in {self.model_folder}>", *self.summary])

    def _repr_html_(self) -> str:
        domains = list(self.estimates[0].accuracies) if self.estimates else []
        rows = [
            (estimate.algorithm, *(f"{estimate.accuracies[name]:.1%}" for name in domains), f"{estimate.mean:.1%}")
            for estimate in self.estimates
        ]
        return html_table(" ".join(self.summary), ("Unseen domain", *domains, "Mean"), rows)
