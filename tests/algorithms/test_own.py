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
    ("raise SystemExit\n", "own.py:Mine", "does not run: SystemExit: , line 1"),
    (BASE + "class ERM(Algorithm):\n    def objective(self, m): ...\n", "own.py:ERM", "calls itself ERM"),
    (BASE + "class erm(Algorithm):\n    def objective(self, m): ...\n", "own.py:erm", "calls itself erm"),
    (BASE + "class Mine(Algorithm):\n    def objective(self): ...\n", "own.py:Mine",
     r"`objective` cannot be called .*Write `def objective\(self, minibatches\)`"),
    (BASE + "class Mine(Algorithm):\n    def update(self, m, extra): ...\n", "own.py:Mine", "`update` cannot .*extra"),
    (BASE + "class Mine(Algorithm):\n    def __init__(self, f, c, d): ...\n    def objective(self, m): ...\n",
     "own.py:Mine", r"`__init__` cannot .*Write .*\*\*hyper_parameters"),
    (BASE + "class Mine(Algorithm):\n    search_space = {'a': 0.5}\n    def objective(self, m): ...\n",
     "own.py:Mine", r"a in `search_space` is 0\.5; expected \(default, distribution\)"),
    (BASE + "class Mine(Algorithm):\n    search_space = {}\n    def objective(self, m): ...\n",
     "own.py:Mine", r"`search_space` lacks lr, batch_size, .*\*\*COMMON"),
])
def test_mistakes(tmp_path: Path, text: str | None, ask: str, message: str) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(UserError, match=message):
        find(str(tmp_path / ask))


@pytest.mark.parametrize(("given", "message"), [
    ("None", "must return a dict of scalar tensors with `loss` among them; it gave NoneType"),
    ("loss", "it gave Tensor"), ("{'risk': loss}", r"it gave a dict of \['risk'\]"),
    ("{'loss': 0.5}", "`loss` of `objective` must be a scalar tensor, not float"),
    ("{'loss': z}", r"`loss` .* not \[12, 5\]"), ("{'loss': loss, 'z': z}", r"`z` .* not \[12, 5\]"),
    ("{'loss': loss.detach()}", "has no gradient")])
def test_what_an_objective_must_not_give(toy: SimpleNamespace, tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "from aidgn.algorithms.base import Algorithm, join\nclass Mine(Algorithm):\n    def objective(self, m):\n"
        f"        z = self.features(join(m)[0])\n        loss = z.mean()\n        return {given}\n")
    with pytest.raises(UserError, match=f"^Mine: .*{message}"):
        toy.make(f"{tmp_path}/own.py:Mine", toy.network()).update(toy.batches(0))


def test_rates_of_an_optimiser_of_ones_own_are_scaled_too(toy: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom aidgn.algorithms.erm import ERM\nclass Mine(ERM):\n    def build_optimizers(self):\n"
        "        return {'main': torch.optim.SGD(self.parameters(), lr=0.8)}\n")
    algorithm = toy.make(f"{tmp_path}/own.py:Mine", toy.network())
    for factor in (0.5, 0.25, 1.0):
        algorithm.scale_lr(factor)
        assert algorithm.optimizers["main"].param_groups[0]["lr"] == 0.8 * factor


def test_a_fault_in_own_optimisers_is_told_as_it_is(toy: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from aidgn.algorithms.erm import ERM\nclass Mine(ERM):\n    def build_optimizers(self):\n"
        "        return {'main': self.adam([self.head])}\n")
    with pytest.raises(RuntimeError, match=r"build_optimizers of Mine: .* no attribute 'head'"):
        toy.make(f"{tmp_path}/own.py:Mine", toy.network()).update(toy.batches(0))


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
