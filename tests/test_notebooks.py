"""The notebooks run from top to bottom."""

import ast
import json
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_cell(source: str, namespace: dict[str, object]) -> object:
    """Run a cell as a notebook does and return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)


def run_notebook(name: str) -> list[str]:
    """Return the values that the notebook shows, as HTML."""
    namespace: dict[str, object] = {}
    shown = []
    for cell in json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            value = run_cell("".join(cell["source"]), namespace)
            if value is not None:
                shown.append(value._repr_html_())  # type: ignore[attr-defined]
    return shown


@pytest.fixture(autouse=True)
def folders_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.slow
def test_tour() -> None:
    run, sweep, own = run_notebook("tour.ipynb")
    assert "AIDGN on digits" in run and "Smooth on digits" in own
    assert all(name in sweep for name in ("ERM", "AIDGN", "ink", "chalk"))


@pytest.mark.slow
def test_own_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    [fit] = run_notebook("own_pictures.ipynb")
    assert "on an unseen domain" in fit
    text = capsys.readouterr().out
    measured = re.findall(r"The model on new_site: ([\d.]+)% of 450 pictures right", text)
    promised = re.findall(r"The promise of aidgn fit was ([\d.]+) ?%", text)
    assert float(measured[0]) > 20 and float(promised[0]) > 20, text  # of 10 classes
    assert re.search(r"REPORT\.md\n.*report\.html\n", text)


@pytest.mark.parametrize("notebook", sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
def test_notebooks_have_no_outputs(notebook: str) -> None:
    cells = json.loads((EXAMPLES / notebook).read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
