"""What an installation of jturnip has: its version, its types, a wheel, an sdist."""

import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import jturnip


ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# What a user may write. A type checker finds fault with the lines that say so, no others.
PROGRAM = """\
import jax

import jturnip


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return sum((w * x for w in weights), x)


def run(weights: list[jax.Array], x: jax.Array) -> jturnip.RunReport | None:
    link = jturnip.SimulatedLink(h2d_bytes_per_second=1e9, d2h_bytes_per_second=1e9)
    jturnip.SimulatedLink("fast", "slow")  # wrong
    step = jturnip.jit(loss, gpu_bytes="1GiB", donate_argnums=0, link=link)
    jturnip.jit(loss, gpu_byte="1GiB")  # wrong
    jturnip.jit(loss, gpu_bytes=[1])  # wrong
    held: list[jax.Array] = jturnip.host(weights)
    count: int = jturnip.host(weights)  # wrong
    back: list[jax.Array] = jturnip.device(held)
    plan: jturnip.Plan = step.lower(held, x).plan
    seconds: float = plan.predicted_seconds
    text: str = plan.summary()
    plan.peak_byte  # wrong
    try:
        step(back, x)
    except jturnip.DoesNotFit as error:
        needed: int = error.needed_bytes
        print(count, needed, seconds, text)
    except (jturnip.HostMemoryError, jturnip.JTurnipError):
        pass
    jturnip.no_such_name  # wrong
    return step.last_run


@jturnip.jit(gpu_bytes=2**20)
def twice(x: jax.Array) -> jax.Array:
    return 2 * x


function: jturnip.Wrapped = twice
report: jturnip.RunReport | None = function.last_run
text: str = function.last_run  # wrong
"""


def test_the_version_is_said_once():
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    said_in = PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"]
    text = (ROOT / said_in).read_text(encoding="utf-8")
    assert text.count(f'__version__ = "{jturnip.__version__}"') == 1


def test_what_is_installed_has_the_version_of_the_package():
    try:
        installed = importlib.metadata.version("jturnip")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jturnip is on the path and not installed")
    assert installed == jturnip.__version__


def test_type_checkers_are_told_that_there_are_types():
    assert importlib.resources.files("jturnip").joinpath("py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_the_command_that_is_installed_exists():
    (target,) = PROJECT["project"]["scripts"].values()
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def pyright() -> str:
    """The path of a pyright that starts, else the test is skipped."""
    beside = pathlib.Path(sys.executable).parent
    found = shutil.which("pyright", path=beside) or shutil.which("pyright")
    if found is None:
        pytest.skip("pyright is not installed; `make check` installs it")
    if subprocess.run([found, "--version"], capture_output=True).returncode:
        pytest.skip(f"{found} does not start")
    return found


def test_a_type_checker_understands_a_program_of_a_user(tmp_path: pathlib.Path):
    command = pyright()
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    settings = {
        "extraPaths": [str(pathlib.Path(jturnip.__file__).parent.parent)],
        "reportUnusedExpression": False,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    said = subprocess.run(
        [
            command,
            "--outputjson",
            "--pythonpath",
            sys.executable,
            "--project",
            str(tmp_path),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    ).stdout
    said = json.loads(said[said.index("{") :])
    assert said["summary"]["filesAnalyzed"] == 1
    found = {
        each["range"]["start"]["line"]
        for each in said["generalDiagnostics"]
        if each["severity"] == "error"
    }
    lines = PROGRAM.splitlines()
    wrong = {i for i, line in enumerate(lines) if line.endswith("# wrong")}
    assert found == wrong, said["generalDiagnostics"]


def built(kind: str, folder: pathlib.Path) -> pathlib.Path:
    """Builds the project with what is installed; skips the test if that is too little."""
    needed = ("build", "scikit_build_core") + ("nanobind",) * (kind == "wheel")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation"]
    out, scratch = folder / "out", folder / "scratch"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    made = subprocess.run(
        [*command, f"-Cbuild-dir={scratch}", "--outdir", str(out), str(ROOT)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (file,) = out.iterdir()
    return file


@pytest.mark.slow
def test_a_wheel_has_the_package_and_nothing_else(tmp_path: pathlib.Path):
    wheel = built("wheel", tmp_path)
    assert wheel.name.startswith(f"jturnip-{jturnip.__version__}-")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"jturnip"}
    package = ROOT / "jturnip"
    expected = {
        str(file.relative_to(ROOT))
        for file in package.rglob("*")
        if file.suffix in (".py", ".pyi", ".typed") or file.name == "py.typed"
    }
    native = {name for name in names if name.startswith("jturnip/native/_native.")}
    compiled = native - expected
    assert len(compiled) == 1
    assert {n for n in names if n.startswith("jturnip/")} == expected | compiled


@pytest.mark.slow
def test_an_sdist_has_what_it_takes_to_build_and_no_leavings(tmp_path: pathlib.Path):
    sdist = built("sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert {"jturnip/py.typed", "jturnip/__init__.py", "xla_ext/CMakeLists.txt"} <= names
    tops = {name.split("/")[0] for name in names}
    assert not {t for t in tops if t.startswith(".") or t in ("build", "dist")}
    assert not {n for n in names if n.endswith((".so", ".pyc")) or "__pycache__" in n}
