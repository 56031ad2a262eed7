"""JAX's own tests of `jax.jit`, run with `jturnip.jit` standing in its place.

They are read from a checkout of JAX at the tag of the installed version:

  git clone --depth=1 --branch=jax-v0.10.2 https://github.com/jax-ml/jax /tmp/jax
  python tests/against_jax.py /tmp/jax --strategy=turnip

Prints how many of the tests that pass with stock JAX pass so, and names the others with the
last line of their errors.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any


# Those that call `jax.jit` most.
FILES = (
    "api_test",
    "lax_control_flow_test",
    "mutable_array_test",
    "python_callback_test",
    "nn_test",
    "aot_test",
)
_ASKED = "JTURNIP_IN_PLACE_OF_JAX_JIT"


def pytest_configure() -> None:
    """As a pytest plugin: puts `jturnip.jit` in the place of `jax.jit`, if asked to."""
    strategy = os.environ.get(_ASKED)
    if not strategy:
        return
    import jax

    import jturnip

    stock = jax.jit

    def jit(*args: Any, **keywords: Any) -> Any:
        # What jturnip and JAX do themselves is not what is tried.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] in ("jturnip", "jax"):
            return stock(*args, **keywords)
        return jturnip.jit(*args, strategy=strategy, **keywords)

    jax.jit = jit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--strategy", default="turnip")
    parser.add_argument("--files", default=",".join(FILES))
    parser.add_argument("--only", default="", help="as pytest's -k")
    parser.add_argument("--jobs", default="auto")
    parser.add_argument("--stock", type=Path, help="what stock JAX does; made if missing")
    parser.add_argument("--list", type=Path, help="where the tests that fail are written")
    flags = parser.parse_args()
    names = flags.files.split(",")
    run = functools.partial(_run, flags.checkout, names, flags.only, flags.jobs)
    if flags.stock is not None and flags.stock.exists():
        stock = json.loads(flags.stock.read_text())
    else:
        stock = run("")
        if flags.stock is not None:
            flags.stock.write_text(json.dumps(stock))
    ours = run(flags.strategy)
    passing = [t for t in stock if stock[t] == "passed" and (t in ours or not flags.only)]
    failing = {t: ours.get(t, "missing") for t in passing if ours.get(t) != "passed"}
    for test, outcome in sorted(failing.items()):
        print(f"{test}: {outcome}")
    print(
        f"strategy={flags.strategy}: {len(passing) - len(failing)} of the {len(passing)}"
        " that pass with jax.jit"
    )
    if flags.list is not None:
        flags.list.write_text("".join(f"{test}\n" for test in sorted(failing)))
    sys.exit(bool(failing))


def _run(
    checkout: Path, names: list[str], only: str, jobs: str, strategy: str
) -> dict[str, str]:
    """Test → "passed", "skipped" or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-q"]
        command += ["-c", f"{folder}/pytest.ini", "-p", "no:cacheprovider", "-n", jobs]
        command += ["--junitxml", str(found), "--tb=line", *(["-k", only] if only else [])]
        command += [str(checkout / "tests" / f"{name}.py") for name in names]
        env = {
            **os.environ,
            _ASKED: strategy,
            "PYTHONPATH": str(Path(__file__).parent),
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
        }
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False)
        return dict(map(_outcome, ElementTree.parse(found).iter("testcase")))


def _outcome(case: Any) -> tuple[str, str]:
    name = f"{case.get('classname').removeprefix('tests.')}.{case.get('name')}"
    for what in ("failure", "error", "skipped"):
        element = case.find(what)
        if element is not None:
            said = (element.get("message") or "").strip().splitlines() or [""]
            return name, "skipped" if what == "skipped" else said[0][:300]
    return name, "passed"


if __name__ == "__main__":
    main()
