"""An algorithm in a user's file: the example works, mistakes are named."""

import copy
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aidgn.algorithms import create, find
from aidgn.data import load_dataset
from aidgn.errors import UserError
from aidgn.training import RunSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"
NAME = f"{EXAMPLE}:SmoothNorms"


def test_the_example_computes_what_it_says(toy: SimpleNamespace) -> None:
    algorithm = create(NAME, toy.network(), toy.CLASSES, 3, lr=1e-2, norm_weight=2.0, smoothing=0.2).double()
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2)

    def naive(minibatches):
        x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
        log_p = torch.log_softmax(g(f(x)), dim=1)
        risk = -sum(0.8 * row[label] + 0.2 * row.mean() for row, label in zip(log_p, y, strict=True)) / len(y)
        logs = [torch.log(sum((z ** 2).sum().sqrt() for z in f(x)) / len(x)) for x, _ in minibatches]
        mean = sum(logs) / 3
        loss = risk + 2.0 * sum((each - mean) ** 2 for each in logs) / 2
        adam.step(loss)
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])


def test_it_is_an_algorithm_like_the_others() -> None:
    algorithm = find(NAME)
    assert algorithm.name() == "SmoothNorms"
    assert find(NAME) is algorithm  # an unchanged file is not run again
    assert "class SmoothNorms" in inspect.getsource(algorithm)
    assert algorithm.sample("PACS", 0, 0)["smoothing"] == 0.1
    with pytest.raises(UserError, match="SmoothNorms needs at least 2 source domains"):
        algorithm(SimpleNamespace(num_features=3), 4, 1)  # type: ignore[arg-type]


BASE = "from aidgn.algorithms import Algorithm\n"


@pytest.mark.parametrize(("text", "ask", "message"), [
    (None, "own.py:Mine", "There is no file .*own.py"),
    (BASE, "own.py", "own.py is not a class. It has: none. Write path/to/file.py:Class"),
    (BASE + "class Mine(Algorithm):\n    def objective(self, m): ...\n", "own.py:Mime",
     "no class Mime. Did you mean Mine?"),
    ("class Mine:\n    pass\n", "own.py:Mine", "Mine in .* is not an algorithm: make it a subclass"),
    ("Mine = 3\n", "own.py:Mine", "Mine in .* is not an algorithm"),
    (BASE + "class Mine(Algorithm):\n    pass\n", "own.py:Mine", "lacks `objective"),
    ("import os\nimport no_such_module\n", "own.py:Mine",
     "ModuleNotFoundError: No module named 'no_such_module', line 2"),
    ("def f(:\n", "own.py:Mine", "does not run: SyntaxError: .*line 1"),
    ("def f():\n    return 1 / 0\n\nf()\n", "own.py:Mine", "ZeroDivisionError: division by zero, line 2"),
    (BASE + "class ERM(Algorithm):\n    def objective(self, m): ...\n", "own.py:ERM", "calls itself ERM"),
])
def test_mistakes(tmp_path: Path, text: str | None, ask: str, message: str) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(UserError, match=message):
        find(str(tmp_path / ask))


def test_an_edited_file_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    for title in ("first", "second"):
        file.write_text(BASE + f"class Mine(Algorithm):\n    title = '{title}'\n    def objective(self, m): ...\n")
        assert find(f"{file}:Mine").title == title


def test_what_is_beside_the_class_is_part_of_what_is_run(tmp_path: Path) -> None:
    file, keys = tmp_path / "own.py", []
    for factor in (1, 2):
        file.write_text(BASE + f"def weight(): return {factor}\nclass Mine(Algorithm):\n"
                               "    def objective(self, m): return {'loss': weight()}\n")
        keys.append(RunSpec("digits", f"{file}:Mine", "ink").resolved(load_dataset("digits")).key())
    assert keys[0] != keys[1]


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no algorithm Mixap\. Did you mean Mixup"):
        find("Mixap")
