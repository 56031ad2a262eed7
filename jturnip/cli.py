"""The `jturnip` command: flags to options, results to the terminal."""

import argparse
import dataclasses
from typing import Any

from absl import app, flags, logging
from absl.flags import argparse_flags

from jturnip import demo, doctor
from jturnip.errors import JTurnipError
from jturnip.models import llama


def run() -> None:
    """Entry point of the `jturnip` command."""
    app.run(main, flags_parser=_parse_quietly)


def main(arguments: argparse.Namespace) -> int | str:
    """Does what `parse` found; the result is an exit status, or what went wrong."""
    try:
        return arguments.execute(arguments)
    except (JTurnipError, ImportError) as error:
        return f"jturnip: {error}"


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line, program name first."""
    parser = argparse_flags.ArgumentParser(
        prog="jturnip", description="Run any JAX function in a byte budget."
    )
    parser.set_defaults(execute=lambda arguments: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
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


def _add_doctor(commands: Any) -> None:
    what = "look at this machine and say what to change for jturnip to run well"
    commands.add_parser("doctor", help=what, description=what).set_defaults(execute=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    print(doctor.render(doctor.examine()))
    return 0
