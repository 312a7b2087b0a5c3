"""An algorithm in a user's file: the example works, mistakes are named."""

import copy
import inspect
import json
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch

from aidgn.algorithms import create, find
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.report.table import tables
from aidgn.runs.reader import read_runs
from aidgn.selection import load_records
from aidgn.training import RunSpec, train

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
        logs = [torch.log(sum((z**2).sum().sqrt() for z in f(x)) / len(x)) for x, _ in minibatches]
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
    with pytest.raises(AidgnError, match="SmoothNorms needs at least 2 source domains"):
        algorithm(SimpleNamespace(num_features=3), 4, 1)  # type: ignore[arg-type]


BASE = "from aidgn.algorithms import Algorithm\n"
SPACE = (
    "from aidgn.algorithms.base import COMMON\nfrom aidgn.algorithms.erm import ERM\n"
    "from aidgn.algorithms.search_space import one_of\n"
)


@pytest.mark.parametrize(
    ("text", "ask", "message"),
    [
        (None, "own.py:Mine", "There is no file .*own.py"),
        (BASE, "own.py", "own.py is not a class. It has: none. Write path/to/file.py:Class"),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    def objective(self, m): ...
                """),
            "own.py:Mime",
            "no class Mime. Did you mean Mine?",
        ),
        (
            dedent("""\
            class Mine:
                pass
            """),
            "own.py:Mine",
            "Mine in .* is not an algorithm: make it a subclass",
        ),
        ("Mine = 3\n", "own.py:Mine", "Mine in .* is not an algorithm"),
        (
            BASE
            + dedent("""\
            class Mine(Algorithm):
                pass
            """),
            "own.py:Mine",
            "lacks `objective",
        ),
        (
            "import os\nimport no_such_module\n",
            "own.py:Mine",
            "ModuleNotFoundError: No module named 'no_such_module', line 2. An algorithm is one file",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    name = 'mine'
                    def objective(self, m): ...
                """),
            "own.py:Mine",
            "`name` must be a class method",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    def name(self): return 'mine'
                    def objective(self, m): ...
                """),
            "own.py:Mine",
            "`name` must be a class method",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    name = classmethod(lambda cls: '')
                    def objective(self, m): ...
                """),
            "own.py:Mine",
            "`name` must be a class method that returns a word",
        ),
        (
            "from aidgn.algorithms.search_space import one_of\nSPACE = one_of(True, False)\n",
            "own.py:Mine",
            "a number or a word .*, not bool; for yes and no give 0 and 1, or words.*line 2",
        ),
        ("def f(:\n", "own.py:Mine", "does not run: SyntaxError: .*line 1"),
        ("def f():\n    return 1 / 0\n\nf()\n", "own.py:Mine", "ZeroDivisionError: division by zero, line 2"),
        ("raise SystemExit\n", "own.py:Mine", "does not run: SystemExit: , line 1"),
        (
            BASE
            + dedent("""\
            class ERM(Algorithm):
                def objective(self, m): ...
            """),
            "own.py:ERM",
            "algorithm ERM,",
        ),
        (
            BASE
            + dedent("""\
            class erm(Algorithm):
                def objective(self, m): ...
            """),
            "own.py:erm",
            "algorithm ERM,",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    def objective(self): ...
                """),
            "own.py:Mine",
            r"`objective` .*Write `def objective\(self, minibatches\)`",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    def update(self, m, extra): ...
                """),
            "own.py:Mine",
            "`update` .*extra",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    def __init__(self, f, c, d): ...
                    def objective(self, m): ...
                """),
            "own.py:Mine",
            r"`__init__` .*Write .*\*\*hyper_parameters",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    search_space = {'a': 0.5}
                    def objective(self, m): ...
                """),
            "own.py:Mine",
            r"a in `search_space` is 0\.5; expected \(default, distribution\)",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    search_space = {}
                    def objective(self, m): ...
                """),
            "own.py:Mine",
            r"`search_space` lacks lr, batch_size, .*\*\*COMMON",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    search_space = {1: (0, None)}
                    def objective(self, m): ...
                """),
            "own.py:Mine",
            "1 in `search_space` is not a name; put it in quotes",
        ),
        (
            BASE
            + dedent("""\
                class Mine(Algorithm):
                    min_domains = 'two'
                    def objective(self, m): ...
                """),
            "own.py:Mine",
            "`min_domains` is 'two'; expected a whole number of at least 0",
        ),
        (
            dedent("""\
                from aidgn.algorithms.aidgn import AIDGN
                class Mine(AIDGN):
                    small_images = {'kapa': AIDGN.small_images['kappa']}
                """),
            "own.py:Mine",
            "`small_images` has kapa, which is not in `search_space`. Did you mean kappa?",
        ),
        (
            SPACE
            + dedent("""\
                class Mine(ERM):
                    search_space = {**COMMON, 'w': (0.5, one_of(0, 1))}
                """),
            "own.py:Mine",
            r"w=0\.5 is not a whole number of at least 0\. It is a default in `search_space`\. Values such as 1",
        ),
        (
            SPACE
            + dedent("""\
                class Mine(ERM):
                    search_space = {**COMMON, 'w': (1, one_of(1, 2))}
                    small_images = {'w': (0.5, one_of(0.5, 1.0))}
                """),
            "own.py:Mine",
            r"w=0\.5 is not a whole number of at least 0\. It is a default in `small_images`",
        ),
    ],
)
def test_mistakes(tmp_path: Path, text: str | None, ask: str, message: str) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(AidgnError, match=message):
        find(str(tmp_path / ask))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("None", "`objective` must return .* NoneType"),
        ("loss", "`objective` must return .* Tensor"),
        ("{'risk': loss}", r"`objective` must return .* \['risk'\]"),
        ("{'loss': 0.5}", "`loss` of `objective` must be a scalar tensor, not float"),
        ("{'loss': z}", r"`loss` .* not \[12, 5\]"),
        ("{'loss': loss, 'z': z}", r"`z` .* not \[12, 5\]"),
        ("{'loss': loss.detach()}", "has no gradient"),
    ],
)
def test_what_an_objective_must_not_give(toy: SimpleNamespace, tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "from aidgn.algorithms.base import Algorithm, join\nclass Mine(Algorithm):\n    def objective(self, m):\n"
        f"        z = self.features(join(m)[0])\n        loss = z.mean()\n        return {given}\n"
    )
    with pytest.raises(AidgnError, match=f"^Mine: .*{message}"):
        toy.make(f"{tmp_path}/own.py:Mine", toy.network()).update(toy.batches(0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("None", "`update` must return .* NoneType"),
        ("{}", r"`update` must return .* \[\]"),
        ("{'risk': 1.0}", r"`update` must return .* \['risk'\]"),
        ("{'loss': 'abc'}", "`loss` of `update` must be a scalar tensor, not str"),
        ("{'loss': torch.zeros(3)}", r"not \[3\]"),
    ],
)
def test_what_an_update_must_not_give(tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom aidgn.algorithms.erm import ERM\nclass Mine(ERM):\n"
        f"    def update(self, m):\n        return {given}\n"
    )
    with pytest.raises(AidgnError, match=f"^Mine: .*{message}"):
        train(short_run(tmp_path), tmp_path / "runs", device="cpu")


@pytest.mark.parametrize("name", ["step", "epoch", "args", "env1_in_acc", "step_time"])
def test_a_term_must_not_be_called_as_what_records_have(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(
        "from aidgn.algorithms.erm import ERM\nclass Mine(ERM):\n    def objective(self, m):\n"
        f"        loss = super().objective(m)['loss']\n        return {{'loss': loss, '{name}': loss.detach()}}\n"
    )
    with pytest.raises(AidgnError, match=f"Mine .*`{name}`"):
        train(short_run(tmp_path), tmp_path / "runs", device="cpu")


def test_an_update_may_give_numbers_and_what_has_a_gradient(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
            from aidgn.algorithms.erm import ERM
            class Mine(ERM):
                def update(self, m):
                    loss = self.objective(m)['loss']
                    self.descend(loss, 'main')
                    return {'loss': loss, 'half': 0.5}
            """)
    )
    records = load_records(train(short_run(tmp_path), tmp_path / "runs", device="cpu"))
    assert [record["half"] for record in records] == [0.5, 0.5] and all(record["loss"] > 0 for record in records)


def test_a_network_that_no_optimiser_trains(toy: SimpleNamespace, tmp_path: Path) -> None:
    text = dedent("""\
            from torch import nn
            from aidgn.algorithms.base import join
            from aidgn.algorithms.erm import ERM
            class Mine(ERM):
                def build(self):
                    self.aux = nn.Linear(self.num_features, 1)
                def objective(self, m):
                    return {'loss': super().objective(m)['loss'] + self.aux(self.features(join(m)[0])).mean()}
            """)
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(AidgnError, match=r"Mine: .*aux\.weight"):
        toy.make(f"{tmp_path}/own.py:Mine", toy.network()).update(toy.batches(0))
    for better in (
        f"{text}    def build_optimizers(self):\n        return {{'main': self.adam([self])}}\n",
        text.replace("features, 1)", "features, 1).requires_grad_(False)"),
    ):
        (tmp_path / "own.py").write_text(better)
        toy.make(f"{tmp_path}/own.py:Mine", toy.network()).update(toy.batches(0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[self.adam([self])]", "must return a dict of optimizers by name"),
        ("{'other': self.adam([self])}", "no optimizer main; it has other"),
    ],
)
def test_optimisers_are_a_dict(toy: SimpleNamespace, tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "from aidgn.algorithms.erm import ERM\nclass Mine(ERM):\n"
        f"    def build_optimizers(self):\n        return {given}\n"
        "    def update(self, m):\n"
        "        self.descend(self.objective(m)['loss'], 'main')\n"
    )
    with pytest.raises(AidgnError, match=f"^Mine: `build_optimizers` .*{message}"):
        toy.make(f"{tmp_path}/own.py:Mine", toy.network()).update(toy.batches(0))


def test_every_optimiser_minimises_the_objective(toy: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
            import torch
            from torch import nn
            from aidgn.algorithms.base import join
            from aidgn.algorithms.erm import ERM
            class Mine(ERM):
                def build(self):
                    self.aux = nn.Linear(self.num_features, 1)
                def build_optimizers(self):
                    return {**super().build_optimizers(), 'aux': torch.optim.SGD(self.aux.parameters(), lr=0.1)}
                def objective(self, m):
                    return {'loss': super().objective(m)['loss'] + self.aux(self.features(join(m)[0])).mean()}
            """)
    )
    algorithm, batches = toy.make(f"{tmp_path}/own.py:Mine", toy.network()), toy.batches(0)
    before = copy.deepcopy(algorithm)
    algorithm.update(batches)
    mean = before.features(torch.cat([x for x, _ in batches])).mean(0)  # the gradient of the auxiliary weight
    torch.testing.assert_close(algorithm.aux.weight, before.aux.weight - 0.1 * mean)
    assert not torch.equal(algorithm.classifier.weight, before.classifier.weight)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("self.features(x)", r"`predict` must return logits \[64, 10\], images by classes; it returned \[64, 128\]"),
        ("super().predict(x) if self.training else None", r"must return logits \[64, 10\], .* it returned NoneType"),
        ("self.classifier(self.features(x)) * float('nan')", "a prediction became NaN or infinite at step 2"),
    ],
)
def test_what_predict_must_give(tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "from torch.nn.functional import cross_entropy\nfrom aidgn.algorithms.base import Algorithm, join\n"
        "class Mine(Algorithm):\n    def objective(self, m):\n        x, y = join(m)\n"
        "        return {'loss': cross_entropy(self.classifier(self.features(x)), y)}\n"
        f"    def predict(self, x):\n        return {given}\n"
    )
    with pytest.raises(AidgnError, match=message):
        train(short_run(tmp_path), tmp_path / "runs", device="cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "    def objective(self, m):\n        return self.gama\n",
            "failed in `objective`, line 4: AttributeError: 'Mine' object has no attribute 'gama'.",
        ),
        (
            "    def objective(self, m):\n        raise ValueError('first:\\n  second')\n",
            "failed in `objective`, line 4: ValueError: first: second.",
        ),
        ("    def objective(self, m):\n        assert not m\n", "failed in `objective`, line 4: AssertionError."),
        (
            "    def objective(self, m):\n        return next(iter([]))\n",
            "failed in `objective`, line 4: StopIteration.",
        ),
        (
            "    def build_optimizers(self):\n        return {'main': self.adm([])}\n",
            "failed in `build_optimizers`, line 4: RuntimeError: build_optimizers of Mine: 'Mine' object has no "
            "attribute 'adm'.",
        ),
    ],
)
def test_what_fails_in_own_code_is_told_in_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
        from aidgn.algorithms.erm import ERM
        class Mine(ERM):
        """)
        + text
    )
    with pytest.raises(AidgnError) as caught:
        train(short_run(tmp_path), tmp_path / "runs", device="cpu")
    assert str(caught.value) == f"{tmp_path}/own.py:Mine {message}"
    (log_file,) = (tmp_path / "runs").rglob("log.txt")
    assert caught.value.__notes__ == [f"{log_file} has the traceback."]
    assert "Traceback" in log_file.read_text() and 'own.py", line 4' in log_file.read_text()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("    def build(self):\n        self.number('width')\n", KeyError),  # before there is a log that could keep it
        ("    def objective(self, m):\n        open('/no/such/file')\n", FileNotFoundError),
    ],
)  # as a full disk
def test_what_is_told_as_it_is(tmp_path: Path, text: str, kind: type[Exception]) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
        from aidgn.algorithms.erm import ERM
        class Mine(ERM):
        """)
        + text
    )
    with pytest.raises(kind):
        train(short_run(tmp_path), tmp_path / "runs", device="cpu")


def test_a_fault_outside_own_code_is_not_blamed_on_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
        from aidgn.algorithms.erm import ERM
        class Mine(ERM): ...
        """)
    )

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(short_run(tmp_path), tmp_path / "runs", device="cpu", on_progress=broken)


def test_more_than_aidgn(toy: SimpleNamespace, tmp_path: Path) -> None:
    """A subclass with one more hyper-parameter adds a term to AIDGN's."""
    (tmp_path / "own.py").write_text(
        dedent("""\
            from aidgn.algorithms.aidgn import AIDGN, AIDGNRelease
            from aidgn.algorithms.search_space import uniform


            class Mine(AIDGN):
                search_space = {**AIDGN.search_space, 'extra': (0.1, uniform(0, 1))}

                def objective(self, m):
                    terms = super().objective(m)
                    extra = self.classifier.weight.square().mean()
                    return {**terms, 'loss': terms['loss'] + self.number('extra') * extra}


            class MyRelease(AIDGNRelease): ...


            class Called(AIDGNRelease):
                called = 'mine'
            """)
    )
    mine = toy.make(f"{tmp_path}/own.py:Mine", toy.network(), extra=0.5)
    plain = toy.make("AIDGN", copy.deepcopy(mine.featurizer))
    plain.classifier.load_state_dict(mine.classifier.state_dict())
    minibatches, penalty = toy.batches(0), mine.classifier.weight.detach().square().mean()
    assert mine.update(minibatches)["loss"].item() == pytest.approx(
        (plain.update(minibatches)["loss"] + 0.5 * penalty).item(), rel=1e-9
    )
    assert find(f"{tmp_path}/own.py:MyRelease").name() == "MyRelease"
    assert find(f"{tmp_path}/own.py:Called").name() == "mine"


def test_versions_of_a_file_are_separate_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, runs = (
        dedent("""\
        from aidgn.algorithms.erm import ERM
        class Mine(ERM):
            pass
        """),
        tmp_path / "runs",
    )
    (tmp_path / "own.py").write_text(text)

    def stop(what: str, done: int, *_: object) -> None:
        if (what, done) == ("train", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(short_run(tmp_path), runs, device="cpu", on_progress=stop)
    (half,) = runs.iterdir()
    (tmp_path / "own.py").write_text(text + "# other\n")
    second = train(short_run(tmp_path), runs, device="cpu")
    assert f"own.py:Mine has changed since it was trained in {half}, which is not finished" in caplog.text
    caplog.clear()
    (tmp_path / "own.py").write_text(text)
    assert train(short_run(tmp_path), runs, device="cpu") == half and not caplog.text

    names = {
        path: f"Mine@{json.loads((path / 'run.json').read_text())['identity']['source'][:4]}" for path in (half, second)
    }
    (made,) = tables(read_runs(runs))
    assert {row.head for row in made.rows} == set(names.values())
    assert any("digest of that file" in note for note in made.notes)
    (made,) = tables(read_runs(second))
    assert [row.head for row in made.rows] == ["Mine"]


def short_run(folder: Path) -> RunSpec:
    return RunSpec("digits", f"{folder}/own.py:Mine", "ink", steps=4, eval_every=2, hyper_parameters={"batch_size": 8})


def test_rates_of_an_optimiser_of_ones_own_are_scaled_too(toy: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
            import torch
            from aidgn.algorithms.erm import ERM
            class Mine(ERM):
                def build_optimizers(self):
                    return {'main': torch.optim.SGD(self.parameters(), lr=0.8)}
            """)
    )
    algorithm = toy.make(f"{tmp_path}/own.py:Mine", toy.network())
    for factor in (0.5, 0.25, 1.0):
        algorithm.scale_lr(factor)
        assert algorithm.optimizers["main"].param_groups[0]["lr"] == 0.8 * factor


def test_a_fault_in_own_optimisers_is_told_as_it_is(toy: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
            from aidgn.algorithms.erm import ERM
            class Mine(ERM):
                def build_optimizers(self):
                    return {'main': self.adam([self.head])}
            """)
    )
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
        file.write_text(
            BASE + f"def weight(): return {factor}\nclass Mine(Algorithm):\n"
            "    def objective(self, m): return {'loss': weight()}\n"
        )
        keys.append(RunSpec("digits", f"{file}:Mine", "ink").resolved(load_dataset("digits")).key())
    assert keys[0] != keys[1]


def test_defaults_of_ones_own_hold_for_small_images_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        dedent("""\
            from aidgn.algorithms.base import COMMON
            from aidgn.algorithms.erm import ERM
            from aidgn.algorithms.search_space import fixed
            class Mine(ERM):
                search_space = {**COMMON, 'lr': (0.02, fixed(0.02)), 'weight': (1.0, fixed(1.0))}
                small_images = {'weight': (2.0, fixed(2.0))}
            """)
    )
    mine = find(f"{tmp_path}/own.py:Mine")
    for draw in (0, 1):
        digits, pacs = mine.sample("digits", 0, draw), mine.sample("PACS", 0, draw)
        assert digits["lr"] == pacs["lr"] == 0.02
        assert (digits["weight"], pacs["weight"]) == (2.0, 1.0)
        assert digits["weight_decay"] == 0.0  # COMMON_SMALL's, which is not searched
    assert (mine.sample("digits", 0, 0)["batch_size"], mine.sample("PACS", 0, 0)["batch_size"]) == (64, 32)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(AidgnError, match=r"no algorithm Mixap\. Did you mean Mixup"):
        find("Mixap")
