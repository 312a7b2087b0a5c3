"""The functions at the top of the package."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import aidgn
from aidgn.errors import AidgnError, ParameterError, UnknownNameError
from aidgn.training import RunSpec
from aidgn.training import train as train_run

QUICK = {"steps": 4, "eval_every": 2, "batch_size": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> aidgn.RunResult:
    return aidgn.train("digits", target="chalk", algorithm="ERM", out=tmp_path_factory.mktemp("runs"), **QUICK)


def in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light() -> None:
    loaded = in_new_process("import aidgn, sys; print(list(sys.modules))")
    assert not {"torch", "numpy", "rich", "click"} & set(ast.literal_eval(loaded))


def test_objective_needs_no_other_part() -> None:
    code = "import aidgn, sys; aidgn.aidgn_loss; print([m for m in sys.modules if m.startswith('aidgn')])"
    logging = {"aidgn.escape", "aidgn.terminal"}  # for every module; they import the standard library only
    assert set(ast.literal_eval(in_new_process(code))) == {"aidgn", "aidgn.objective", *logging}


@pytest.mark.parametrize("name", aidgn.__all__)
def test_every_name_can_be_used(name: str) -> None:
    assert getattr(aidgn, name) is not None
    assert name in dir(aidgn)


def test_editors_see_every_name() -> None:
    tree = ast.parse(Path(aidgn.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(aidgn.__all__) - {"__version__"}


def test_unknown_attribute() -> None:
    assert not hasattr(aidgn, "trian")


def test_run_is_that_of_its_spec(run: aidgn.RunResult, tmp_path: Path) -> None:
    spec = RunSpec("digits", "ERM", "chalk", hyper_parameters={"batch_size": 8}, steps=4, eval_every=2)
    folder = train_run(spec, tmp_path, device="cpu")
    assert folder.name == run.folder.name
    assert (folder / "model.safetensors").read_bytes() == (run.folder / "model.safetensors").read_bytes()


def test_best_is_what_validation_selects(run: aidgn.RunResult) -> None:
    records = [json.loads(line) for line in (run.folder / "results.jsonl").read_text().splitlines()]
    validation = [np.mean([record[f"env{domain}_out_acc"] for domain in (0, 2, 3)]) for record in records]
    record = records[int(np.argmax(validation))]
    assert run.best.step == record["step"]
    assert run.best.accuracy == record["env1_in_acc"]
    assert run.best.validation == pytest.approx(max(validation))
    assert run.best.accuracies["ink"] == record["env0_out_acc"]
    assert run.records == records
    assert (run.dataset, run.algorithm) == ("digits", "ERM")


def test_run_is_shown(run: aidgn.RunResult) -> None:
    accuracy = f"{run.best.accuracy:.1%}"
    assert "ERM on digits" in repr(run) and f"chalk (unseen) {accuracy}" in repr(run)
    assert f"<td>chalk</td><td>unseen</td><td>{accuracy}</td>" in run._repr_html_()


def test_model_of_a_run(run: aidgn.RunResult) -> None:
    pixels = aidgn.load_dataset("digits").pixels
    assert pixels is not None
    same = aidgn.load_model(run.folder, device="cpu").predict(pixels[:3]).probabilities
    np.testing.assert_array_equal(run.model("cpu").predict(pixels[:3]).probabilities, same)


def test_run_on_all_domains(tmp_path: Path) -> None:
    run = aidgn.train("digits", target=(), algorithm="ERM", out=tmp_path, **QUICK)
    assert run.best.unseen == [] and run.best.accuracy == run.best.validation


def test_options_and_hyper_parameters_are_told_apart(tmp_path: Path) -> None:
    run = aidgn.train("digits", target="ink", out=tmp_path, trial=1, hyper_parameters={"kappa": 20}, **QUICK)
    identity = json.loads((run.folder / "run.json").read_text())["identity"]
    assert (identity["trial"], identity["steps"]) == (1, 4)
    assert (identity["hyper_parameters"]["kappa"], identity["hyper_parameters"]["batch_size"]) == (20, 8)


@pytest.mark.parametrize(("name", "near"), [("kapa", "kappa"), ("step", "steps"), ("targets", "target")])
def test_unknown_option_names_the_nearest(name: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=f"Did you mean {near}?") as caught:
        aidgn.train("digits", target="ink", out=tmp_path, **{name: 1})
    assert caught.value.name == name and {"kappa", "steps"} <= set(caught.value.known)
    assert not list(tmp_path.iterdir())


def test_records_as_data_frame(run: aidgn.RunResult) -> None:
    pytest.importorskip("pandas")
    frame = run.to_pandas()
    assert frame["step"].tolist() == [record["step"] for record in run.records]
    assert frame["env1_in_acc"].tolist() == [record["env1_in_acc"] for record in run.records]
    assert set(frame["target"]) == {"chalk"} and set(frame["hparams.batch_size"]) == {8}


def test_data_frame_without_pandas(run: aidgn.RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(AidgnError, match="pip install pandas"):
        run.to_pandas()


def test_progress_is_silent_when_turned_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    aidgn.train("digits", target="ink", algorithm="ERM", out=tmp_path, progress=False, **QUICK)
    assert capfd.readouterr() == ("", "")


def test_list_of_algorithms() -> None:
    from aidgn.algorithms import ALGORITHMS

    assert aidgn.list_algorithms() == list(ALGORITHMS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> aidgn.SweepResult:
    out = tmp_path_factory.mktemp("sweep")
    aidgn.train("digits", target="ink", algorithm="ERM", out=out, trial=5, **QUICK)  # does not belong to the sweep
    options = {**QUICK, "workers": 1, "targets": ["ink", "chalk"], "trials": 1, "kappa": 20}
    return aidgn.sweep(["digits"], ["ERM", "AIDGN"], out=out, **options)


def test_sweep_trains_every_combination(runs: aidgn.SweepResult) -> None:
    done = {(run.algorithm, *run.best.unseen) for run in runs.runs}
    assert done == {(name, target) for name in ("ERM", "AIDGN") for target in ("ink", "chalk")}
    assert len(runs.folders) == 4 and not runs.failures
    assert {run.records[0]["hparams"].get("kappa") for run in runs.runs} == {None, 20}
    assert len(runs.records) == sum(len(run.records) for run in runs.runs)
    assert "4 runs finished" in repr(runs)


def test_sweep_table_has_the_selected_accuracies(runs: aidgn.SweepResult) -> None:
    expected = {(run.algorithm, *run.best.unseen): run.best.accuracy for run in runs.runs}
    selected = {(row["algorithm"], row["target_name"]): row["accuracy"] for row in aidgn.select(runs.records)}
    assert selected == expected
    accuracy = f"{100 * expected['ERM', 'ink']:.1f}"
    assert accuracy in str(runs.table("digits")) and accuracy in runs._repr_html_()
    with pytest.raises(UnknownNameError):
        runs.table("PACS")


def test_sweep_compares_algorithms_in_pairs(runs: aidgn.SweepResult) -> None:
    best = {(run.algorithm, *run.best.unseen): run.best.accuracy for run in runs.runs}
    mean = 50 * abs(sum(best["ERM", name] - best["AIDGN", name] for name in ("ink", "chalk")))
    (table,) = runs.compare()
    assert f"{mean:+.1f}" in str(table) and "too few trials (1)" in str(table)


def test_sweep_continues(runs: aidgn.SweepResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aidgn.sweeps.launchers.local.LocalLauncher.run", None)  # nothing is left to train
    options = {**QUICK, "workers": 1, "targets": ["ink"], "trials": 1}
    again = aidgn.sweep(["digits"], ["ERM"], out=runs.folder, **options)
    assert [run.best.unseen for run in again.runs] == [["ink"]]


def test_fit_from_python(tmp_path: Path) -> None:
    sentences: list[str] = []
    options = {**QUICK, "out": tmp_path / "out", "report": False, "workers": 1, "on_message": sentences.append}
    result = aidgn.fit("digits", algorithm="ERM", **options)
    assert result.expected is result.estimates[0]
    assert list(result.expected.accuracies) == aidgn.load_dataset("digits").domains
    assert [*result.findings, *result.summary] == [sentences[0], *sentences[2:]]
    assert result.report.read_text().count("| ERM |") == 1
    assert f"{result.expected.mean:.1%}" in repr(result) and f"{result.expected.mean:.1%}" in result._repr_html_()
    pixels = aidgn.load_dataset("digits").pixels
    assert pixels is not None and len(result.model.predict(pixels[:2]).labels) == 2
    assert result.predict_command.startswith("aidgn predict ") and result.page is None
    unseen = [part.out_of_site for part in result.predictions]
    assert sorted(file for part in unseen for file in part.files) == sorted(aidgn.load_dataset("digits").files)
    for part in unseen:
        assert result.expected.accuracies[part.targets[0]] == part.where(~part.validation).right.mean()


def test_fit_checks_options_first(tmp_path: Path) -> None:
    with pytest.raises(ParameterError) as caught:
        aidgn.fit("digits", out=tmp_path / "out", steps=0)
    assert (caught.value.parameter, caught.value.value) == ("steps", 0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "function", [aidgn.train, aidgn.sweep, aidgn.fit, aidgn.list_algorithms], ids=lambda function: function.__name__
)
def test_example_in_docstring(function: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import doctest

    monkeypatch.chdir(tmp_path)
    (test,) = (test for test in doctest.DocTestFinder().find(function, globs={}) if test.examples)
    assert doctest.DocTestRunner().run(test).failed == 0
