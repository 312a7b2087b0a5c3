"""The tour notebook runs from top to bottom."""

import ast
import json
import re
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[1] / "examples" / "tour.ipynb"


def run_cell(source: str, namespace: dict[str, object]) -> object:
    """Run a cell as a notebook does and return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)


@pytest.mark.slow
def test_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace: dict[str, object] = {}
    shown = []
    for cell in json.loads(TOUR.read_text())["cells"]:
        if cell["cell_type"] == "code":
            value = run_cell("".join(cell["source"]), namespace)
            if value is not None:
                shown.append(value._repr_html_())  # type: ignore[attr-defined]
    run, sweep, own, fit = shown
    assert "AIDGN on digits" in run and "Smooth on digits" in own
    assert all(name in sweep for name in ("ERM", "AIDGN", "ink", "chalk"))
    assert "On an unseen domain expect" in fit
    expected, measured = re.findall(r"([\d.]+)%", capsys.readouterr().out.splitlines()[-1])
    assert float(expected) > 20 and float(measured) > 20, (expected, measured)  # of 10 classes


def test_tour_has_no_outputs() -> None:
    cells = json.loads(TOUR.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
