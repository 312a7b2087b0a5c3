"""One thread per process, as tests run side by side; set before torch is imported, and for the processes they start."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
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
def own(tmp_path: Path) -> str:
    """An algorithm of one's own, FILE:CLASS, that predicts in its own way."""
    (tmp_path / "own.py").write_text("""
from torch.nn.functional import cross_entropy
from aidgn.algorithms.base import Algorithm, join

class Mine(Algorithm):
    def objective(self, minibatches):
        x, y = join(minibatches)
        return {"loss": cross_entropy(self.predict(x), y)}

    def predict(self, x):
        return -super().predict(x)
""")
    return f"{tmp_path / 'own.py'}:Mine"
