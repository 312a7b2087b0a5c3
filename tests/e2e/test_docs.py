"""The documentation does what it says: its commands and code blocks are run, page by page, as they stand."""

import html
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?"
    r"^```(?P<language>sh|python)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text(encoding="utf-8")))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code(block: re.Match[str]) -> str:
    return re.sub(
        r'^--8<-- "(\S+)"$',
        lambda found: (ROOT / found[1]).read_text(encoding="utf-8"),
        block["text"],
        flags=re.MULTILINE,
    )


def run_or_written(block: re.Match[str]) -> bool:
    return not block["skip"]


RUN = pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent == ROOT / "docs" and any(map(run_or_written, blocks(page)))],
    ids=name,
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with `aidgn` and `python` of these tests on the path."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, f"{command[-1]}\n{result.stdout}\n{result.stderr}"


FEWER = {
    "sweep": ["--workers", "1"],
    "fit": ["--workers", "1"],
    "report": ["--points", "100"],
    "diagnose": ["--permutations", "99"],
}


@RUN
def test_blocks_of_a_page_run_in_order_with_few_steps(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported everything already: few steps, workers and points of t-SNE."""
    from aidgn.cli import app

    monkeypatch.setattr(sys.modules["aidgn.cli.diagnose"], "POINTS", 120)
    for block in filter(run_or_written, blocks(page)):
        if block["title"]:
            (place / block["title"]).write_text(code(block), encoding="utf-8")
        elif block["language"] == "python":
            exec(compile(code(block), f"{name(page)}: a block", "exec"), {"__name__": "__main__"})
        for line in block["text"].splitlines() if block["language"] == "sh" else []:
            program, *words = shlex.split(line)
            if program != "aidgn":
                execute(program, *words)
                continue
            words = [
                found for word in words for found in (sorted(map(str, place.glob(word))) if "*" in word else [word])
            ]
            if "--steps" in words:
                words[words.index("--steps") + 1] = "4"
            app([*words, *FEWER.get(words[0], ())], standalone_mode=False)


@RUN
@pytest.mark.slow
def test_blocks_of_a_page_run_in_order(page: Path, place: Path) -> None:
    for block in filter(run_or_written, blocks(page)):
        if block["title"]:
            (place / block["title"]).write_text(code(block), encoding="utf-8")
        elif block["language"] == "sh":
            execute("bash", "-euo", "pipefail", "-c", block["text"])
        else:
            execute(sys.executable, "-c", code(block))


LINES = [
    (name(page), line)
    for page in PAGES
    for block in blocks(page)
    if block["language"] == "sh"
    for line in block["text"].replace("\\\n", " ").splitlines()
    if re.match(r"\s*aidgn \S", line) and " | " not in line
]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line[:60]}" for page, line in LINES])
def test_every_command_line_exists(page: str, line: str) -> None:
    """Also of what is not run: its command, arguments and options are parsed."""
    from aidgn.cli import app

    words = shlex.split(line, comments=True)[1:]
    command = app
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


@pytest.mark.skipif(shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None, reason="needs aidgn[docs]")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stdout + result.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert len(pages) >= 12 and "<math" in text and "arithmatex" not in text and "{{ " not in text
    shown = html.unescape(re.sub(r"<[^>]+>", "", text))
    assert "8<--" not in shown and "class SmoothNorms" in shown and "regularizer: str = 'linear'" in shown
    assert "ROOT/<domain>/<class>/<image>" in shown
    from aidgn.cli import app

    commands = (tmp_path / "site/commands/index.html").read_text(encoding="utf-8")
    assert all(f"aidgn {command}" in commands for command in app.commands)
    outside = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
    assert not outside, outside  # nothing is fetched from elsewhere
