"""`make bench`: every CPU benchmark; writes docs/benchmarks.md and a JSON file.

Run with `python -m benchmarks.cpu [--only=fits,loop]`. What is left out keeps its last
figures. Each section has a process of its own. Nothing else should run on the machine
meanwhile.
"""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from absl import app, flags

from benchmarks import (
    again,
    axes,
    batches,
    calls,
    generating,
    growth,
    layers,
    lengths,
    link,
    measure,
    mistaken,
    planning,
    predictions,
    stencils,
    steps,
)
from benchmarks.measure import Section
from jturnip.models import llama, pair


_ONLY = flags.DEFINE_list("only", [], "Sections to measure; all by default.")
_TINY = flags.DEFINE_bool("tiny", False, "Sizes that prove the script, and nothing else.")
_JSON = flags.DEFINE_string("json", str(measure.RESULTS / "cpu.json"), "Results.")
_DOCS = flags.DEFINE_string("docs", str(measure.ROOT / "docs/benchmarks.md"), "Tables.")

_THIS = sys.executable, "-m", "benchmarks.cpu"
BEGIN, END = "<!-- begin: written by make bench -->", "<!-- end: written by make bench -->"
_FRAME = f"""# Benchmarks

What jturnip promises about speed, measured on a CPU by `make bench`; it writes the tables
below. Each figure is the median of samples; ratios are of two ways that took turns in one
process, each pair neighbours in time. What needs a GPU is measured by `make gpu`, whose
results lie under `benchmarks/results/`.

{BEGIN}
{END}
"""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    fits: llama.LlamaConfig
    split: llama.LlamaConfig  # a step takes about a second
    link: llama.LlamaConfig
    layers: llama.LlamaConfig
    pairs: int
    split_pairs: int
    loop_tasks: int
    planned: tuple[int, ...]
    plan_rounds: int
    budgets: tuple[float, ...]
    link_rounds: int
    depths: tuple[int, int]
    layer_pairs: int
    grown: tuple[int, ...]
    grown_pairs: int  # of the largest; of smaller ones more
    long: int
    long_pairs: int
    residues: int
    pair: pair.PairConfig
    predicted: tuple[float, ...]
    called: tuple[float, ...]
    generating: llama.LlamaConfig
    tokens: int


FULL = Sizes(
    fits=llama.config("bench", layers=3, batch=2),
    split=llama.config("bench"),
    link=llama.config("bench", layers=4, batch=2, length=64),
    layers=llama.config("small"),
    pairs=25,
    split_pairs=7,
    loop_tasks=400,
    planned=(1_000, 3_000, 10_000, 30_000, 100_000),
    plan_rounds=2,
    budgets=(0.5, 0.25, 0.1),
    link_rounds=3,
    depths=(4, 32),
    layer_pairs=3,
    grown=(500, 1_000, 2_000, 4_000, 8_000),
    grown_pairs=1,
    long=1024,
    long_pairs=9,
    residues=48,
    pair=pair.config("bench"),
    predicted=(0.5, 0.25, 0.125),
    called=(1.0, 0.9, 0.5, 0.25),
    generating=llama.config("400m", layers=12),
    tokens=8,
)
_TINIEST = llama.config("tiny", layers=1, length=8, width=16, heads=2, kv_heads=1)
TINY = Sizes(
    fits=_TINIEST,
    split=_TINIEST,
    link=_TINIEST,
    layers=_TINIEST,
    pairs=2,
    split_pairs=2,
    loop_tasks=5,
    planned=(500, 1_000),
    plan_rounds=1,
    budgets=(0.5,),
    link_rounds=1,
    depths=(1, 2),
    layer_pairs=1,
    grown=(50, 100),
    grown_pairs=1,
    long=64,
    long_pairs=1,
    residues=8,
    pair=pair.config("tiny"),
    predicted=(0.5,),
    called=(0.9,),
    generating=_TINIEST,
    tokens=2,
)

SECTIONS: dict[str, Callable[[Sizes], Section]] = {
    "fits": lambda s: steps.fits(s.fits, s.pairs),
    "split": lambda s: steps.split(s.split, s.split_pairs),
    "loop": lambda s: steps.loop(s.loop_tasks, s.pairs),
    "planning": lambda s: planning.planning(s.planned, s.plan_rounds),
    "link": lambda s: link.link(s.link, s.budgets, s.link_rounds),
    "layers": lambda s: layers.layers(
        functools.partial(_with_layers, s.layers), *s.depths, s.layer_pairs
    ),
    "growth": lambda s: growth.growth(s.grown, s.grown_pairs),
    "axes": lambda s: axes.axes(s.long, s.long_pairs),
    "lengths": lambda s: lengths.lengths(s.long, s.residues),
    "predictions": lambda s: predictions.predictions(
        s.link, s.pair, s.predicted, s.link_rounds
    ),
    "calls": lambda s: calls.calls(s.link, s.called, s.link_rounds),
    "batches": lambda s: batches.batches(s.link, s.budgets, s.link_rounds),
    "again": lambda s: again.again(s.pair, s.predicted, s.link_rounds + 2),
    "generating": lambda s: generating.generating(
        s.generating, s.predicted, s.tokens, s.link_rounds
    ),
    "mistaken": lambda s: mistaken.mistaken(s.link, s.pair, s.predicted),
    "stencils": lambda s: stencils.stencils(3 * s.long // 2, s.long_pairs),
}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    unknown = [name for name in _ONLY.value if name not in SECTIONS]
    if unknown:
        raise app.UsageError(f"--only={unknown[0]}: there are {', '.join(SECTIONS)}")
    names = _ONLY.value or list(SECTIONS)
    results, docs = pathlib.Path(_JSON.value), pathlib.Path(_DOCS.value)
    if len(names) == 1:
        _measure(names[0], results, docs)
    else:
        for name in names:  # what one leaves of the C library's heap changes the next
            subprocess.run([*_THIS, *sys.argv[1:], f"--only={name}"], check=True)
    record = json.loads(results.read_text())
    missed = [
        f"{name}: {f['name']}"
        for name in names
        for f in record[name]["figures"]
        if f["verdict"] == "MISS"
    ]
    print(f"\n{len(missed)} targets missed{': ' if missed else ''}{'; '.join(missed)}")


def _measure(name: str, results: pathlib.Path, docs: pathlib.Path) -> None:
    """Measures a section, prints it, and writes it down."""
    record = json.loads(results.read_text()) if results.exists() else {}
    where, began = measure.environment(), time.perf_counter()
    section = SECTIONS[name](TINY if _TINY.value else FULL)
    seconds = round(time.perf_counter() - began, 1)
    print(f"\n## {section.title}\n", *measure.table(section.figures), sep="\n", flush=True)
    print(f"({seconds} s)", flush=True)
    record[name] = {
        **section.to_json_dict(),
        "environment": where,
        "seconds": seconds,
        "tiny": _TINY.value,
    }
    measure.write_json(results, record)
    write_docs(docs, record)


def _with_layers(model: llama.LlamaConfig, count: int) -> llama.LlamaConfig:
    return dataclasses.replace(model, layers=count)


def write_docs(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Replaces what is between the markers with the tables of all sections."""
    text = path.read_text(encoding="utf-8") if path.exists() else _FRAME
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    lines: list[str] = []
    for name in (name for name in SECTIONS if name in record):
        section = record[name]
        figures = measure.figures_of(section)
        lines += [f"## {section['title']}", "", section["text"], ""]
        lines += [*measure.table(figures), ""]
        lines += [f"On {measure.in_words(section['environment'])}.", ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(lines)
    path.write_text(f"{before}{BEGIN}\n\n{body}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
