"""The wheel and the source archive: what is in them, and that they work in a clean environment."""

import email
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import aidgn

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    result = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(source)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_the_wheel_has_every_file_of_the_package(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        inside = {name for name in wheel.namelist() if name.startswith("aidgn/")}
        about = email.message_from_bytes(
            wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA")))
        )
    package = ROOT / "src" / "aidgn"
    wanted = {
        f"aidgn/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert inside == wanted
    assert about["License-Expression"] == "MIT" and about["Requires-Python"] == ">=3.11"
    assert {"ray", "slurm", "onnx", "serve", "trackers", "docs", "dev"} <= set(about.get_all("Provides-Extra"))


def test_one_version_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert aidgn.__version__ == version == str(citation["version"])
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_source_archive_can_be_built_from(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/aidgn/report/paper.json"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_works_in_a_clean_environment(
    built: Path, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = sys.executable if sys.version.startswith(f"{version}.") else shutil.which(f"python{version}")
    if not python or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"no Python {version} on this machine")

    def run(*command: str | Path, ok: bool = True) -> str:
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, timeout=900)
        assert (result.returncode == 0) == ok, result.stdout + result.stderr
        return result.stdout if ok else result.stderr

    run(python, "-m", "venv", "clean")
    run("clean/bin/python", "-m", "pip", "install", "--quiet", next(built.glob("*.whl")))
    assert "sweep" in run("clean/bin/aidgn", "--help")
    for algorithm in ("ERM", "AIDGN"):
        run(
            "clean/bin/aidgn",
            "train",
            "digits",
            "--algorithm",
            algorithm,
            "--target",
            "ink",
            "--steps",
            "20",
            "--eval-every",
            "10",
        )
    assert re.search(r"AIDGN.*\d\d\.\d", run("clean/bin/aidgn", "table", "runs"))
    absent = run("clean/bin/aidgn", "sweep", "digits", "--algorithm", "ERM", "--launcher", "ray", ok=False)
    assert "aidgn[ray]" in absent and "Traceback" not in absent
    shutil.rmtree(tmp_path / "clean")  # gigabytes


@pytest.mark.skipif("AIDGN_TEST_OLDEST" not in os.environ, reason="for `make test-oldest`")
def test_the_oldest_versions_are_those_tested() -> None:
    """A bound below what can be installed together would be a promise that nobody tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for name, bound in (text.split(">=") for text in requirements if not text.startswith("aidgn[")):
        installed = re.findall(r"\d+", version(name).partition("+")[0])
        wanted = re.findall(r"\d+", bound)
        assert [*map(int, installed)] == [*map(int, wanted), *[0] * (len(installed) - len(wanted))], name


def test_workflows_have_permissions_and_pinned_actions() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = file.read_text()
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        for action in re.findall(r"uses: (\S+)", text):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
