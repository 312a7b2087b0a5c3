"""The report of real runs, made by the command and opened from disk in a real Chromium."""

import html
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aidgn.analysis.embedding import choose_images
from aidgn.analysis.features import Features
from aidgn.data import DATASETS, load_dataset
from aidgn.report.page import write_report
from aidgn.selection import load_records, select
from aidgn.training import RunSpec, train

WIDTHS = (360, 768, 1440)
# Both algorithms on two targets; chalk has one trial only, and AIDGN on ink a second draw.
RUNS = [
    (algorithm, target, trial, draw)
    for algorithm in ("ERM", "AIDGN")
    for target, trial, draw in (("ink", 0, 0), ("ink", 1, 0), ("chalk", 0, 0))
] + [("AIDGN", "ink", 0, 1)]


def aidgn(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [sys.executable, "-m", "aidgn", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven short runs, one of them unfinished, with the report of them written by the command."""
    folder = tmp_path_factory.mktemp("work") / "my sweep"
    for algorithm, target, trial, draw in RUNS:
        train(
            RunSpec("digits", algorithm, target, trial, draw, {"batch_size": 16}, steps=6, eval_every=3),
            folder,
            device="cpu",
        )
    unfinished = folder / "digits-ERM-chalk-trial1"
    shutil.copytree(run_folder(folder, "ERM", "chalk"), unfinished)
    lines = [json.loads(line) for line in (unfinished / "results.jsonl").read_text().splitlines()[:1]]
    lines[0]["args"]["trial_seed"] = 1
    (unfinished / "results.jsonl").write_text(json.dumps(lines[0]) + "\n")
    about = json.loads((unfinished / "run.json").read_text())
    about["identity"]["trial"] = 1
    (unfinished / "run.json").write_text(json.dumps(about))
    for name in ("model.safetensors", "last.safetensors"):
        (unfinished / name).unlink()
    said = aidgn("report", "my sweep", "--points", "200", cwd=folder.parent).stdout
    assert "my sweep/report.html" in said
    return folder


def run_folder(sweep: Path, algorithm: str, target: str) -> Path:
    return next(sweep.glob(f"digits-{algorithm}-{target}-trial0-draw0-*"))


class Opened:
    """A page opened from disk, with all that it asked for and complained of."""

    def __init__(self, browser: Any, path: Path, width: int = 1440, scheme: str = "light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        began = time.perf_counter()
        self.page.goto(path.resolve().as_uri())
        self.page.wait_for_selector("#curve-charts svg, #curve-charts p")
        self.seconds = time.perf_counter() - began

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *error: object) -> None:
        assert not self.complaints
        assert all(url.startswith(("file:", "data:")) for url in self.requests), self.requests
        assert len([url for url in self.requests if url.startswith("file:")]) == 1
        self.context.close()

    def checked(self, legend: str) -> str:
        return (
            self.page.locator("fieldset", has=self.page.locator("legend", has_text=legend))
            .first.locator("label:has(input:checked)")
            .inner_text()
        )

    def choose(self, section: str, legend: str, label: str) -> None:
        group = self.page.locator(f"#{section} fieldset", has=self.page.locator("legend", has_text=legend)).first
        group.get_by_label(label, exact=True).check()


def test_opens_alone_and_quickly_and_says_what_is_there(sweep: Path, browser: Any) -> None:
    with Opened(browser, sweep / "report.html") as opened:
        text = opened.page.locator("main").inner_text()
        assert "ERM and AIDGN" in opened.page.title()
        assert "1 unfinished run" in text and "7 of 8 finished" in text
        rows = {
            (row["algorithm"], row["target"], row["trial"]): row["accuracy"]
            for row in select(
                [
                    record
                    for record in load_records(sweep)
                    if not (record["args"]["trial_seed"] == 1 and record["args"]["test_envs"] == [1])
                ]
            )
        }
        ink = 100 * np.mean([rows["ERM", 0, trial] for trial in (0, 1)])
        assert f"{ink:.1f}" in opened.page.locator("#result table:visible tbody").first.inner_text()
        assert "(2)" in text and "(1)" in text  # cells of different numbers of trials say so
        assert "outline" not in opened.page.locator("#result table:visible").inner_text()  # which no run held out
        assert opened.seconds < 2 * (3 if os.getloadavg()[0] > 1.5 else 1)


def test_tables_sort(sweep: Path, browser: Any) -> None:
    with Opened(browser, sweep / "report.html") as opened:
        table = opened.page.locator("#result table:visible")
        button = table.get_by_role("button", name="Sort by ink")

        def order() -> list[tuple[str, float]]:
            return [
                (row.locator("th").inner_text(), float(row.locator("td").first.get_attribute("data-value")))
                for row in table.locator("tbody tr.ours").all()
            ]

        button.click()
        falling = order()
        assert [value for _, value in falling] == sorted((value for _, value in falling), reverse=True)
        assert table.locator("th[aria-sort=descending]").count() == 1
        button.press("Enter")
        assert order() == falling[::-1]
        table.get_by_role("button", name="Sort by Algorithm").click()
        assert [name for name, _ in order()] == ["AIDGN", "ERM"]


def test_switches_switch(sweep: Path, browser: Any) -> None:
    with Opened(browser, sweep / "report.html") as opened:
        page = opened.page
        assert "training-domain validation" in page.locator("#result caption:visible").inner_text()
        page.get_by_role("radio", name="Oracle").check()
        assert "oracle" in page.locator("#result caption:visible").inner_text()

        pictures = set()
        for colour in ("Domain", "Class", "Right or wrong", "Norm"):
            opened.choose("latent", "Coloured by", colour)
            pictures.add(page.locator("#spaces canvas").first.evaluate("canvas => canvas.toDataURL()"))
        assert len(pictures) == 4
        opened.choose("latent", "Coloured by", "Class")
        before = page.locator("#spaces canvas").first.evaluate("canvas => canvas.toDataURL()")
        page.locator("#legend button").nth(3).click()
        assert page.locator("#legend button[aria-pressed=true]").inner_text() == "3"
        assert page.locator("#spaces canvas").first.evaluate("canvas => canvas.toDataURL()") != before

        assert page.locator(".space strong").all_inner_texts() == ["ERM", "AIDGN"]
        opened.choose("latent", "Unseen domain", "chalk")
        assert opened.checked("Unseen domain") == "ink"  # of the training curves, which are their own
        assert all("of chalk right" in text for text in page.locator(".space header span").all_inner_texts())
        assert all("chalk unseen" in text for text in page.locator(".diagnosis:visible h3").all_inner_texts())

        curve = page.locator("#curve-charts path").first.get_attribute("d")
        opened.choose("curves", "Algorithm", "ERM")
        assert page.locator("#curve-charts path").first.get_attribute("d") != curve
        assert page.locator("#search .panel").count() > 0  # AIDGN has two draws

        dark = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(dark)
        for name in ("Light", "Dark", "Auto"):
            page.locator("#theme").click()
            assert page.locator("#theme").inner_text() == name
            assert (page.evaluate(dark) == light) == (name != "Dark")


def test_hover_shows_the_image_its_class_domain_and_prediction(sweep: Path, browser: Any) -> None:
    run = run_folder(sweep, "AIDGN", "ink")
    features = Features.load(run / "features.npz", run)
    pixels = load_dataset("digits").pixels
    assert pixels is not None
    with Opened(browser, sweep / "report.html") as opened:
        page = opened.page
        canvas = page.locator("#spaces canvas").nth(1)
        canvas.scroll_into_view_if_needed()
        drawn = choose_images(features.domains, features.labels, 200, 0)
        for number in (0, 77, 199):
            box = canvas.bounding_box()
            x, y = canvas.evaluate("(canvas, i) => place(canvas, i)", number)
            nearest = canvas.evaluate(
                "(canvas, [x, y]) => nearest(canvas, {clientX: x, clientY: y})", [box["x"] + x, box["y"] + y]
            )  # another may lie on the very spot
            shown = drawn[nearest]
            page.mouse.move(box["x"] + x, box["y"] + y)
            tip = page.locator("#tip")
            assert tip.is_visible()
            assert tip.locator(".is-class").inner_text() == features.class_names[features.labels[shown]]
            domain = features.domain_names[features.domains[shown]]
            assert tip.locator(".is-domain").inner_text().split(",")[0] == domain
            predicted = features.class_names[features.logits[shown].argmax()]
            assert tip.locator(".is-prediction").inner_text().split()[0] == predicted
            page.wait_for_timeout(100)
            thumb = Image.open(io.BytesIO(tip.locator(".thumb").screenshot())).convert("L")
            seen = np.asarray(thumb.resize((28, 28), Image.Resampling.BOX), dtype=float).ravel()
            true = np.asarray(Image.fromarray(pixels[shown]).convert("L"), dtype=float).ravel()
            assert np.corrcoef(seen, true)[0, 1] > 0.85
        page.mouse.move(2, 2)
        assert not page.locator("#tip").is_visible()
        canvas.focus()
        page.keyboard.press("ArrowRight")
        first = page.locator("#tip").inner_text()
        page.keyboard.press("ArrowRight")
        assert page.locator("#tip").is_visible() and page.locator("#tip").inner_text() != first
        page.keyboard.press("Escape")
        assert not page.locator("#tip").is_visible()


def test_a_tap_shows_it_too_until_the_next_elsewhere(sweep: Path, browser: Any) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto((sweep / "report.html").as_uri())
    tip = page.locator("#tip")
    for where, says in (("canvas", "Predicted"), ("#curve-charts svg", "Step")):
        page.locator(where).first.scroll_into_view_if_needed()
        page.wait_for_timeout(100)  # scrolling hides what is shown
        box = page.locator(where).first.bounding_box()
        spots = product(np.linspace(0.1, 0.9, 9), repeat=2)  # the latent space has gaps
        while not tip.is_visible():
            x, y = next(spots)
            page.touchscreen.tap(box["x"] + x * box["width"], box["y"] + y * box["height"])
        assert says in tip.inner_text()
        page.locator("h2:visible").first.dispatch_event("pointerdown", {"bubbles": True})
        assert not tip.is_visible()
    context.close()


def hint(table: Any) -> bool:
    """Whether there is something in the top right corner of a table: the arrow that says it goes on."""
    corner = np.asarray(Image.open(io.BytesIO(table.screenshot())).convert("L"))[8:26, -15:-4].astype(int)
    return bool(np.ptp(corner) > 60)


OVERLAPS = """() => {
  const shown = [...document.querySelectorAll('main h1, main h2, main h3, main p, .facts div, fieldset, .pick, .check,'
    + ' .scroll, .panel, .card, .legend button, canvas, pre, .rows div, .bar nav, #theme, .key, caption, summary')]
    .filter(element => element.checkVisibility() && !element.closest('.skip'));
  const texts = [...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('text')]);
  const found = [];
  const compare = (a, b) => {
    if (a.contains(b) || b.contains(a)) return;
    const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const tall = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (wide > 1 && tall > 1) found.push([a.textContent.slice(0, 40), b.textContent.slice(0, 40)]);
  };
  const bar = element => element.closest('.bar') !== null;
  shown.forEach((a, i) => shown.slice(i + 1).forEach(b => { if (bar(a) === bar(b)) compare(a, b); }));
  texts.forEach(own => own.forEach((a, i) => own.slice(i + 1).forEach(b => compare(a, b))));
  const outside = [...document.querySelectorAll('main *')].filter(element => element.checkVisibility()
    && !element.closest('.scroll, .matrix-holder') && element.getBoundingClientRect().right > innerWidth + 1);
  return {found, outside: outside.map(element => element.outerHTML.slice(0, 80)),
          scrolls: document.documentElement.scrollWidth > innerWidth};
}"""
CONTRAST = """() => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const linear = c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const bright = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const tone = getComputedStyle(e).backgroundColor;
      if (tone.startsWith('rgb(')) return parts(tone);
    }
    return [255, 255, 255];
  };
  const texts = document.querySelectorAll('main p, main th, main .mean, main .spread, main dt, main dd, main h2,'
    + ' main li, main label span, main summary, .bar a, button, .verdict');
  return [...texts].filter(element => element.checkVisibility()).map(element => {
    const a = bright(parts(getComputedStyle(element).color)), b = bright(behind(element));
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), element.textContent.slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_or_scrolls_sideways(sweep: Path, browser: Any, width: int, scheme: str) -> None:
    with Opened(browser, sweep / "report.html", width, scheme) as opened:
        page = opened.page
        assert page.evaluate(OVERLAPS) == {"found": [], "outside": [], "scrolls": False}
        assert page.evaluate(CONTRAST) == []
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")


def test_prints_light_and_whole(sweep: Path, browser: Any) -> None:
    with Opened(browser, sweep / "report.html", 700, "dark") as opened:
        page = opened.page
        page.emulate_media(media="print")
        page.wait_for_timeout(200)
        assert not page.locator(".bar").is_visible() and not page.locator(".controls").first.is_visible()
        assert page.locator(".diagnosis:visible").count() == 4  # both algorithms, both targets
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 30, 35)"
        assert page.evaluate(OVERLAPS) == {"found": [], "outside": [], "scrolls": False}
        assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("width", WIDTHS)
def test_ticks_differ_and_print_names_the_run(tmp_path: Path, browser: Any, width: int) -> None:
    for draw in (0, 1):
        (tmp_path / str(draw)).mkdir()
        args = {"dataset": "PACS", "algorithm": "ERM", "test_envs": [3], "trial_seed": 1, "hparams_seed": draw}
        lines = [
            {
                "step": 300 * i,
                "loss": 12.001 + 1e-4 * i,
                "far": 54321 + 150 * i,
                "small": 3e-4 + 1e-9 * i,
                **{f"env{d}_{split}_acc": 0.98 + 0.001 * i for d in range(4) for split in ("in", "out")},
                "args": args,
                "hparams": {"lr": 0.5 + 1e-4 * draw},
            }
            for i in range(9)
        ]
        (tmp_path / str(draw) / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report([tmp_path], tmp_path / "report.html")
    with Opened(browser, page, width) as opened:
        for panel in opened.page.locator("#curve-charts .chart, #search-charts .panel").all():
            for side in ("end", "middle"):  # of the axes
                labels = panel.locator(f"svg text[text-anchor={side}]").all_text_contents()
                assert len(set(labels)) == len(labels), (panel.inner_text(), labels)
            assert len(panel.locator("svg text").all()) > 5
        accuracy = opened.page.locator("#curve-charts .chart").first.inner_text()
        assert "92.5 %" in accuracy and "12.0012" in opened.page.locator("#curve-charts").inner_text()
        assert opened.page.evaluate(OVERLAPS) == {"found": [], "outside": [], "scrolls": False}
        opened.page.emulate_media(media="print")
        opened.page.wait_for_timeout(200)
        heads = opened.page.locator("#curve-charts > h3:visible, #search-charts > div > h3:visible").all_inner_texts()
        assert "ERM on PACS, sketch unseen, trial 1" in heads and "ERM on PACS, accuracy on the unseen domain" in heads


def test_average_over_different_trials_has_no_dots(tmp_path: Path, browser: Any) -> None:
    for algorithm, target, trial in [*product(("ERM", "CORAL"), range(4), (0, 1))][:-1]:  # CORAL lacks a run
        folder = tmp_path / f"{algorithm}{target}{trial}"
        folder.mkdir()
        args = {
            "dataset": "PACS",
            "algorithm": algorithm,
            "test_envs": [target],
            "trial_seed": trial,
            "hparams_seed": 0,
        }
        values = {f"env{d}_{split}_acc": 0.5 + 0.1 * trial for d in range(4) for split in ("in", "out")}
        (folder / "results.jsonl").write_text(json.dumps({"step": 1, **values, "args": args, "hparams": {}}) + "\n")
    with Opened(browser, write_report([tmp_path], tmp_path / "report.html")) as opened:
        *domains, average = opened.page.locator("#bars .panel").all()
        assert [panel.locator("circle").count() for panel in (*domains, average)] == [4, 4, 4, 3, 2]
        assert "No dots where domains have different trials." in average.inner_text()
        assert not any("No dots" in panel.inner_text() for panel in domains)


def test_page_without_scripts(sweep: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((sweep / "report.html").as_uri())
    assert page.locator(".notice", has_text="need JavaScript").is_visible()
    assert page.locator("table.results:visible").count() == 2  # by validation and by the oracle
    assert page.locator(".diagnosis:visible").count() == 4 and page.locator("#commands").is_visible()
    heads = page.locator("main h2:visible").all_inner_texts()
    assert heads == ["Result", "Do the two assumptions hold?", "Reproduce"]
    context.close()


def test_the_commands_in_the_page_are_those_of_the_runs(sweep: Path) -> None:
    text = (sweep / "report.html").read_text().partition('aria-label="Commands">')[2].partition("</pre>")[0]
    *script, last = html.unescape(re.sub(r"<[^>]*>", "", text)).splitlines()
    assert last == "aidgn report 'my sweep' --points 200"
    # The plans are of the runs that are there, hash for hash, and of no others.
    subprocess.run(["sh", "-e"], input="\n".join(["aidgn() { :; }", *script]), text=True, check=True, cwd=sweep.parent)
    found = []
    for command in [shlex.split(line) for line in script if line.startswith("aidgn sweep ")]:
        result = aidgn(*command[1:-1], str(sweep), "--dry-run", cwd=sweep.parent)
        found.append([int(number) for number in re.findall(r"(\d+) (?:finished|to do)", result.stdout + result.stderr)])
    assert np.sum(found, axis=0).tolist() == [len(RUNS), 1]


def test_names_with_markup_many_classes_and_leave_one_out(tmp_path: Path, browser: Any) -> None:
    """Two algorithms, one of a hostile name, on three domains and 23 classes, with the runs that have two targets."""
    hostile, rng = "</script><img src=x onerror=alert(1)>", np.random.default_rng(0)
    domains = ["<b>day", "night & 'fog'", "{{ dusk }} at_the_University_Hospital_of_the_Northern_Provinces"]
    for domain, number, i in product(domains, range(23), range(6)):
        folder = tmp_path / "photos" / domain / f"class <i>{number:02} of a long name"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * number, 40 * i, 99)).save(folder / f"{i}.png")
    dataset = load_dataset(tmp_path / "photos")
    assert dataset.domains == domains
    classes = [f"{hostile}{name}" if i == 0 else name for i, name in enumerate(dataset.classes)]
    directions = rng.normal(size=(32, 23)).astype(np.float32)
    for algorithm, targets in product(("ERM", hostile), ([0], [1], [2], [0, 1], [0, 2], [1, 2])):
        folder = tmp_path / "sweep" / f"{len(algorithm)}-{targets}"
        folder.mkdir(parents=True)
        args = {
            "dataset": "photos",
            "algorithm": algorithm,
            "test_envs": targets,
            "trial_seed": 0,
            "hparams_seed": 0,
            "steps": 20,
            "domains": domains,
        }
        with (folder / "results.jsonl").open("w") as file:
            for step in (10, 20):  # the earlier step does better on domains left out
                values = {
                    f"env{d}_{split}_acc": 0.5 + 0.02 * step * (-1) ** (d in targets) + 0.001 * d
                    for d in range(3)
                    for split in ("in", "out")
                }
                file.write(
                    json.dumps(
                        {
                            "step": step,
                            "loss": 1.0,
                            "margin": 0.5,
                            "norm": 3.0,
                            "norm_0": 2.0,
                            "norm_1": 4.0,
                            **values,
                            "args": args,
                            "hparams": {"lr": 1},
                        }
                    )
                    + "\n"
                )
        (folder / "run.json").write_text(
            json.dumps(
                {
                    "identity": {
                        "dataset": "photos",
                        "algorithm": algorithm,
                        "target": [domains[i] for i in targets],
                        "trial": 0,
                        "draw": 0,
                    },
                    "steps": 20,
                    "classes": classes,
                    "domains": domains,
                    "image_size": 8,
                    "root": str(tmp_path / "photos"),
                }
            )
        )
        if len(targets) == 1:
            z = 2 * directions.T[dataset.labels] + 3 * rng.normal(size=(len(dataset), 32)).astype(np.float32)
            Features(
                z,
                z @ directions,
                dataset.labels,
                dataset.domain_of,
                np.arange(len(dataset)) % 6 > 0,
                dataset.files,
                classes,
                domains,
                [domains[targets[0]]],
                directions,
                None,
                "photos",
                algorithm,
                0,
                0,
                f"{algorithm}{targets}",
            ).save(folder / "features.npz")
    path = write_report([tmp_path / "sweep"], tmp_path / "report.html", permutations=19)
    for width in (360, 1440):
        with Opened(browser, path, width) as opened:
            page = opened.page
            assert page.evaluate(OVERLAPS) == {"found": [], "outside": [], "scrolls": False}
            assert page.locator("img").count() == 0 and hostile in page.title()
            charts = [each.get_attribute("aria-label") for each in page.locator("#curve-charts svg").all()]
            assert charts[2] == "margin (degrees): margin (degrees) from 28.65 to 28.65"
            assert charts[3].startswith(f"norm: mean from 3 to 3; {domains[1]} from 2 to 2; {domains[2]} from 4")
            table = page.locator("#result .scroll:visible")
            first = table.locator("td").nth(2).bounding_box()  # that of the domain of a long name
            assert first["x"] + first["width"] < page.evaluate("innerWidth") or width == 360
            assert hint(table) == (width == 360)
            table.evaluate("element => element.scrollLeft = 9999")
            assert not hint(table)  # nothing more to the right
            assert "30.0" not in page.locator("#result table:visible").inner_text()  # the last step, by validation
            opened.choose("result", "Selected by", "Leave one out")
            shown = page.locator("#result table:visible").inner_text()
            assert "30.0" in shown and "30.2" in shown and hostile in shown and "10.0" not in shown
            assert (
                f"{hostile}{dataset.classes[0]}"
                in page.locator("#confusions").inner_text() + page.locator("#assumption-controls").inner_text()
            )
            assert page.locator("#confusions li").count() == 30 and page.locator("#confusions table").count() == 0
            opened.choose("latent", "Coloured by", "Class")
            assert page.locator("#legend button").count() == 23
            assert page.evaluate(OVERLAPS) == {"found": [], "outside": [], "scrolls": False}


@pytest.mark.slow
def test_page_of_pacs_is_small_and_fast(tmp_path: Path, browser: Any) -> None:
    """Three algorithms, four targets, three trials, six draws of 100 records; 2000 photograph-like images."""
    entry, rng = DATASETS["PACS"], np.random.default_rng(0)
    for domain in entry.domains:
        for name in entry.classes:
            (tmp_path / "PACS" / domain / name).mkdir(parents=True)
            for number in range(72):
                coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((227, 227))
                grain = np.asarray(coarse) + rng.normal(0, 12, (227, 227, 3))
                Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(
                    tmp_path / "PACS" / domain / name / f"{number}.jpg", quality=90
                )
    dataset = load_dataset(tmp_path / "PACS")
    directions = rng.normal(size=(32, 7)).astype(np.float32)
    for algorithm, target, trial, draw in product(("ERM", "CORAL", "AIDGN"), range(4), range(3), range(6)):
        folder = tmp_path / "sweep" / f"PACS-{algorithm}-{target}-{trial}-{draw}"
        folder.mkdir(parents=True)
        hparams = {"lr": 5e-5 * 1.7**draw, "batch_size": 32, "weight_decay": 1e-6 * 9**draw * bool(draw)}
        args = {
            "dataset": "PACS",
            "algorithm": algorithm,
            "test_envs": [target],
            "trial_seed": trial,
            "hparams_seed": draw,
            "steps": 5000,
            "domains": dataset.domains,
        }
        with (folder / "results.jsonl").open("w") as file:
            for step in range(50, 5001, 50):
                values = {f"env{d}_out_acc": float(rng.uniform(0.9, 1)) for d in range(4)}
                values[f"env{target}_in_acc"] = float(rng.uniform(0.7, 0.9))
                terms = {name: float(rng.uniform()) for name in ("loss", "classification", "regularizer", "norm")}
                file.write(json.dumps({"step": step, **terms, **values, "args": args, "hparams": hparams}) + "\n")
        identity = {
            "dataset": "PACS",
            "algorithm": algorithm,
            "target": [dataset.domains[target]],
            "trial": trial,
            "draw": draw,
            "hyper_parameters": hparams,
            "steps": 5000,
        }
        (folder / "run.json").write_text(
            json.dumps(
                {
                    "identity": identity,
                    "steps": 5000,
                    "classes": dataset.classes,
                    "domains": dataset.domains,
                    "image_size": 224,
                    "root": str(tmp_path / "PACS"),
                }
            )
        )
        if trial == 0:
            z = 2 * directions.T[dataset.labels] + rng.normal(size=(len(dataset), 32)).astype(np.float32)
            Features(
                z,
                z @ directions,
                dataset.labels,
                dataset.domain_of,
                rng.random(len(dataset)) < 0.2,
                dataset.files,
                dataset.classes,
                dataset.domains,
                [dataset.domains[target]],
                directions,
                None,
                "PACS",
                algorithm,
                0,
                draw,
                f"{algorithm}{target}{draw}",
            ).save(folder / "features.npz")
    page = write_report([tmp_path / "sweep"], tmp_path / "report.html")
    assert 2e6 < page.stat().st_size < 10e6
    for width in WIDTHS:
        with Opened(browser, page, width) as opened:
            assert opened.seconds < 2 * (3 if os.getloadavg()[0] > 1.5 else 1)
            assert opened.page.evaluate(OVERLAPS) == {"found": [], "outside": [], "scrolls": False}
            assert opened.page.locator(".space").count() == 2
