"""The README and the docs: their code runs, their links lead somewhere, names agree."""

import doctest
import json
import pathlib
import re
import types

import jax.numpy as jnp
import pytest

import jturnip
import jturnip.api


ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def code_blocks(page: pathlib.Path) -> list[str]:
    """The page's Python, each block after as many empty lines as stand before it."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in BLOCK.finditer(text)]


def anchors(page: pathlib.Path) -> set[str]:
    """What links within a page can name: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def public_names() -> set[str]:
    """What `jturnip/__init__.py` offers."""
    found = vars(jturnip).items()
    return {
        name
        for name, value in found
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if code_blocks(p)],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for block in code_blocks(page):
        exec(compile(block, str(page), "exec"), names)


@pages
def test_links_lead_somewhere(page: pathlib.Path):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_api_page_describes_every_public_name_and_no_other():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    described = re.findall(r"^### `jturnip\.(\w+)`$", text, re.MULTILINE)
    assert sorted(described) == sorted(public_names())


def test_the_api_page_describes_every_field():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    for record in (jturnip.Plan, jturnip.RunReport, jturnip.SimulatedLink):
        for field in record.__dataclass_fields__:
            assert re.search(rf"\b{field}\b", text), f"{record.__name__}.{field}"


def test_the_examples_in_docstrings_are_true():
    result = doctest.testmod(jturnip.api)
    assert result.attempted
    assert not result.failed


def keys(plain: object) -> set[str]:
    """Every key of a JSON value, however deep."""
    if isinstance(plain, dict):
        return set(plain).union(*map(keys, plain.values()))
    return set().union(*map(keys, plain)) if isinstance(plain, list) else set()


def test_the_design_describes_every_key_of_a_plan():
    page = (ROOT / "docs/design/000-overview.md").read_text(encoding="utf-8")
    schema = page.partition("## A plan as JSON")[2]
    described = {
        name
        for row in re.findall(r"^\| ([^|]*) \|", schema, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    x = jnp.ones((64, 64))
    # One that writes over its argument has every key there may be.
    f = jturnip.jit(lambda x: x + 1, "1MiB", strategy="turnip", donate_argnums=0)
    plan = f.lower(x).plan
    assert described == keys(json.loads(plan.to_json()))


def test_two_commands_stand_at_the_top_of_the_readme():
    top = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert "make demo" in top
    assert "make test" in top
