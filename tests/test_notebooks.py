"""Every notebook runs from top to bottom, shows what it should, and keeps no outputs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest


NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# What a notebook may need beside jturnip's own dependencies. What else is missing, such as
# matplotlib, a notebook must do without.
LIBRARIES = ("flax", "optax")

of_each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def cells_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def code_of(path: Path) -> list[ast.Module]:
    """The code cells."""
    return [
        ast.parse("".join(cell["source"]), f"{path.name} {cell['id']}")
        for cell in cells_of(path)
        if cell["cell_type"] == "code"
    ]


def run(cell: ast.Module, name: str, scope: dict[str, Any]) -> Any:
    """Runs a cell; gives the value of its last expression, as a notebook would show it."""
    *before, last = cell.body
    shown = isinstance(last, ast.Expr)
    statements = ast.Module(before if shown else cell.body, type_ignores=[])
    exec(compile(statements, name, "exec"), scope)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), name, "eval"), scope)
    return None


def test_there_are_notebooks_in_an_order():
    assert [path.name[0] for path in NOTEBOOKS] == list("123456")


@pytest.mark.story
@of_each_notebook
def test_notebook_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    code = code_of(path)
    imported = {
        name.split(".")[0]
        for cell in code
        for node in ast.walk(cell)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    for library in LIBRARIES:
        if library in imported or (library == "optax" and "llama" in ast.dump(code[0])):
            pytest.importorskip(library, exc_type=ImportError)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code):
        value = run(cell, f"{path.name} code cell {number}", scope)
        if hasattr(value, "_repr_html_"):
            html = value._repr_html_()
            assert html.startswith("<")
            assert html.count("<svg") == html.count("</svg>")


@of_each_notebook
def test_notebook_is_kept_without_outputs(path: Path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for number, cell in enumerate(notebook["cells"]):
        assert cell["id"] == f"cell-{number}"
        assert cell["metadata"] == {}
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@of_each_notebook
def test_notebook_begins_with_a_heading(path: Path):
    first = cells_of(path)[0]
    assert first["cell_type"] == "markdown"
    assert first["source"][0].startswith("# ")


@of_each_notebook
def test_notebook_checks_what_it_says(path: Path):
    statements = [node for cell in code_of(path) for node in ast.walk(cell)]
    checks = [node for node in statements if isinstance(node, ast.Assert)]
    assert checks, "a notebook says nothing that it does not check"


@of_each_notebook
def test_links_to_other_notebooks_lead_somewhere(path: Path):
    text = "".join("".join(cell["source"]) for cell in cells_of(path))
    linked = {part.split(")")[0] for part in text.split("](")[1:]}
    for name in linked:
        assert (path.parent / name).exists(), name
