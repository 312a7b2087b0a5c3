"""The opening of fit's page: figures against naive counts, names as text, thumbnails."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from aidgn.analysis.label_errors import DoubtfulLabel
from aidgn.analysis.near_copies import NearCopy
from aidgn.analysis.predictions import Predictions
from aidgn.data import load_dataset
from aidgn.report.overview import SHOWN_LABELS, Overview, shade_rows

DIGITS = load_dataset("digits")


@pytest.fixture
def overview() -> Overview:
    rng = np.random.default_rng(0)
    runs = []
    for trial in (0, 1):
        for site, name in enumerate(DIGITS.domains):
            logits = rng.normal(size=(len(DIGITS), 10)).astype(np.float32)
            seen = DIGITS.domain_of == site
            validation = rng.random(len(DIGITS)) < 0.2
            scores = np.zeros((len(DIGITS), 0))
            runs.append(
                Predictions(
                    DIGITS.files, DIGITS.labels, DIGITS.domain_of, seen, validation, logits, scores, [],
                    DIGITS.classes, DIGITS.domains, [name], "ERM", trial, "",
                )
            )  # fmt: skip
    doubtful = [DoubtfulLabel(file, "ink", "0", "1", 0.1, 0.8) for file in DIGITS.files[:30]]
    copies = [NearCopy(DIGITS.files[0], DIGITS.files[500], 0.97)]
    return Overview(DIGITS, ["Expect <b>much</b>."], ["Do this."], None, runs, doubtful, copies)


def test_the_confusion_counts_unseen_pictures(overview: Overview) -> None:
    expected = np.zeros((10, 10), int)
    for run in overview.predictions[: len(DIGITS.domains)]:  # trial 0
        for i in range(len(run)):
            if run.unseen[i] and not run.validation[i]:
                expected[run.labels[i], run.logits[i].argmax()] += 1
    assert np.array_equal(overview.confusion, expected)
    name, other, count, total = overview.mistakes[0]
    wrong = expected - np.diag(np.diag(expected))
    assert count == wrong.max() == expected[int(name), int(other)] and total == expected[int(name)].sum()
    assert shade_rows(expected)[3][5] == (expected[3, 5], round(100 * expected[3, 5] / expected[3].sum()))


def test_heatmaps_are_shown_beside_their_pictures(overview: Overview) -> None:
    heat = {DIGITS.files[3]: Image.new("RGB", (300, 200), (10, 200, 30))}
    overview = replace(overview, heatmaps=heat)
    overview.load_thumbnails()
    image = Image.open(io.BytesIO(base64.b64decode(overview.heat[DIGITS.files[3]].partition("base64,")[2])))
    assert image.size == (112, 75) and overview.heat.keys() == heat.keys()


def test_thumbnails_are_the_pictures_shown(overview: Overview) -> None:
    overview.load_thumbnails()
    shown = {doubt.file for doubt in overview.shown_labels} | {DIGITS.files[0], DIGITS.files[500]}
    assert overview.thumbnails.keys() == shown and len(overview.shown_labels) == SHOWN_LABELS
    data = overview.thumbnails[DIGITS.files[500]].partition("base64,")[2]
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), int)
    assert DIGITS.pixels is not None
    assert np.abs(image - DIGITS.pixels[500].astype(int)).mean() < 20  # WebP at quality 80
