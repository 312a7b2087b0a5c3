"""One thread per process, as tests run side by side; set before torch is imported, and for the processes they start."""

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

ATTACKS_HEAD = "| attack | tried | survived | test |", "|---|---:|---:|---|"
Tally = Callable[[str], AbstractContextManager[None]]

os.environ["OMP_NUM_THREADS"] = "1"
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # set before Triton is imported; its kernels then run on the CPU
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it, and so would what tests interrupt


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Decoded images go to a temporary folder, not to that of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("aidgn-cache")
        patch.setenv("AIDGN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def digits_run() -> Callable[..., Path]:
    from aidgn.training import RunSpec, train

    def run(out: Path, algorithm: str = "AIDGN", target: str | tuple[str, ...] = "chalk", **changes: object) -> Path:
        """The folder of a short run, below `out`."""
        settings = {"steps": 4, "eval_every": 2, "hyper_parameters": {"batch_size": 8}, **changes}
        return train(RunSpec("digits", algorithm, target, **settings), out, device="cpu")  # type: ignore[arg-type]

    return run


@pytest.fixture
def triton_device() -> str:
    """The device that Triton kernels run on in a test: the CPU, by Triton's interpreter, where there is no GPU."""
    pytest.importorskip("triton")
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def own(tmp_path: Path) -> str:
    """An algorithm of one's own, FILE:CLASS, that predicts in its own way."""
    (tmp_path / "own.py").write_text(
        dedent("""
                from torch.nn.functional import cross_entropy
                from aidgn.algorithms.base import Algorithm, join

                class Mine(Algorithm):
                    def objective(self, minibatches):
                        x, y = join(minibatches)
                        return {"loss": cross_entropy(self.predict(x), y)}

                    def predict(self, x):
                        return -super().predict(x)
                """)
    )
    return f"{tmp_path / 'own.py'}:Mine"


# Attacks: `pytest -m attack` runs all tests that count with `tally` --------------------------------------------------


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Count attempts of an attack for the table at the end of the session.

    `with tally("flipped bits"): ...` is one attempt. The code survived it if the block raises nothing.
    """
    tried: Counter[str] = Counter()
    survived: Counter[str] = Counter()

    @contextmanager
    def attempt(name: str) -> Iterator[None]:
        tried[name] += 1
        yield
        survived[name] += 1

    yield attempt
    file = request.node.nodeid.partition("::")[0]
    request.node.user_properties.append(("tally", (file, dict(tried), dict(survived))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attacks", metavar="FILE", help="update the table of attacks in this Markdown file")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tally" in getattr(item, "fixturenames", ()):
            item.add_marker("attack")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what the attacks of the session tried, and how many the code survived."""
    tried: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    files: dict[str, str] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "teardown":
            for name, value in report.user_properties:
                if name == "tally":
                    tried.update(value[1])
                    survived.update(value[2])
                    files |= dict.fromkeys(value[1], value[0])
    rows = {name: f"| {name} | {tried[name]} | {survived[name]} | `{files[name]}` |" for name in tried}
    if rows:
        terminalreporter.write_sep("-", "attacks")
        terminalreporter.write_line("\n".join([*ATTACKS_HEAD, *(rows[name] for name in sorted(rows))]))
    if rows and (path := config.getoption("attacks")):  # rows of attacks that did not run now stay
        before, start, table, end, after = re.split(
            r"(<!-- attacks -->\n)(.*)(<!-- end -->)", Path(path).read_text(), flags=re.S
        )
        rows = {row.split("|")[1].strip(): row for row in table.splitlines()[2:]} | rows
        text = "\n".join([*ATTACKS_HEAD, *(rows[name] for name in sorted(rows)), ""])
        Path(path).write_text(before + start + text + end + after)
