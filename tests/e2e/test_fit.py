"""aidgn fit, as a person types it: whole, interrupted, continued; its model predicts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def pictures(root: Path) -> Path:
    """Two classes, dark and light, in three domains of different colour; some files that real folders have."""
    random = np.random.default_rng(0)
    for tint, domain in enumerate(("hall a", "yard", "shop")):
        for level, name in ((70, "dark"), (180, "light")):
            (root / domain / name).mkdir(parents=True)
            for number in range(10):
                noise = random.normal(level, 20, (28, 28, 3)) + 40 * np.eye(3)[tint]
                Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(root / domain / name / f"{number}.png")
    (root / "yard" / "dark" / "zero.png").touch()
    (root / "yard" / "Thumbs.db").touch()
    (root / "shop" / "light" / "again.png").write_bytes((root / "yard" / "light" / "0.png").read_bytes())
    return root


def start(place: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "aidgn", *arguments],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


FIT = (
    "fit",
    "pictures",
    "--steps",
    "30",
    "--batch-size",
    "8",
    "--out",
    "out",
    "--set",
    "lr=0.002",
    "--workers",
    "1",
    "--device",
    "cpu",
)


def test_interrupted_continued_and_used(tmp_path: Path) -> None:
    pictures(tmp_path / "pictures")
    first = start(tmp_path, *FIT, "--no-report")
    for _ in range(6000):
        if list((tmp_path / "out").glob("runs/*/results.jsonl")) or first.poll() is not None:
            break
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    out, error = first.communicate(timeout=600)
    assert first.returncode == 130 and "the same command continues" in error and "Traceback" not in error, error
    assert "Use it:" not in out and not (tmp_path / "out" / "model").exists()
    begun = {path.parent.name for path in tmp_path.glob("out/runs/*/run.json")}
    assert begun

    page = tmp_path / "out" / "report.html"
    page.write_text("of an earlier fit")
    again = start(tmp_path, *FIT, "--no-report")
    out, error = again.communicate(timeout=600)
    assert again.returncode == 0, error
    assert not page.exists()
    lines = out.splitlines()
    assert len(lines) <= 16
    assert lines[0] == (
        "pictures: 61 images, 3 domains (hall a 20, shop 21, yard 20), 2 classes of 30 to 31 images (dark, light)."
    )
    for words in (
        "1 file left out, unreadable: yard/dark/zero.png is empty (0 bytes).",
        "1 image in several domains",
        "1 other file ignored",
        "AIDGN and ERM with each of 3 domains unseen once",
        "7 runs of 30 steps, small (from scratch) at 28 pixels",
        "on an unseen domain with",
        "standard deviation between domains",
        ", worst ",
        "The final model uses",
        "at nine new sites in ten between",
        "The surest 80 % of the pictures of a new site: expect",
        "On the domains it has seen: ",
        "Use it: aidgn predict out/model NEW_PICTURES/",
    ):
        assert words in out, out
    assert len(list(tmp_path.glob("out/runs/*/last.safetensors"))) == 7
    assert begun <= {path.parent.name for path in tmp_path.glob("out/runs/*/run.json")}

    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    chosen = next(each for each in summary["estimates"] if each["algorithm"] == summary["algorithm"])
    # The estimate is that of the records, at the step that validation on the seen domains selects.
    for target, domain in enumerate(("hall a", "shop", "yard")):
        path = next(tmp_path.glob(f"out/runs/*-{summary['algorithm']}-{domain.replace(' ', '_')}-*/results.jsonl"))
        records = [json.loads(line) for line in path.read_text().splitlines()]
        best = max(records, key=lambda record: np.mean([record[f"env{d}_out_acc"] for d in range(3) if d != target]))
        assert chosen["accuracies"][domain] == best[f"env{target}_in_acc"]
    assert chosen["mean"] == pytest.approx(np.mean(list(chosen["accuracies"].values())))
    assert f"mean {chosen['mean']:.1%} over 3 domains" in out
    assert "7 runs of 30 steps, small (from scratch)" in (tmp_path / "out" / "REPORT.md").read_text()

    assert summary["new_site"]["interval"]["sites"] == 3
    assert set(summary["new_site"]["results"]) == {"hall a", "shop", "yard"}
    found = start(tmp_path, "predict", "out/model", "pictures", "--csv", "-", "--device", "cpu")
    rows, error = found.communicate(timeout=600)
    assert found.returncode == 0 and "61 images classified, 1 left out" in error
    assert rows.startswith("file,label,probability,warning,chance\n") and "the training sites" in error
    right = [row.split(",")[1] == row.split(",")[0].split("/")[2] for row in rows.splitlines()[1:]]
    assert np.mean(right) > 0.8


@pytest.mark.slow
def test_with_the_report_page(tmp_path: Path) -> None:
    pictures(tmp_path / "pictures")
    start(tmp_path, *FIT, "--no-report", "--steps", "7").communicate(timeout=900)  # another fit, in the same place
    whole = start(tmp_path, *FIT)
    out, error = whole.communicate(timeout=900)
    assert whole.returncode == 0 and "The report page was not made" not in error, error
    assert "out/REPORT.md and out/report.html" in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "1 other file ignored" in page.partition('id="result"')[0]  # with what else was found in the pictures
    assert "<html" in page[:500] and "differ in steps" not in page
