"""A model on labelled pictures of a new site, against scikit-learn; the names of classes; the promise."""

import csv
import html
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from scipy.special import softmax
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
    roc_auc_score,
)

from aidgn.cli.evaluate import evaluate as command
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.evaluation import Comparison, evaluate, find_labelled, make_bins
from aidgn.inference import Model, load_model
from aidgn.inference.export import export
from aidgn.new_site.confidence import DISTANCE, Confidence, Outputs, UnseenSite
from aidgn.new_site.expectations import Expectations, measure
from aidgn.new_site.interval import SiteAccuracies, percent
from aidgn.new_site.monitor import SiteReport
from aidgn.new_site.shift import SiteComparison
from aidgn.report.evaluation import write_evaluation
from aidgn.runs.checkpoints import write_values
from aidgn.runs.folder import RunFolder
from aidgn.trust import sample_references

DIGITS = load_dataset("digits")
CLASSES = [f"{number}" for number in range(10)]
TEMPERATURE = 2.0


def made_up(seed: int, count: int = 200) -> Outputs:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2, (count, 10))
    labels = np.array([random.choice(10, p=p) for p in softmax(logits, axis=1)])
    return Outputs(logits * TEMPERATURE, labels, {})


@pytest.fixture(scope="module")
def folder(digits_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with expectations as `fit` writes them."""
    run = digits_run(tmp_path_factory.mktemp("run"), steps=40, eval_every=20)
    expectations = measure(
        [UnseenSite(name, 0, made_up(i), made_up(9)) for i, name in enumerate("abc")], made_up(8), CLASSES
    )
    write_values(RunFolder(run).expectations, expectations.to_dict())
    return run


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, "cpu")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("new") / "chalk"
    for index in DIGITS.indices(DIGITS.find_domain("chalk"))[::6]:
        path = root / DIGITS.classes[DIGITS.labels[index]] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(DIGITS.pixels[index]).save(path)
    (root / "0" / "broken.png").write_bytes(b"no picture")
    return root


def test_figures_are_those_of_scikit_learn(model: Model, site: Path) -> None:
    pictures = find_labelled(site, model.classes)
    result = evaluate(model, pictures, "ours")
    readable = [i for i, file in enumerate(pictures.files) if "broken" not in file]
    prediction = model.predict([pictures.files[i] for i in readable])
    labels = pictures.labels[readable]
    predicted = prediction.probabilities.argmax(1)
    assert len(result.left_out) == 1 and result.images == len(readable) == 75
    assert result.scores.accuracy == pytest.approx((predicted == labels).mean())
    assert result.scores.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert result.scores.macro_f1 == pytest.approx(f1_score(labels, predicted, average="macro"))
    np.testing.assert_array_equal(result.confusion, confusion_matrix(labels, predicted, labels=range(10)))
    assert prediction.chances is not None
    assert result.auroc == pytest.approx(roc_auc_score(predicted == labels, prediction.chances))
    assert sum(entry.images for entry in result.bins) == 75
    values = json.loads(json.dumps(result.to_dict()))
    columns = precision_recall_fscore_support(labels, predicted, labels=range(10), zero_division=np.nan)
    for label, found in enumerate(values["classes"].values()):
        expected = [None if np.isnan(column[label]) else pytest.approx(column[label]) for column in columns]
        assert [found["precision"], found["accuracy"], found["f1"], found["images"]] == expected
    assert values["comparison"]["verdict"] in ("within", "below")


def test_probabilities_are_divided_by_the_temperature(model: Model, site: Path) -> None:
    assert model.temperature == pytest.approx(TEMPERATURE, rel=0.2)
    prediction = model.predict(find_labelled(site, model.classes).files[:5])
    expected = softmax(prediction.logits.numpy().astype(np.float64) / model.temperature, axis=1)
    np.testing.assert_allclose(prediction.probabilities, expected)
    np.testing.assert_allclose(prediction.chances, expected.max(axis=1))
    assert prediction.warnings is not None
    unsure = [warning is not None and "unsure" in warning for warning in prediction.warnings]
    np.testing.assert_array_equal(unsure, expected.max(axis=1) < 0.5)


def test_a_table_names_files_and_labels(model: Model, site: Path) -> None:
    in_folder = find_labelled(site, model.classes)
    table = site / "labels.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["label", "file"])
        rows.writerows(
            [CLASSES[label], str(Path(name).relative_to(site))]
            for name, label in zip(in_folder.files, in_folder.labels, strict=True)
        )
    found = find_labelled(table, model.classes)
    assert found.files == in_folder.files and found.name == "labels"
    np.testing.assert_array_equal(found.labels, in_folder.labels)
    table.write_text("file,name\na.png,1\n")
    with pytest.raises(AidgnError, match="no column label"):
        find_labelled(table, model.classes)
    table.unlink()


def test_class_names_must_be_those_of_the_model(tmp_path: Path) -> None:
    for name in ("big dog", "Cat"):
        (tmp_path / "site" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "site" / name / "1.png")
    assert find_labelled(tmp_path / "site", ["Big_Dog", "cat"]).labels.tolist() == [1, 0]
    with pytest.raises(AidgnError, match=r"Cat\. Did you mean cats\?.*The model's classes: bigdog, cats"):
        find_labelled(tmp_path / "site", ["bigdog", "cats"])
    with pytest.raises(AidgnError, match="one site, such as site"):
        find_labelled(tmp_path, ["Big_Dog", "cat"])
    with pytest.raises(AidgnError, match="does not exist"):
        find_labelled(tmp_path / "nowhere", ["cat"])


def test_verdicts_follow_the_chance() -> None:
    sites = SiteAccuracies({"a": [0.9], "b": [0.88], "c": [0.92], "d": [0.91]}, dict.fromkeys("abcd", 1000))
    assert Comparison.of(sites, 0.9, 500).verdict == "within"
    assert Comparison.of(sites, 0.6, 500).verdict == "below"
    assert Comparison.of(sites, 0.999, 5000).verdict == "above"
    assert Comparison.of(sites, 0.8, 5).verdict == "within"  # five pictures tell little
    assert Comparison.of(SiteAccuracies({"a": [0.9], "b": [0.8]}, {"a": 9, "b": 9}), 0.1, 500).verdict == "unknown"


def test_bins_are_those_of_a_loop() -> None:
    random = np.random.default_rng(0)
    confidences, right = random.uniform(0.1, 1, 300), random.random(300) < 0.5
    for entry, low in zip(make_bins(confidences, right), np.arange(1, 10) / 10, strict=True):
        inside = (confidences > low) & (confidences <= low + 0.1)
        assert entry.images == inside.sum()
        assert entry.accuracy == pytest.approx(right[inside].mean())


def test_command_prints_json_and_writes_a_page(folder: Path, site: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = [str(folder), str(folder), str(site), "--json", "--page", str(page), "--device", "cpu"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    first, second = json.loads(result.stdout)
    assert first == second and first["images"] == 75
    assert "<script" not in page.read_text() and f"{first['accuracy']:.1%} right" in page.read_text()


def test_export_keeps_the_calibration(folder: Path, model: Model, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    exported = export(folder, tmp_path / "export")
    session = onnxruntime.InferenceSession(str(tmp_path / "export" / "model.onnx"))
    logits, probabilities = session.run(None, {"images": DIGITS.pixels[:1]})
    np.testing.assert_allclose(probabilities, softmax(logits / model.temperature, axis=1), atol=1e-6)
    assert session.get_modelmeta().custom_metadata_map["temperature"] == str(model.temperature)
    assert load_model(tmp_path / "export" / "model.safetensors", "cpu").temperature == model.temperature
    card = exported.files[-1].read_text()
    assert f"softmax(logits / {model.temperature})" in card and "nine new sites in ten" in card


def test_distance_to_training_features_survives_export(folder: Path, model: Model, tmp_path: Path) -> None:
    assert isinstance(model.expectations, Expectations)
    pixels = list(DIGITS.pixels[::101])
    features = model.predict(pixels).features.double().numpy()
    references = sample_references(features[:4])
    confidence = Confidence(TEMPERATURE, DISTANCE, slope=2.0, intercept=0.5, mean=-0.4, deviation=0.2)
    expectations = replace(model.expectations, confidence=confidence, references=references)
    values = json.loads(json.dumps(expectations.to_dict()))
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    write_values(RunFolder(run).expectations, values)
    nearest = [
        min(math.acos(min(1, z @ r / np.linalg.norm(z) / np.linalg.norm(r))) for r in references) for z in features
    ]
    expected = [1 / (1 + math.exp(-(2 * (0.4 - angle) / 0.2 + 0.5))) for angle in nearest]
    exported = export(run, tmp_path / "export", onnx=False).files[0]
    for path in (run, exported):
        chances = load_model(path, "cpu").predict(pixels).chances
        assert chances is not None and chances[4:] == pytest.approx(expected[4:], rel=1e-3)
    for damage in (None, {"width": 7, "float16": values["references"]["float16"]}, {"width": 64, "float16": "?"}):
        with pytest.raises(AidgnError, match=r"expectations\.json"):
            Expectations.from_dict({**values, "references": damage})


def test_expectations_are_loaded_as_written(folder: Path, model: Model) -> None:
    values = json.loads(RunFolder(folder).expectations.read_text())
    values.pop("sha256")
    assert isinstance(model.expectations, Expectations) and model.expectations.to_dict() == values
    assert load_model(folder / "last.safetensors", "cpu").expectations is None


def test_what_a_reader_must_know_of_the_comparison(folder: Path, model: Model, site: Path, tmp_path: Path) -> None:
    """Classes without pictures, a promise that excludes nothing, and pictures that trained the model are named."""
    pictures = find_labelled(site, model.classes)
    whole = evaluate(model, pictures)
    some = site.parent / "some" / "chalk"
    for name in ("3", "7"):
        shutil.copytree(site / name, some / name)
    part = evaluate(model, find_labelled(some, model.classes))
    assert "no pictures of 0, 1, 2, 4, 5 and 3 more" in " ".join(part.sentences())
    assert "no pictures of" not in " ".join(whole.sentences())
    assert model.expectations is not None and part.promised_classes == {
        name: found.mean for name, found in model.expectations.classes.items()
    }
    shares = part.confusion.sum(axis=1) / part.images
    assert part.promised_here == pytest.approx(sum(shares * [part.promised_classes[name] for name in CLASSES]))
    assert part.promised_here is not None and f"would have been {percent(part.promised_here)}" in " ".join(
        part.sentences()
    )
    unknown = replace(part, promised_classes={"3": 0.5})
    assert unknown.promised_here is None and "for all 10 classes" in " ".join(unknown.sentences())
    skewed = replace(whole, promised_classes=dict.fromkeys(CLASSES, 0.1))
    assert skewed.promised_here == pytest.approx(0.1) and "other shares" in " ".join(skewed.sentences())
    assert whole.temperature == model.temperature and "without calibration" in " ".join(whole.sentences())
    assert "without calibration" not in " ".join(replace(whole, temperature=1.0).sentences())
    assert whole.warned is not None and f"{whole.warned:.1%} of the pictures" in " ".join(whole.sentences())

    sites = {"a": [0.2], "b": [0.6], "c": [0.95]}
    wide = Comparison.of(SiteAccuracies(sites, dict.fromkeys("abc", 100)), 0.4, 100)
    narrow = Comparison.of(SiteAccuracies({**sites, "a": [0.7], "b": [0.8]}, dict.fromkeys("abc", 100)), 0.8, 100)
    assert "hardly any" in str(wide) and "hardly any" not in str(narrow) and wide.verdict == "within"

    assert not model.training_folders and not whole.trained_on  # the digits are part of the package
    about = json.loads((folder / "run.json").read_text())
    moved = tmp_path / "run"
    shutil.copytree(folder, moved)
    root = {"root": str(site.parent), "domains": ["ink", "chalk", "poster", "outline"]}
    for target, expected in (([], len(pictures.files)), (["chalk"], 0)):
        identity = {**about["identity"], "target": target}
        (moved / "run.json").write_text(json.dumps({**about, **root, "identity": identity}))
        again = evaluate(load_model(moved, "cpu"), pictures)
        assert again.trained_on == expected
        assert ("was trained on" in " ".join(again.sentences())) == bool(expected)


def test_the_page_says_everything_once(folder: Path, model: Model, site: Path, tmp_path: Path) -> None:
    result = evaluate(model, find_labelled(site, model.classes))
    comparison = SiteComparison(75, 3.0, "a", 3.0, 1.2, 3, 0.001)
    alarm = SiteReport(75, comparison, 0.4, 0.4, "average confidence", 0.1, 0.7)
    assert alarm.alarm
    quiet = SiteReport(75, replace(comparison, matched=1.0), 0.4, 0.4, "average confidence", 0.1, 0.7)
    assert not quiet.alarm and str(quiet) != str(alarm)
    for report in (alarm, quiet):
        page = write_evaluation([replace(result, site_report=report)], tmp_path / "page.html").read_text()
        assert page.count(html.escape(str(report), quote=False)) == 1
    assert result.comparison is not None and result.comparison.interval is not None
    for low, heading in ((0.01, "promised 70%"), (0.5, "within the promise")):
        interval = replace(result.comparison.interval, low=low, high=0.99)
        comparison_with = replace(result.comparison, interval=interval, promised=0.7, verdict="within")
        changed = write_evaluation([replace(result, comparison=comparison_with)], tmp_path / "other.html").read_text()
        assert f"{result.scores.accuracy:.1%} right, {heading}</h1>" in changed
    assert page.count("<td>") == len(CLASSES) * 5 + 6 * 2  # classes, the surest pictures
