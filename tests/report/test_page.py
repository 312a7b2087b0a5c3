"""The report's content, against numbers worked out here, on made-up runs over a small folder of images."""

import base64
import hashlib
import html
import io
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aidgn.analysis.diagnosis import diagnose
from aidgn.analysis.features import Features
from aidgn.analysis.summary import sentences
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.report import reproduce as rerun
from aidgn.report.latent_view import packed
from aidgn.report.page import as_json, write_report
from aidgn.report.paper import paper
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import read_runs
from aidgn.runs.run_id import sweep_key
from aidgn.sweeps.plan import SweepPlan
from aidgn.sweeps.plan_file import read_plans

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
DOMAINS, CLASSES = ["day", "dusk", "night"], ["cat & dog", "<b>bird</b>"]
STEPS = (2, 4)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three domains of two classes, 12 images of each; every image has a colour of its own."""
    for d, domain in enumerate(DOMAINS):
        for c, name in enumerate(CLASSES):
            folder = tmp_path / "photos" / domain / name.replace("/", "_")
            folder.mkdir(parents=True)
            for i in range(12):
                Image.new("RGB", (30, 20), (40 + 80 * d, 40 + 160 * c, 20 * i)).save(folder / f"{i:02}.png")
    return tmp_path / "photos"


def accuracy(algorithm: str, target: int, trial: int, step: int, domain: int) -> float:
    """Made up, and rising with the step on sources, so that the last step is selected."""
    if domain == target:
        return 0.5 + 0.1 * (algorithm == "AIDGN") * (1 - 2 * (trial == 1)) + 0.05 * target + 0.02 * trial
    return 0.7 + 0.05 * step


def make_run(
    sweep: Path,
    images: Path,
    algorithm: str,
    target: int,
    trial: int = 0,
    draw: int = 0,
    steps: tuple[int, ...] = STEPS,
    with_features: bool = True,
    **hyper_parameters: Any,
) -> Path:
    folder = sweep / f"photos-{algorithm}-{DOMAINS[target]}-trial{trial}-draw{draw}"
    folder.mkdir(parents=True)
    hparams = {"lr": 1e-3 * (1 + draw), "batch_size": 4, **hyper_parameters}
    args = {
        "dataset": "photos",
        "algorithm": algorithm,
        "test_envs": [target],
        "trial_seed": trial,
        "hparams_seed": draw,
        "seed": 0,
        "steps": STEPS[-1],
        "domains": DOMAINS,
        "backbone": "small",
    }
    with (folder / "results.jsonl").open("w") as file:
        for step in steps:
            values = {f"env{d}_out_acc": accuracy(algorithm, target, trial, step, d) for d in range(3)}
            values[f"env{target}_in_acc"] = accuracy(algorithm, target, trial, step, target)
            file.write(json.dumps({"step": step, "loss": 1 / step, **values, "args": args, "hparams": hparams}) + "\n")
    identity = {
        "dataset": "photos",
        "algorithm": algorithm,
        "target": [DOMAINS[target]],
        "trial": trial,
        "draw": draw,
        "hyper_parameters": hparams,
        "steps": STEPS[-1],
        "eval_every": 2,
        "image_size": 32,
        "backbone": "small",
        "weights": "none",
        "average": None,
        "precision": "float32",
        "data": "abc-def",
    }
    (folder / "run.json").write_text(
        json.dumps(
            {
                "identity": identity,
                "steps": STEPS[-1],
                "classes": CLASSES,
                "domains": DOMAINS,
                "image_size": 32,
                "skipped": [],
                "device": "x86_64 CPU",
                "aidgn": "0.0.1",
                "torch": "2.0",
                "python": "3.11",
                "root": str(images.resolve()),
            }
        )
    )
    if with_features:
        made_features(images, algorithm, target, trial).save(folder / "features.npz")
    return folder


def made_features(
    images: Path, algorithm: str, target: int, trial: int, class_names: list[str] | None = None
) -> Features:
    dataset, rng = load_dataset(images), np.random.default_rng(target)
    weight = rng.normal(size=(5, 2)).astype(np.float32)
    z = (weight.T[dataset.labels] * 3 + rng.normal(size=(len(dataset), 5))).astype(np.float32)
    outside = np.tile(np.arange(12) % 2 == 0, 6)
    return Features(
        z,
        z @ weight,
        dataset.labels,
        dataset.domain_of,
        outside,
        dataset.files,
        class_names or dataset.classes,
        dataset.domains,
        [DOMAINS[target]],
        weight,
        None,
        "photos",
        algorithm,
        trial,
        0,
        "0" * 64,
    )


def payload(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def numbers(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<u2").astype(float)


def report(tmp_path: Path, *folders: Path, **options: Any) -> Path:
    return write_report(folders, tmp_path / "out" / "page.html", points=50, permutations=19, **options)


def visible(page: Path) -> str:
    """The text of the page without scripts and styles."""
    text = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))


def test_json_in_a_script_cannot_end_it_and_comes_back() -> None:
    value = {HOSTILE: [1, None, True, "é\u2028"], "x": (np.float32(0.5), np.int64(3))}
    text = as_json(value)
    assert "<" not in text and ">" not in text and "\u2028" not in text
    assert json.loads(text) == {HOSTILE: [1, None, True, "é\u2028"], "x": [0.5, 3]}
    assert as_json([float("nan"), float("inf"), 1.5]) == "[null,null,1.5]"


def test_packed_numbers_come_back() -> None:
    values = np.array([0, 1, 1.4, 255, 256, 65535, 70000, -3])
    assert numbers(packed(values)).tolist() == [0, 1, 1, 255, 256, 65535, 65535, 0]


def test_tables_bars_answer_and_curves_say_what_the_records_say(tmp_path: Path, images: Path) -> None:
    sweep = tmp_path / "sweep"
    for algorithm in ("AIDGN", "ERM"):
        for target in range(3):
            for trial in (0, 1, 2):
                make_run(sweep, images, algorithm, target, trial, with_features=False)
    page = report(tmp_path, sweep)
    found, text = payload(page), visible(page)
    bars = {row["head"]: row["cells"] for row in found["bars"]["training"][0]["rows"]}
    assert [row["head"] for row in found["bars"]["training"][0]["rows"]] == ["ERM", "AIDGN"]
    for algorithm, cells in bars.items():
        table = np.array([[accuracy(algorithm, target, trial, 4, target) for trial in range(3)] for target in range(3)])
        for target in range(3):
            assert cells[target]["values"] == pytest.approx(100 * table[target])
            assert cells[target]["mean"] == pytest.approx(100 * table[target].mean())
            assert cells[target]["spread"] == pytest.approx(100 * table[target].std(ddof=1))
        assert cells[3]["values"] == pytest.approx(100 * table.mean(0))
        assert cells[3]["mean"] == pytest.approx(100 * table.mean())
    # AIDGN is +10, -10, +10 points from ERM in the three trials, on every target alike.
    assert re.search(r"AIDGN [^.]*60\.3 %.* three unseen domains .*three trials", text)
    assert re.search(r"3\.3 points ahead of ERM,[^.]* six of nine pairs", text)
    assert "no clear difference" in text
    run = next(run for run in found["runs"] if (run["algorithm"], run["targets"], run["trial"]) == ("ERM", [1], 2))
    assert run["steps"] == [2, 4] and run["terms"] == {"loss": [0.5, 0.25]}
    assert run["accuracies"]["env0_out_acc"] == pytest.approx([0.8, 0.9])
    assert run["selected"] == {"training": 4, "oracle": 4}
    assert found["search"] == [] and found["adaptation"] == []
    assert "Features need the weights" in text and "Reproduce" in text  # the latent space is not there, and why is said
    assert not list(page.parent.glob(".*")) and str(tmp_path) not in page.read_text()


def test_values_set_by_hand_distinguish_runs(tmp_path: Path, images: Path) -> None:
    for number, kappa in enumerate((30.0, 10.0)):
        folder = make_run(tmp_path / f"sweep{number}", images, "AIDGN", 0, with_features=False, kappa=kappa)
        if kappa == 10:  # better on images of the sources that were set aside, so it is the one selected
            text = (folder / "results.jsonl").read_text()
            (folder / "results.jsonl").write_text(re.sub(r'("env[12]_out_acc": 0\.)', r"\g<1>9", text))
    found = payload(report(tmp_path, tmp_path / "sweep0", tmp_path / "sweep1"))
    said = [(run["set"], run["selected"].get("training")) for run in found["runs"]]
    assert said == [("kappa 10", 4), ("kappa 30", None)]


def test_bars_equal_the_table(tmp_path: Path, images: Path) -> None:
    for target in (0, 1):
        folder = make_run(tmp_path / "sweep", images, "ERM", target, with_features=False)
        text = (folder / "results.jsonl").read_text()
        (folder / "results.jsonl").write_text(re.sub(rf'("env{target}_in_acc": )[\d.]+', r"\g<1>0.4125", text))
    final = make_run(tmp_path / "sweep", images, "ERM", 2, with_features=False)
    (final / "results.jsonl").write_text(
        (final / "results.jsonl").read_text().replace('"test_envs": [2]', '"test_envs": []')
    )
    page = report(tmp_path, tmp_path / "sweep")
    row = payload(page)["bars"]["training"][0]["rows"][0]
    assert row["cells"][0]["mean"] == pytest.approx(41.25) and row["cells"][0]["text"] == "41.2"
    assert (
        "in three domains: day, dusk and night. Trained on two of them, how many images of another domain"
        in visible(page)
    )


def test_a_tie_is_called_one(tmp_path: Path, images: Path) -> None:
    for algorithm in ("ERM", "CORAL"):  # whose made-up accuracies are the same
        for target, trial in product((0, 1), (0, 1)):
            make_run(tmp_path / "sweep", images, algorithm, target, trial, with_features=False)
    text = visible(report(tmp_path, tmp_path / "sweep"))
    assert re.search(r"level with CORAL,[^.]* none of four pairs", text)


def test_runs_that_differ_in_a_setting_are_told_apart(tmp_path: Path, images: Path) -> None:
    for place, size in (("sweep0", 32), ("sweep1", 64)):
        folder = make_run(tmp_path / place, images, "ERM", 0, with_features=False)
        about = json.loads((folder / "run.json").read_text())
        about["identity"]["image_size"] = size
        (folder / "run.json").write_text(json.dumps(about))
    page = report(tmp_path, tmp_path / "sweep0", tmp_path / "sweep1")
    assert {run["set"] for run in payload(page)["runs"]} == {"image_size 32", "image_size 64"}
    assert "The runs of photos differ in image_size: 32 (1 run); 64 (1 run)." in visible(page)


def test_rows_over_different_images_are_refused(tmp_path: Path, images: Path) -> None:
    for trial, data in enumerate(("abc-def", "abc-changed")):
        folder = make_run(tmp_path / "sweep", images, "ERM", 0, trial, with_features=False)
        about = json.loads((folder / "run.json").read_text())
        about["identity"]["data"] = data
        (folder / "run.json").write_text(json.dumps(about))
    text = visible(report(tmp_path, tmp_path / "sweep"))
    assert "different images of photos" in text and "No run is finished" not in text


def made_up(sweep: Path, images: Path, accuracies: dict[tuple[str, int, int], float]) -> dict[str, Any]:
    """A sweep of these accuracies by algorithm, target and trial; what its report says of them."""
    for (algorithm, target, trial), value in accuracies.items():
        folder = make_run(sweep, images, algorithm, target, trial, with_features=False)
        text = (folder / "results.jsonl").read_text()
        (folder / "results.jsonl").write_text(re.sub(rf'("env{target}_in_acc": )[\d.]+', rf"\g<1>{value}", text))
    page = report(sweep.parent, sweep)
    found, text = payload(page)["bars"]["training"][0]["rows"], page.read_text()
    return {
        "bars": {row["head"]: row["cells"][-1] for row in found},
        "text": visible(page),
        "answer": re.findall(r'class="answer"[^>]*>([^<]*)<', text)[0],
    }


def test_unequal_budgets_are_told_in_the_answer(tmp_path: Path, images: Path) -> None:
    for algorithm, draws in (("AIDGN", 1), ("ERM", 2)):
        for target, trial, draw in product(range(3), range(3), range(draws)):
            make_run(tmp_path / "sweep", images, algorithm, target, trial, draw, with_features=False)
    text = visible(report(tmp_path, tmp_path / "sweep"))
    assert re.search(r"not fair:[^.]* AIDGN [^.]* one run,[^.]* ERM from two", text)
    assert "By a paired test" not in text


def test_algorithms_are_compared_in_the_trials_that_both_have(tmp_path: Path, images: Path) -> None:
    erm = {("ERM", target, trial): 0.5 + 0.1 * trial for target in range(3) for trial in range(3)}
    coral = {("CORAL", target, 0): value for target, value in enumerate((0.4, 0.5, 0.45))}
    said = made_up(tmp_path / "one", images, erm | coral)["answer"]
    assert re.search(r"ERM [^.]*60\.0 %.* three unseen domains .*three trials", said)
    assert re.search(r"one trial that both have,[^.]* 5\.0 points ahead of CORAL,[^.]* two of three pairs", said)
    assert "One trial cannot tell a difference" in said
    coral = {("CORAL", target, trial): 0.55 for target in range(3) for trial in range(2)}
    said = made_up(tmp_path / "two", images, erm | coral)["answer"]
    assert re.search(r"two trials that both have,[^.]* level with CORAL,[^.]* ahead in three", said)
    coral = {("CORAL", target, 3): 0.9 for target in range(3)}
    said = made_up(tmp_path / "none", images, erm | coral)["answer"]
    assert re.search(r"CORAL [^.]*90\.0 %.* three unseen domains .*one trial", said)
    assert re.search(r"No trial has [^.]* CORAL and ERM,[^.]* no comparison", said)


def test_an_average_of_different_trials_says_so(tmp_path: Path, images: Path) -> None:
    missing_runs = {
        ("ERM", target, trial): 0.5 + 0.3 * trial for target, trial in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1))
    }
    found = made_up(tmp_path / "sweep", images, missing_runs)
    # The targets' means are 65, 50 and 65 %: 60 % on average. The one trial with all of them has 50 %.
    assert found["bars"]["ERM"]["mean"] == pytest.approx(60) and found["bars"]["ERM"]["values"] == []
    assert re.match(r"ERM [^.]*60\.0 %.* three unseen domains .*trials differ", found["answer"])
    assert "its number in brackets are of the trials that have every target: ERM." in found["text"]
    assert "photos lacks 1 finished runs: ERM, dusk, trial 1." in found["text"]


def test_the_latent_space_is_that_of_the_features(tmp_path: Path, images: Path) -> None:
    folder = make_run(tmp_path / "sweep", images, "ERM", 2)
    found = payload(report(tmp_path, folder))
    features = Features.load(folder / "features.npz")
    points, view = found["points"][0], found["views"][0]
    rows = [features.files.index(file) for file in points["files"]]
    assert len(rows) == 50 and points["of"] == 72 and rows == sorted(set(rows))
    assert numbers(points["labels"]).tolist() == features.labels[rows].tolist()
    assert numbers(points["domain"]).tolist() == features.domains[rows].tolist()
    assert numbers(view["outside"]).tolist() == features.validation[rows].tolist()
    assert numbers(view["predicted"]).tolist() == features.logits[rows].argmax(1).tolist()
    low, high = view["norm_range"]
    norms = [float(np.sqrt(sum(float(v) ** 2 for v in features.features[row]))) for row in rows]
    assert low + (high - low) * numbers(view["norms"]) / 65535 == pytest.approx(norms, abs=1e-3)
    for k, row in enumerate(rows):
        z, w = features.features[row].astype(float), features.weight[:, features.labels[row]].astype(float)
        angle = np.degrees(np.arccos(z @ w / np.sqrt((z @ z) * (w @ w))))
        assert numbers(view["angles"])[k] / 100 == pytest.approx(angle, abs=0.02)
        softmax = np.exp(features.logits[row].astype(float))
        assert numbers(view["confidence"])[k] / 1000 == pytest.approx((softmax / softmax.sum()).max(), abs=1e-3)
    unseen = features.domains == 2
    counts = [
        [int(((features.labels == i) & (features.logits.argmax(1) == j) & unseen).sum()) for j in range(2)]
        for i in range(2)
    ]
    assert view["confusion"] == counts
    assert view["accuracy"] == pytest.approx((counts[0][0] + counts[1][1]) / 24)
    position = numbers(view["xy"]).reshape(-1, 2)
    assert position.min() == 0 and position.max() == 65535 and len(np.unique(position, axis=0)) == 50
    assert set(view["verdicts"]) == {"angular invariance", "norm shift"} and len(view["sentences"]) > 3


def test_every_thumbnail_is_its_image(tmp_path: Path, images: Path) -> None:
    page = report(tmp_path, make_run(tmp_path / "sweep", images, "ERM", 0))
    points = payload(page)["points"][0]
    about, side = points["thumbnails"], points["thumbnails"]["side"]
    sheet = re.search(r'id="sheet-0">data:image/webp;base64,([^<]+)<', page.read_text())
    assert sheet is not None
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet[1]))).convert("RGB")).astype(float)
    for number, file in enumerate(points["files"]):
        top, left = number // about["row"] * side, number % about["row"] * side
        middle = pixels[top + side // 4 : top + 3 * side // 4, left + side // 4 : left + 3 * side // 4].mean((0, 1))
        with Image.open(images / file) as image:
            assert np.abs(middle - np.array(image.getpixel((5, 5)))).max() < 16


def test_page_has_no_picture_from_outside_the_data_set(tmp_path: Path, images: Path) -> None:
    Image.new("RGB", (30, 20), "red").save(tmp_path / "private.png")
    folder = make_run(tmp_path / "sweep", images, "ERM", 0)
    made = made_features(images, "ERM", 0, 0)  # as anybody may have written it
    replace(made, files=[*made.files[:-1], "../private.png"]).save(folder / "features.npz")
    page = write_report([folder], tmp_path / "page.html", points=len(made), permutations=19)
    assert payload(page)["points"][0]["thumbnails"] is None
    assert "No thumbnails of photos: photos has no image ../private.png." in visible(page)


def test_the_second_report_computes_nothing_anew(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "sweep", images, "ERM", 0)
    first = payload(report(tmp_path, folder))
    monkeypatch.setattr("aidgn.report.latent_view.tsne", lambda *_, **__: pytest.fail("t-SNE ran again"))
    assert payload(report(tmp_path, folder)) == first
    changed = made_features(images, "ERM", 1, 0)
    (folder / "embedding.npz").write_bytes(b"PK\x03\x04broken")
    monkeypatch.setattr("aidgn.report.latent_view.tsne", lambda values, seed: np.arange(2 * len(values)).reshape(-1, 2))
    changed.save(folder / "features.npz")
    assert payload(report(tmp_path, folder))["views"][0]["xy"] != first["views"][0]["xy"]


def test_the_diagnosis_is_that_of_the_run_where_it_has_one(tmp_path: Path, images: Path) -> None:
    folder = make_run(tmp_path / "sweep", images, "ERM", 0)
    said = payload(report(tmp_path, folder))["views"][0]["sentences"]
    kept = json.loads((folder / "diagnosis.json").read_text())
    assert kept["model"] == "0" * 64 and kept["permutations"] == 19
    assert any("calibration error" in sentence for sentence, *_ in said)
    (folder / "diagnosis.json").write_text(json.dumps({**kept, "permutations": 99}))  # as `aidgn diagnose` leaves it
    assert "Tests: 99 permutations" in payload(report(tmp_path, folder))["views"][0]["sentences"][-1][0]
    others: list[object] = [{**kept, "permutations": 18}, {**kept, "model": "1" * 64, "permutations": 99}, {}, []]
    others += [{**kept, key: [{"a": "x"}]} for key in ("domains", "sources", "norm", "angular", "class_names")]
    for other in others:
        (folder / "diagnosis.json").write_text(json.dumps(other))
        assert payload(report(tmp_path, folder))["views"][0]["sentences"] == said
        assert json.loads((folder / "diagnosis.json").read_text()) == kept


def test_a_kept_diagnosis_is_told_where_features_are_no_more(tmp_path: Path, images: Path) -> None:
    folder = make_run(tmp_path / "sweep", images, "ERM", 0, with_features=False)
    make_run(tmp_path / "sweep", images, "AIDGN", 0, with_features=False)
    assert "two assumptions" not in visible(report(tmp_path, tmp_path / "sweep"))
    found = diagnose(made_features(images, "ERM", 0, 0), permutations=99)
    found.save(folder / "diagnosis.json")
    text = visible(report(tmp_path, tmp_path / "sweep"))
    assert "From an earlier diagnosis of runs whose features are not here." in text
    assert text.count("ERM, day unseen") == 1 and "AIDGN, day unseen" not in text
    for sentence in map(str, sentences(found)):
        assert " ".join(sentence.split()) in text
    (folder / "diagnosis.json").write_text('{"dataset": 3}')
    assert "two assumptions" not in visible(report(tmp_path, tmp_path / "sweep"))


def test_names_of_users_stay_text(tmp_path: Path, images: Path) -> None:
    folder = make_run(tmp_path / "sweep", images, "ERM", 0)
    made_features(images, HOSTILE, 0, 0, [HOSTILE, "b"]).save(folder / "features.npz")
    lines = (folder / "results.jsonl").read_text().replace('"algorithm": "ERM"', f'"algorithm": {json.dumps(HOSTILE)}')
    (folder / "results.jsonl").write_text(lines)
    page = report(tmp_path, folder)
    text = page.read_text()
    assert HOSTILE in visible(page) and payload(page)["points"][0]["classes"][0] == HOSTILE
    assert "<script>alert" not in text and "<img" not in text
    # Even if one got through: the browser runs no script but ours.
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1])  # type: ignore[index]
    assert "default-src 'none'" in policy and re.search(r"script-src 'sha256-[^']+'(;|$)", policy)


def test_unfinished_runs_holes_and_missing_data_are_said(tmp_path: Path, images: Path) -> None:
    sweep = tmp_path / "sweep"
    make_run(sweep, images, "ERM", 0)
    make_run(sweep, images, "ERM", 1)
    make_run(sweep, images, "AIDGN", 0, with_features=False)
    make_run(sweep, images, "AIDGN", 1, steps=(2,))
    page = report(tmp_path, sweep)
    text = visible(page)
    assert "3 of 4 finished" in text and "1 unfinished run" in text
    assert "photos-AIDGN-dusk-trial0-draw0: step 2 of 4" in text
    assert re.search(r"AIDGN 60.0 X", text) and "night" not in payload(page)["bars"]["training"][0]["columns"]
    assert "is neither in photos-AIDGN-day-trial0-draw0." in text
    assert re.search(r"AIDGN lacks a result [^.]*no average", text)
    assert "photos lacks 1 finished runs: AIDGN, dusk, trial 0." in text
    assert [view["algorithm"] for view in payload(page)["views"]] == ["ERM", "ERM"]
    assert payload(page)["runs"][-1]["finished"] is False

    images.rename(tmp_path / "elsewhere")
    text = visible(report(tmp_path, sweep))
    assert "No thumbnails of photos" in text and "--data DIR" in text
    assert payload(report(tmp_path, sweep, data=tmp_path / "elsewhere"))["points"][0]["thumbnails"]["side"] == 32


def test_only_unfinished_runs_still_make_a_report(tmp_path: Path, images: Path) -> None:
    page = report(tmp_path, make_run(tmp_path / "sweep", images, "ERM", 0, steps=(2,), with_features=False))
    assert "No run is finished" in visible(page)
    assert payload(page)["runs"][0]["steps"] == [2] and payload(page)["bars"] == {}
    empty = tmp_path / "empty" / "run"
    empty.mkdir(parents=True)
    (empty / "run.json").write_text(json.dumps({"steps": 4}))
    with pytest.raises(AidgnError, match="no record yet"):
        report(tmp_path, empty)


def test_a_search_and_adaptation_show_where_they_were_made(tmp_path: Path, images: Path) -> None:
    sweep = tmp_path / "sweep"
    folders = [
        make_run(sweep, images, "ERM", target, draw=draw, with_features=False)
        for target in (0, 1, 2)
        for draw in (0, 1, 2)
    ]
    for folder in folders:
        args = json.loads((folder / "results.jsonl").read_text().splitlines()[0])["args"]
        line = {
            "dataset": "photos",
            "algorithm": "ERM",
            "target": [DOMAINS[args["test_envs"][0]]],
            "trial": 0,
            "draw": args["hparams_seed"],
            "settings": {},
            "source_accuracy": 0.9,
            "selected": True,
            "model": "x",
        }
        (folder / "adaptation.jsonl").write_text(
            "".join(
                json.dumps(line | {"method": method, "target_accuracy": 0.5 + gain + 0.1 * args["hparams_seed"]}) + "\n"
                for method, gain in (("none", 0.0), ("T3A", 0.05))
            )
        )
    page = report(tmp_path, sweep)
    found = payload(page)
    assert found["search"][0]["names"] == ["lr"] and len(found["search"][0]["runs"]) == 9
    target, trial, draw, validation, reached, rate = found["search"][0]["runs"][4]
    assert (target, trial, draw) == (1, 0, 1) and rate == 0.002
    assert validation == pytest.approx(0.9) and reached == pytest.approx(0.55)
    # Of equal draws the highest is selected, draw 2, whose accuracies are 70 and 75 %.
    rows = {row["head"]: [cell["mean"] for cell in row["cells"]] for row in found["adaptation"][0]["rows"]}
    assert rows == {"ERM": pytest.approx([70.0] * 4), "ERM + T3A": pytest.approx([75.0] * 4)}
    assert "Adaptation at test time" in visible(page)
    assert "aidgn adapt sweep --method t3a aidgn report sweep" in visible(page)
    (folders[2] / "adaptation.jsonl").write_text("{broken\n")
    assert "adaptation.jsonl cannot be read" in visible(report(tmp_path, sweep))


def test_adaptation_beside_the_papers_and_of_these_weights_only(tmp_path: Path) -> None:
    domains = ["art_painting", "cartoon", "photo", "sketch"]
    for target, domain in enumerate(domains):
        folder = tmp_path / "sweep" / domain
        folder.mkdir(parents=True)
        args = {
            "dataset": "PACS",
            "algorithm": "AIDGN",
            "test_envs": [target],
            "trial_seed": 0,
            "hparams_seed": 0,
            "domains": domains,
            "steps": 1,
        }
        values = {f"env{d}_{split}_acc": 0.9 for d in range(4) for split in ("in", "out")}
        (folder / "results.jsonl").write_text(json.dumps({"step": 1, **values, "args": args, "hparams": {}}) + "\n")
        (folder / "run.json").write_text(json.dumps({"domains": domains, "steps": 1}))
        (folder / "model.safetensors").write_bytes(b"x" if target else b"trained anew")
        line = {
            "dataset": "PACS",
            "algorithm": "AIDGN",
            "target": [domain],
            "trial": 0,
            "draw": 0,
            "settings": {},
            "source_accuracy": 0.9,
            "selected": True,
            "model": hashlib.sha256(b"x").hexdigest(),
        }
        (folder / "adaptation.jsonl").write_text(
            "".join(
                json.dumps(line | {"method": method, "target_accuracy": 0.875}) + "\n" for method in ("none", "T3A")
            )
        )
    page = report(tmp_path, tmp_path / "sweep")
    section = page.read_text().partition('id="adaptation"')[2].partition("</section>")[0]
    assert payload(page)["adaptation"][0]["rows"][1]["cells"][0] is None  # of other weights
    assert "art_painting was adapted with other weights than it has now" in visible(page)
    printed = paper()["tta_PACS"]["rows"]["+ T3A"]["P"]["mean"]
    assert section.count('<tr class="paper">') == 2 and f">{printed:.1f}<" in section
    assert 'class="paper"><span>' in section
    assert f"{87.5 - printed:+.1f}" in html.unescape(section).replace("−", "-")


def plans_of(lines: list[str], tmp_path: Path) -> dict[str, list[SweepPlan]]:
    """The plans that a script writes and sweeps, by the folder of the sweep."""
    script = "\n".join(line for line in lines if not line.startswith("aidgn report"))
    subprocess.run(["sh", "-e"], input=f"aidgn() {{ :; }}\n{script}", text=True, check=True, cwd=tmp_path)
    sweeps = [shlex.split(line) for line in lines if line.startswith("aidgn sweep ")]
    assert all(words[3] == "--out" for words in sweeps)
    return {place: read_plans(tmp_path / file)[0] for _, _, file, _, place in sweeps}


def test_the_plans_train_exactly_these_runs(tmp_path: Path, digits_run: Callable[..., Path]) -> None:
    runs = [
        digits_run(tmp_path / "runs", "ERM", target, trial=trial) for target in ("ink", "chalk") for trial in (0, 1)
    ]
    values = {"batch_size": 8, "lr": 1.23456789e-4}
    runs += [digits_run(tmp_path / "runs", "ERM", "ink", hyper_parameters=values, trial=trial) for trial in (0, 2)]
    runs.append(digits_run(tmp_path / "runs", "ERM", "ink", hyper_parameters=values, draw=3))
    runs.append(digits_run(tmp_path / "runs", "AIDGN", ("ink", "poster"), average="sma:2"))
    runs.append(digits_run(tmp_path / "runs", "AIDGN", ()))
    runs.append(digits_run(tmp_path / "runs", "CORAL", "chalk", schedule="cosine", warmup=1))
    lines = rerun.commands(read_runs(tmp_path / "runs").runs, "my runs")
    plans = plans_of(lines, tmp_path)
    assert list(plans) == ["my runs", "my runs-2"]  # a sweep has one schedule
    keys = [spec.key() for members in plans.values() for plan in members for spec in plan.expand()]
    assert sorted(keys) == sorted(sweep_key(RunFolder(run).identity) for run in runs)


@pytest.mark.parametrize("missing", [0, 1])
def test_runs_of_a_full_grid_are_not_listed_one_by_one(missing: int, tmp_path: Path, images: Path) -> None:
    places = [*product(("CORAL", "ERM"), range(3), range(2))][missing:]
    for algorithm, target, trial in places:
        make_run(tmp_path / "runs", images, algorithm, target, trial, with_features=False)
    (plans,) = plans_of(rerun.commands(read_runs(tmp_path / "runs").runs, "runs"), tmp_path).values()
    full = plans[-1]
    assert (full.targets, full.trials, full.draws, full.runs) == (("day", "dusk", "night"), 2, 1, ())
    assert full.algorithms == (("CORAL", "ERM") if not missing else ("ERM",))
    listed = [(0, 0, "dusk"), (0, 0, "night"), (1, 0, "day"), (1, 0, "dusk"), (1, 0, "night")]
    assert [plan.runs for plan in plans[:-1]] == [tuple(listed)] * missing


def test_commands_of_one_run_make_the_page_of_that_run(
    tmp_path: Path, digits_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = digits_run(tmp_path / "runs")
    renamed = run.rename(tmp_path / "runs" / "mine")
    for place, given in (
        (tmp_path, renamed),
        (tmp_path, Path("runs/mine")),
        (tmp_path, renamed / "results.jsonl"),
        (renamed, Path()),
    ):
        monkeypatch.chdir(place)
        options: Any = {"points": 50, "permutations": 19, "algorithm": "AIDGN"}  # no file, so no --algorithm
        text = write_report([given], tmp_path / "page.html", **options).read_text()
        text = text.partition('aria-label="Commands">')[2].partition("</pre>")[0]
        lines = html.unescape(re.sub(r"<[^>]*>", "", text)).splitlines()
        (plan,) = plans_of(lines, tmp_path)["runs"]
        assert [spec.key() for spec in plan.expand()] == [sweep_key(RunFolder(renamed).identity)]
        assert lines[-1] == f"aidgn report runs/{run.name} --points 50"


def test_commands_of_runs_in_several_folders(tmp_path: Path, images: Path) -> None:
    for place, algorithm in (("first", "ERM"), ("second", "AIDGN")):
        for target in range(3):
            make_run(tmp_path / place, images, algorithm, target, with_features=False)
    text = report(tmp_path, tmp_path / "first", tmp_path / "second").read_text()
    text = text.partition('aria-label="Commands">')[2].partition("</pre>")[0]
    lines = html.unescape(re.sub(r"<[^>]*>", "", text)).splitlines()
    plans = {place: plan.algorithms for place, (plan,) in plans_of(lines, tmp_path).items()}
    assert plans == {"first": ("ERM",), "second": ("AIDGN",)}
    assert lines[-1] == "aidgn report first second --points 50"


def test_a_plan_names_files_that_the_runs_needed(tmp_path: Path, images: Path) -> None:
    run = make_run(tmp_path / "runs", images, "ERM", 0, with_features=False)
    about = json.loads((run / "run.json").read_text())
    about["identity"] |= {"train_only": "last-stage", "weights": "r18-0123abcd", "source": "0" * 16}
    (run / "run.json").write_text(json.dumps({**about, "skipped": ["a.jpg"]}))
    note, *lines = rerun.commands(read_runs(tmp_path / "runs").runs, "runs")
    assert note == "# r18.safetensors: the initial weights, in a file whose sha256 begins with 0123abcd"
    (plan,) = plans_of(lines, tmp_path)["runs"]
    assert (plan.algorithms, plan.weights) == (("path/to/file.py:ERM",), "r18.safetensors")
    assert plan.train_only == "last-stage" and plan.skip_broken and plan.eval_every == 2


def test_an_own_algorithm_is_looked_into_where_it_is_given(
    tmp_path: Path, digits_run: Callable[..., Path], own: str
) -> None:
    run = digits_run(tmp_path / "runs", own)
    page = report(tmp_path, run)
    assert not payload(page)["views"] and "name its file with --algorithm" in visible(page)
    page = report(tmp_path, run, algorithm=own)
    assert [view["algorithm"] for view in payload(page)["views"]] == ["Mine"]


def test_several_own_algorithms_are_looked_into(tmp_path: Path, digits_run: Callable[..., Path], own: str) -> None:
    text = Path(own.rpartition(":")[0]).read_text()
    given = []
    for name in ("Mine", "Mine2", "Other"):
        (tmp_path / f"{name}.py").write_text(text.replace("class Mine", f"class {name}"))
        given.append(f"{tmp_path / name}.py:{name}")
        digits_run(tmp_path / "runs", given[-1], average="sma" if name == "Mine" else None)
    page = report(tmp_path, tmp_path / "runs", algorithm=[own, *given])
    assert [view["algorithm"] for view in payload(page)["views"]] == ["Mine+SMA", "Mine2", "Other"]
    assert visible(page).count("--algorithm path/to/file.py:Other") >= 1


def test_folders_of_domainbed(tmp_path: Path) -> None:
    folder = tmp_path / "domainbed" / "0a1b"
    folder.mkdir(parents=True)
    args = {"dataset": "PACS", "algorithm": "ERM", "test_envs": [3], "trial_seed": 0, "hparams_seed": 0}
    values = {f"env{d}_{split}_acc": 0.5 + 0.1 * d for d in range(4) for split in ("in", "out")}
    (folder / "results.jsonl").write_text(
        json.dumps({"step": 300, "loss": 1.0, **values, "args": args, "hparams": {"lr": 5e-5}}) + "\n"
    )
    page = report(tmp_path, tmp_path / "domainbed")
    text = visible(page)
    assert "ERM on PACS, sketch unseen" in text and "the commands that trained them are unknown" in text
    assert "80.0" in text and "Compare with the paper" in text
