"""The README and the docs: their code runs, their links lead somewhere, names agree."""

import ast
import doctest
import importlib.util
import inspect
import json
import pathlib
import re
import subprocess
import sys
import types

import jax.numpy as jnp
import pytest

import jturnip
import jturnip.api
import jturnip.comparison
import jturnip.errors


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


@pytest.mark.story
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


SITE = [page.relative_to(ROOT / "docs") for page in PAGES[1:]]


def test_the_navigation_of_the_site_lists_every_page_once():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- [^:]+: (.+)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(map(str, SITE))


def test_the_index_lists_every_page():
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([^)#]+)\)", text))
    assert listed == {str(page) for page in SITE} - {"index.md"}


@pytest.mark.parametrize("page", SITE, ids=str)
def test_pages_of_the_site_link_to_no_file_outside_it(page: pathlib.Path):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    targets = {t.partition("#")[0] for t in re.findall(r"\]\(([^)]+)\)", text)}
    for target in targets:
        if "://" not in target:
            linked = (ROOT / "docs" / page).parent / target
            assert linked.resolve().is_relative_to(ROOT / "docs"), target


def test_the_site_builds_without_a_warning(tmp_path: pathlib.Path):
    for needed in ("mkdocs", "mkdocstrings"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed; `make docs` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    built = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    for page in SITE:
        assert (tmp_path / page).with_suffix(".html").exists()


def messages() -> list[str]:
    """Every string in the source of jturnip, with `…` for what is filled in."""
    found = []
    for file in sorted((ROOT / "jturnip").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                constants = (getattr(part, "value", None) for part in node.values)
                found.append("".join(c if isinstance(c, str) else "…" for c in constants))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_troubleshooting_has_a_section_for_every_error():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    errors = {
        name
        for name, value in vars(jturnip.errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    sections = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    assert errors - sections == {"JTurnipError"}, "the base, of which the page speaks first"


def test_troubleshooting_quotes_messages_that_jturnip_has():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(quoted) > 30
    known = messages()
    for message in quoted:
        for part in message.split("…"):
            assert any(part.strip() in each for each in known), message


def test_the_changelog_is_in_the_form_of_keep_a_changelog():
    text = (ROOT / "docs/changelog.md").read_text(encoding="utf-8")
    first, *released = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert first == "Unreleased"
    for heading in released:
        assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading), heading
    kinds = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    for section in re.split(r"^## .*", text, flags=re.MULTILINE)[1:]:
        found = re.findall(r"^### (.*)", section, re.MULTILINE)
        assert found == [kind for kind in kinds if kind in found], (
            "each once, in this order"
        )
        entries = re.findall(r"^- ", section, re.MULTILINE)
        assert not entries or section.index("### ") < section.index("\n- ")


def test_the_api_page_describes_every_public_name_and_no_other():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    described = re.findall(r"^### `jturnip\.(\w+)`$", text, re.MULTILINE)
    assert sorted(described) == sorted(public_names())


def test_the_reference_has_every_public_function_and_class():
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: jturnip\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(
        n for n in public_names() if callable(getattr(jturnip, n))
    )


def test_the_api_page_describes_every_field():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    for record in (jturnip.Plan, jturnip.RunReport, jturnip.SimulatedLink):
        for field in record.__dataclass_fields__:
            assert re.search(rf"\b{field}\b", text), f"{record.__name__}.{field}"


@pytest.mark.parametrize("module", [jturnip.api, jturnip.comparison])
def test_the_examples_in_docstrings_are_true(module: types.ModuleType):
    result = doctest.testmod(module)
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
