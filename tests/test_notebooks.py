"""Every notebook runs from top to bottom, and is kept without outputs."""

import json
from pathlib import Path

import pytest


NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_from_top_to_bottom(path):
    scope = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"{path.name} cell {number}", "exec"), scope)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert not any(c.get("outputs") or c.get("execution_count") for c in cells)
