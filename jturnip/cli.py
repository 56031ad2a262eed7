"""The `jturnip` command: flags to options, results to the terminal."""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging
from absl.flags import argparse_flags

from jturnip import api, comparison, demo, doctor
from jturnip.errors import JTurnipError
from jturnip.models import llama


class UsageError(Exception):
    """What was named on the command line is not there, or not what it should be."""


def run() -> None:
    """Entry point of the `jturnip` command."""
    app.run(main, flags_parser=_parse_quietly)


def main(arguments: argparse.Namespace) -> int | str:
    """Does what `parse` found; the result is an exit status, or what went wrong."""
    try:
        return arguments.execute(arguments)
    except (JTurnipError, ImportError, UsageError) as error:
        return f"jturnip: {error}"


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line, program name first."""
    parser = argparse_flags.ArgumentParser(
        prog="jturnip", description="Run any JAX function in a byte budget."
    )
    parser.set_defaults(execute=lambda arguments: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_plan(commands)
    _add_compare(commands)
    _add_doctor(commands)
    return parser.parse_args(argv[1:])


def _parse_quietly(argv: list[str]) -> argparse.Namespace:
    arguments = parse(argv)
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING  # app.run would make it INFO
    return arguments


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _add_demo(commands: Any) -> None:
    what = "train a small Llama with jax.jit and in a quarter of its memory, side by side"
    parser = commands.add_parser("demo", help=what, description=what)
    defaults = demo.DemoOptions()
    parser.add_argument("--steps", type=int, default=defaults.steps, help="of each")
    parser.add_argument(
        "--size", choices=list(llama.SIZES), default=defaults.size, help="of the model"
    )
    parser.add_argument(
        "--budget_fraction",
        type=float,
        default=defaults.budget_fraction,
        help="jturnip's budget, as a share of what jax.jit needs",
    )
    parser.add_argument(
        "--link_gbps",
        type=float,
        default=defaults.link_gbps,
        help="simulate a link of this many gigabytes per second each way",
    )
    parser.set_defaults(execute=lambda arguments: _demo(parser, arguments))


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    names = [field.name for field in dataclasses.fields(demo.DemoOptions)]
    try:
        options = demo.DemoOptions(**{name: getattr(arguments, name) for name in names})
    except ValueError as error:
        parser.error(str(error))
    result = demo.run_demo(options)
    print(demo.render(result))
    return 0 if result.agrees else 1


def _add_plan(commands: Any) -> None:
    what = "plan a function in a budget, and say what limits it; nothing runs"
    parser = commands.add_parser("plan", help=what, description=what)
    _add_function(parser)
    parser.add_argument(
        "--gpu_bytes", help='the budget, such as "8GiB"; by default the function\'s own'
    )
    parser.add_argument("--strategy", default="auto", help="see jturnip.jit")
    parser.set_defaults(execute=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    fn, args = _function(arguments)
    if arguments.gpu_bytes is not None or not isinstance(fn, api.Wrapped):
        fn = api.jit(_plain(fn), arguments.gpu_bytes, strategy=arguments.strategy)
    plan = fn.lower(*args).plan
    if arguments.json:
        print(json.dumps({**plan.to_json_dict(), "explained": plan.explain()}))
    else:
        print(plan.summary(), plan.explain(), sep="\n\n")
    return 0


def _add_compare(commands: Any) -> None:
    what = "run a function by stock jax.jit and in some budgets, side by side"
    parser = commands.add_parser("compare", help=what, description=what)
    _add_function(parser)
    parser.add_argument(
        "--gpu_bytes",
        default="0.5,0.25",
        help='budgets, such as "2GiB,0.5": sizes, or shares of what jax.jit needs',
    )
    parser.add_argument("--strategies", default="auto", help='such as "auto,layerwise"')
    known = ", ".join(comparison.BASELINES)
    parser.add_argument("--baselines", default="", help=f"some of: {known}")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each way")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw time and bytes moved, such as to curve.png"
    )
    parser.set_defaults(execute=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    fn, args = _function(arguments)
    try:
        found = comparison.compare(
            _plain(fn),
            *args,
            gpu_bytes=list(map(_budget, _listed(arguments.gpu_bytes))),
            strategies=_listed(arguments.strategies),
            baselines=_listed(arguments.baselines),
            rounds=arguments.rounds,
        )
    except ValueError as error:
        raise UsageError(error) from error
    print(found.to_json() if arguments.json else found)
    if arguments.plot:
        found.plot().savefig(arguments.plot, bbox_inches="tight")
    return 0 if found.agrees else 1


def _budget(said: str) -> str | float:
    try:
        share = float(said)
    except ValueError:
        return said
    return share if "." in said or share <= 1 else said


def _listed(said: str) -> list[str]:
    return [part.strip() for part in said.split(",") if part.strip()]


def _add_function(parser: Any) -> None:
    parser.add_argument("function", help="module:name of the function")
    parser.add_argument(
        "--args",
        required=True,
        help="module:name of its arguments: a tuple, or a function that gives one; for"
        " `plan` of arrays or jax.ShapeDtypeStructs",
    )
    parser.add_argument("--json", action="store_true", help="JSON, for programs")


def _function(arguments: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that is named, and its arguments."""
    if os.getcwd() not in sys.path:  # as `python -m` has it
        sys.path.insert(0, os.getcwd())
    fn, args = _named(arguments.function), _named(arguments.args)
    if callable(args):
        args = args()
    if not callable(fn):
        raise UsageError(f"{arguments.function} is a {type(fn).__name__}, no function")
    if not isinstance(args, tuple):
        raise UsageError(f"{arguments.args} gives a {type(args).__name__}, and not a tuple")
    return fn, args


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What is in a budget, without it."""
    return getattr(fn, "__wrapped__", fn) if isinstance(fn, api.Wrapped) else fn


def _named(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise UsageError(f"{name!r} does not name anything: write module:name")
    if module.endswith(".py"):
        better = module.removesuffix(".py").replace("/", ".")
        raise UsageError(f"{module!r} is a file: name the module, {better}:{attribute}")
    found = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"module {module} has no {attribute}")
        found = getattr(found, part)
    return found


def _add_doctor(commands: Any) -> None:
    what = "look at this machine and say what to change for jturnip to run well"
    commands.add_parser("doctor", help=what, description=what).set_defaults(execute=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    print(doctor.render(doctor.examine()))
    return 0
