"""The documentation is true: its commands and code run, its paths exist, and the built site is complete."""

import csv
import functools
import html
import http.server
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from aidgn.algorithms import ALGORITHMS
from aidgn.cli import COMMANDS, app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?"
    r"^```(?P<language>sh|python)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def all_blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text(encoding="utf-8")))


def blocks_to_run(page: Path) -> list[re.Match[str]]:
    return [block for block in all_blocks(page) if not block["skip"]]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_of(block: re.Match[str]) -> str:
    """The text of a block, with included files."""
    return re.sub(
        r'^--8<-- "(\S+)"$', lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), block["text"], flags=re.M
    )


PAGES_TO_RUN = pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent == ROOT / "docs" and blocks_to_run(page)], ids=page_name
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with this environment's `aidgn` and `python` on the path."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, f"{command[-1]}\n{result.stdout}\n{result.stderr}"


QUICK_OPTIONS = {
    "sweep": ["--workers", "1"],
    "fit": ["--workers", "1"],
    "report": ["--points", "100"],
    "diagnose": ["--permutations", "99"],
}


@PAGES_TO_RUN
def test_blocks_run_with_few_steps(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported everything already."""
    monkeypatch.setattr("aidgn.report.run_figures.MAX_POINTS", 120)
    for block in blocks_to_run(page):
        code = re.sub(r"steps=\d+", "steps=4", code_of(block))
        if block["title"]:
            (folder / block["title"]).write_text(code, encoding="utf-8")
        elif block["language"] == "python":
            exec(compile(code, f"{page_name(page)}: a block", "exec"), {"__name__": "__main__"})
        else:
            for line in code.splitlines():
                run_line(line, folder)


def run_line(line: str, folder: Path) -> None:
    """Run a line of shell code; run `aidgn` in this process, with few steps."""
    program, *words = shlex.split(line, comments=True)
    if program != "aidgn":
        execute(program, *words)
        return
    arguments = []
    for word in words:
        arguments += sorted(map(str, folder.glob(word))) if "*" in word else [word]
    if "--steps" in arguments:
        arguments[arguments.index("--steps") + 1] = "4"
    for option in {"--warmup", "--warm-start"}.intersection(arguments):
        arguments[arguments.index(option) + 1] = "1"
    app([*arguments, *QUICK_OPTIONS.get(arguments[0], ())], standalone_mode=False)


@PAGES_TO_RUN
@pytest.mark.slow
def test_blocks_run_as_they_are(page: Path, folder: Path) -> None:
    for block in blocks_to_run(page):
        if block["title"]:
            (folder / block["title"]).write_text(code_of(block), encoding="utf-8")
        elif block["language"] == "sh":
            execute("bash", "-euo", "pipefail", "-c", block["text"])
        else:
            execute(sys.executable, "-c", code_of(block))


def test_fiftyone_shows_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment of the interpreter FIFTYONE_PYTHON, because FiftyOne needs other libraries than aidgn."""
    interpreter = os.environ.get("FIFTYONE_PYTHON")
    if not interpreter:
        pytest.skip("FIFTYONE_PYTHON names no interpreter")
    blocks = all_blocks(ROOT / "docs/other-tools.md")
    [block] = (block["text"] for block in blocks if "import fiftyone" in block["text"])
    exec(compile(blocks[0]["text"].replace("steps=60", "steps=4"), "the first block", "exec"), {"__name__": "__main__"})
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    checks = "print(dataset.count(), dataset.distinct('tags'), sorted(dataset.distinct('predicted.label')))"
    code = block.replace(".wait()", ".close()") + checks
    result = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader((folder / "runs/fit-photos/out_of_site.csv").open(newline="")))
    sites, labels = sorted({row["site"] for row in rows}), sorted({row["predicted"] for row in rows})
    assert result.stdout.splitlines()[-1] == f"{len(rows)} {sites} {labels}"
    right = sum(row["label"] == row["predicted"] for row in rows) / len(rows)
    assert re.search(rf"accuracy +{right:.2f} +{len(rows)}", result.stdout)


COMMAND_LINES = [
    (page_name(page), line)
    for page in PAGES
    for block in all_blocks(page)
    if block["language"] == "sh"
    for line in block["text"].replace("\\\n", " ").splitlines()
    if re.match(r"\s*aidgn \S", line) and " | " not in line
]


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES, ids=[f"{page}: {line[:60]}" for page, line in COMMAND_LINES])
def test_command_line_parses(page: str, line: str) -> None:
    """Also lines that are not run: the command, its arguments and options exist."""
    words = shlex.split(line, comments=True)[1:]
    command: click.Command | None = app
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.get_command(click.Context(command), name)
        assert command is not None, name
    command.make_context(command.name, words)


def named_paths(page: Path) -> set[str]:
    """Paths of the repository that a page names in code font, such as `src/aidgn/files.py`."""
    text = page.read_text(encoding="utf-8")
    return set(re.findall(r"`((?:src|tests|docs|examples|experiments|benchmarks|\.github)/[\w./-]*)`", text))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_named_paths_exist(page: Path) -> None:
    placeholders = {"src/aidgn/algorithms/mine.py"}
    missing = {path for path in named_paths(page) - placeholders if not (ROOT / path).exists()}
    assert not missing


def test_architecture_names_every_package() -> None:
    packages = {f"src/aidgn/{path.parent.name}/" for path in (ROOT / "src/aidgn").glob("*/__init__.py")}
    modules = {f"src/aidgn/{path.name}" for path in (ROOT / "src/aidgn").glob("[a-z]*.py")}
    for page in ("docs/architecture.md", "README.md"):
        assert packages <= named_paths(ROOT / page)
    assert modules <= named_paths(ROOT / "docs/architecture.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built documentation."""
    pytest.importorskip("mkdocs", reason="needs aidgn[docs]")
    site = tmp_path_factory.mktemp("docs") / "site"
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stdout + result.stderr
    return site


def visible_text(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_site_is_complete(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    source = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert len(pages) >= 14 and "<math" in source and "arithmatex" not in source and "{{ " not in source
    text = "".join(map(visible_text, pages))
    assert "8<--" not in text and "class SmoothNorms" in text and "regularizer: str = 'linear'" in text
    assert "ROOT/<domain>/<class>/<image>" in text
    assert all(f"aidgn {command}" in visible_text(site / "commands/index.html") for command in COMMANDS)


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        source = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', source)
    assert "http" not in re.sub(r'xmlns="[^"]+"', "", (site / "figures/terminal.svg").read_text(encoding="utf-8"))


def test_algorithms_page_prints_distributions(site: Path) -> None:
    page = (site / "algorithms/index.html").read_text(encoding="utf-8")
    assert "<function" not in html.unescape(page) and "Distribution(" not in page
    for name, algorithm in ALGORITHMS.items():
        section = page.split(f'<h2 id="{name.lower()}">')[1].split("<h2")[0]
        rows = [re.findall(r"<td>(.*?)</td>", row) for row in section.split("<tr>")]
        shown = {re.sub(r"<[^>]+>", "", row[0]): html.unescape(row[2]) for row in rows if row}
        assert shown == {key: distribution.text for key, (_, distribution) in algorithm.search_space.items()}


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The built documentation, served on this machine."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def test_search_finds_pages(address: str, browser: Any) -> None:
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("von Mises-Fisher")
    first = page.locator(".md-search-result__link").first
    first.wait_for()
    assert "how-it-works" in (first.get_attribute("href") or "")
    first.click()
    page.wait_for_url("**/how-it-works/**")
    assert not errors
    page.close()


@pytest.mark.parametrize("width", [1440, 390])
def test_front_page_fits_the_window(address: str, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    images = "[...document.images].map(image => [image.src, image.complete && image.naturalWidth > 0])"
    assert all(loaded for _, loaded in page.evaluate(images))
    page.close()
