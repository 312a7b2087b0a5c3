"""The folder of a fit: `model`, summary.json for programs, REPORT.md for people, and the runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aidgn.data import Dataset
from aidgn.errors import AidgnError
from aidgn.escape import open_templates
from aidgn.files import link_or_copy, parse_json, write_text
from aidgn.fitting.pictures import DoubtfulPictures
from aidgn.fitting.plan import name_of
from aidgn.metrics import ClassMetrics
from aidgn.new_site.expectations import Expectations
from aidgn.report.export import write_rows
from aidgn.runs.checkpoints import write_values
from aidgn.runs.folder import RunFolder
from aidgn.runs.spec import RunSpec

if TYPE_CHECKING:
    from aidgn.fitting.result import FitResult


class FitFolder:
    """The folder of a fit.

    Args:
        path: The folder. It need not exist.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.model = self.path / "model"
        self.runs = self.path / "runs"
        self.report = self.path / "REPORT.md"
        self.summary = self.path / "summary.json"
        self.page = self.path / "report.html"
        self.doubtful = self.path / "doubtful.csv"
        self.copies = self.path / "copies.csv"
        self.out_of_site = self.path / "out_of_site.csv"

    def read_summary(self) -> dict[str, Any]:
        """Read summary.json of an earlier fit; {} if there is none."""
        try:
            summary = parse_json(self.summary.read_bytes())
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def check(self, dataset: Dataset) -> None:
        """Raise an error if the folder has a model of other images, whose folder has the same name."""
        earlier = self.read_summary()
        moved = earlier.get("root", dataset.location) != dataset.location
        if moved and (earlier.get("domains"), earlier.get("classes")) != (dataset.domains, dataset.classes):
            raise AidgnError(
                f"{self.path} holds a model of {earlier['root']}, a folder of other images. Choose another folder "
                "with --out."
            )

    def describe_replaced(self, final: RunSpec, dataset: Dataset) -> list[str]:
        """Say that this fit replaces the model of an earlier fit with other settings, if it does."""
        earlier = self.read_summary()
        facts = {**_describe_model(final), "images": dataset.count_images().tolist()}
        if not earlier or all(earlier.get(key) == value for key, value in facts.items()):
            return []
        images = np.sum(earlier.get("images", 0))
        return [
            f"The earlier model ({earlier.get('algorithm')}, {earlier.get('steps')} steps, {images} images) was "
            "replaced."
        ]

    def keep_model(self, run: str | Path, expectations: Expectations | None = None) -> None:
        """Link or copy the files of a run that prediction needs to `model`, and write what to expect of it."""
        folder = RunFolder(run)
        kept = RunFolder(self.model)
        kept.expectations.unlink(missing_ok=True)  # those of an earlier model
        for file in (folder.backbone, folder.model, folder.novelty, folder.metadata_file):
            if file.exists():
                link_or_copy(file, self.model / file.name)
            else:
                (self.model / file.name).unlink(missing_ok=True)  # the file of an earlier model
        if expectations:
            write_values(kept.expectations, expectations.to_dict())

    def write(
        self,
        dataset: Dataset,
        result: "FitResult",
        findings: Sequence[str],
        next_steps: Sequence[str],
        class_metrics: Mapping[str, ClassMetrics] | None = None,
        mistakes: Sequence[tuple[str, str, int, int]] = (),
    ) -> None:
        """Write summary.json, REPORT.md, and CSV files of doubtful pictures.

        Args:
            dataset: The images that could be read.
            result: The result of the fit.
            findings: Findings and plan, a sentence each.
            next_steps: What to do next, a sentence each.
            class_metrics: Metrics by class at all left-out sites together.
            mistakes: Most frequent confusions there: true class, predicted class, number of such pictures, number of
                pictures of the true class.
        """
        by_class = class_metrics or {}
        counts = dataset.count_images()
        summary = {
            "dataset": dataset.name,
            "root": dataset.location,
            "domains": dataset.domains,
            "classes": dataset.classes,
            "images": counts.tolist(),
            "estimates": [
                {
                    **asdict(estimate),
                    "mean": estimate.mean,
                    "spread": estimate.standard_deviation,
                    "worst": estimate.worst,
                }
                for estimate in result.estimates
            ],
            **_describe_model(result.final),
            "seen_domains": result.seen_accuracy,
            "model": self.model.name,
            "said": [*findings, *result.summary],
            "next_steps": list(next_steps),
            "new_site": describe_new_site(result.expectations) if result.expectations else None,
            "classes_at_new_sites": {name: asdict(metrics) for name, metrics in by_class.items()},
        }
        self._write_pictures(result.pictures)
        write_text(self.summary, json.dumps(summary, indent=1) + "\n")
        template = open_templates(Path(__file__).parent, markdown=True).get_template("report.md.j2")
        report = template.render(
            dataset=dataset,
            findings=findings,
            conclusions=result.summary,
            next_steps=next_steps,
            pictures=result.pictures,
            estimates=result.estimates,
            expectations=result.expectations,
            class_metrics=by_class,
            mistakes=mistakes,
            counts_by_class=list(zip(dataset.classes, counts.T.tolist(), strict=True)),
        )
        write_text(self.report, report + "\n")

    def _write_pictures(self, pictures: DoubtfulPictures) -> None:
        """Write CSV files of all predictions, doubtful labels and copies; remove the files of an earlier fit."""
        self.out_of_site.unlink(missing_ok=True)
        if pictures.out_of_site:
            write_rows(self.out_of_site, pictures.out_of_site.header, pictures.out_of_site.rows())
        for path, rows in ((self.doubtful, pictures.labels), (self.copies, pictures.copies)):
            path.unlink(missing_ok=True)
            if rows:
                cells = ([round(cell, 6) if isinstance(cell, float) else cell for cell in astuple(row)] for row in rows)
                write_rows(path, [field.name for field in fields(rows[0])], cells)


def describe_new_site(expectations: Expectations) -> dict[str, Any]:
    """Return the expectations for summary.json, without the features that pictures are compared with."""
    interval = expectations.accuracies.interval()
    values = {key: value for key, value in expectations.to_dict().items() if key not in ("reference", "references")}
    distances = expectations.reference.distances if expectations.reference else {}
    return {**values, "interval": None if interval is None else asdict(interval), "distances": dict(distances)}


def _describe_model(final: RunSpec) -> dict[str, Any]:
    return {
        "algorithm": name_of(final),
        "backbone": final.backbone,
        "image_size": final.image_size,
        "steps": final.steps,
        "train_only": final.train_only,
    }
