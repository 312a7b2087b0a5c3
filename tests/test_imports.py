"""The packages of aidgn import each other in one direction only; imports inside functions count."""

import ast
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import aidgn

ROOT = Path(aidgn.__file__).parent
REPOSITORY = Path(__file__).parents[1]


def package_of(module: str) -> str:
    """The first part of a name below aidgn: `runs` for aidgn.runs.folder."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "aidgn"


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "aidgn"]
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "aidgn":
        return [f"aidgn.{alias.name}" for alias in node.names] if node.module == "aidgn" else [node.module]
    return []


def test_packages_have_no_import_cycle() -> None:
    imports: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        relative = path.relative_to(ROOT)
        package = relative.parts[0].removesuffix(".py")
        if package in ("__init__", "__main__"):
            continue  # the package itself offers what all others define
        modules = [module for node in ast.walk(ast.parse(path.read_text())) for module in imported_modules(node)]
        imports.setdefault(package, set()).update({package_of(module) for module in modules} - {package, "aidgn"})
    assert len(imports) > 15 and "runs" in imports["training"]
    TopologicalSorter(imports).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "experiments"])
def test_scripts_import_names_that_exist(folder: str) -> None:
    names = {
        (node.module, alias.name)
        for path in (REPOSITORY / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "aidgn"
        for alias in node.names
    }
    missing = [name for name in names if not hasattr(import_module(name[0]), name[1])]
    for module, name in missing:
        import_module(f"{module}.{name}")  # a module, or an error
    assert names
