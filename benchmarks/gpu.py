"""`make gpu`: everything that needs a GPU, in one command of under eight minutes.

Run with `python -m benchmarks.gpu`. Each part runs in a process of its own with a time
limit, since a peak cannot be reset and one failure must not lose the rest; the JSON file is
written again after each. `--tiny` runs all of it on any device, in seconds.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import gpu_fields, gpu_models, gpu_probes, measure
from benchmarks.gpu_probes import PROBES, SkippedError
from benchmarks.measure import Figure


_TINY = flags.DEFINE_bool("tiny", False, "Sizes that prove the script, and nothing else.")
_ONLY = flags.DEFINE_list("only", [], "Parts to run, by the beginning of their names.")
_SECONDS = flags.DEFINE_float("seconds", 340.0, "Nothing begins after this long.")
_OUT = flags.DEFINE_string("out", None, "The JSON file; by default named for the device.")
_LLAMA = flags.DEFINE_string(
    "llama",
    '1b {"layers": 8, "batch": 2, "length": 1024, "dtype": "bfloat16"}',
    "A size of the Llama, and what to change in it.",
)
_PAIR = flags.DEFINE_string(
    "pair", 'large {"length": 256, "blocks": 4}', "The same for the pair model."
)
_WORK = flags.DEFINE_string("work", None, "Internal: what this process is to do, as JSON.")

# What decides how JAX's memory behaves, set whatever the caller's environment says.
SETTINGS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_CLIENT_MEM_FRACTION": "0.75",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "default",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "64",
}
# Another name for one of them: JAX takes only one of both.
_OTHER_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_BUDGETS = (0.25, 0.5, 1.0)
# Of the models where the script is only tried.
_SIZES = {"llama": 'tiny {"layers": 1}', "pair": 'tiny {"blocks": 1}'}
_STRATEGIES = ("fixed_order", "turnip", "ahead", "layerwise", "on_demand")


@dataclass(frozen=True)
class Part:
    """One process."""

    name: str
    work: dict[str, Any]
    limit: float  # seconds
    settings: dict[str, str] = field(default_factory=dict[str, str])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    if _WORK.value:
        _work(json.loads(_WORK.value))
        return
    until = time.monotonic() + _SECONDS.value
    with tempfile.TemporaryDirectory() as folder:
        record = _new_record(pathlib.Path(folder))
        where = record["environment"]
        name = re.sub(r"[^a-z0-9.]+", "-", f"gpu-{where['device']}-{where['jax']}".lower())
        out = pathlib.Path(_OUT.value or measure.RESULTS / f"{name}.json")
        if where["platform"] == "cpu" and not (_TINY.value or _OUT.value):
            raise SystemExit("no GPU: JAX sees a CPU only. --tiny proves the script on it.")
        for part in _parts(where["platform"]):
            if _ONLY.value and not part.name.startswith(tuple(_ONLY.value)):
                continue
            left = until - time.monotonic()
            _run(part, left, pathlib.Path(folder), record)
            measure.write_json(out, record)
        print(f"\n{_verdict(record)}\nwritten to {out}")


def _new_record(folder: pathlib.Path) -> dict[str, Any]:
    """What a results file begins with; learns of the device in a process of its own."""
    record: dict[str, Any] = {"settings": SETTINGS, "tiny": _TINY.value, "sections": {}}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    part = Part("environment", {"environment": True}, 120.0)
    found = _process(dataclasses.replace(part, settings=cache), folder)
    if found.get("cache"):
        os.environ.update(cache)
    else:
        found = {**found, **_process(part, folder)}
    if "environment" not in found:
        raise SystemExit(f"JAX does not start here: {found}")
    record["environment"] = found["environment"]
    record["processes share compiled executables"] = bool(found.get("cache"))
    print(measure.in_words(record["environment"]), flush=True)
    return record


def _parts(platform: str) -> Iterator[Part]:
    """The most telling first: what the time does not suffice for is left out."""
    problems = [_problem(*each) for each in itertools.product(("train", "forward"), _SIZES)]
    least, *more = _BUDGETS[:1] if _TINY.value else _BUDGETS
    fields = dict.fromkeys(gpu_fields.TIMES, 1) if _TINY.value else gpu_fields.TIMES
    for at, one in enumerate(problems):
        yield Part(f"{one['title']}, all the memory", {**one, "share": None}, 110.0)
        yield Part(f"{one['title']}, {least:.0%}", {**one, "share": least}, 75.0)
        if at == 0:
            yield Part("parts in host memory", {"probes": ["host_parts"]}, 30.0)
    yield Part("fields", {"fields": fields}, 150.0)
    for one, share in itertools.product(problems, more):
        yield Part(f"{one['title']}, {share:.0%}", {**one, "share": share}, 75.0)
    strategies = _STRATEGIES[: 2 if _TINY.value else None]
    for one in problems[:2]:
        work = {**one, "share": least, "strategies": strategies}
        yield Part(f"{one['title']}, {least:.0%}, by strategy", work, 150.0)
    yield Part("probes", {"probes": [n for n in PROBES if n != "host_parts"]}, 150.0)
    yield Part("marks", {"marks": True}, 60.0)
    if platform != "cpu":
        names = ["sync_rule", "race", "freeing"]
        settings = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
        yield Part("probes with cuda_async", {"probes": names}, 60.0, settings)


def _problem(mode: str, model: str) -> dict[str, Any]:
    """What a process is told of a model, and what its parts are called by."""
    words = _SIZES[model] if _TINY.value else {"llama": _LLAMA, "pair": _PAIR}[model].value
    size, _, changes = words.partition(" ")
    changed = json.loads(changes or "{}")
    if (model, mode) == ("llama", "forward"):
        changed["batch"] = 1  # else the logits alone are most of a small budget
    named = {"model": model, "mode": mode, "size": size, "changes": changed}
    return {**named, "title": f"{model} {mode}", "strategies": ()}


def _run(part: Part, left: float, folder: pathlib.Path, record: dict[str, Any]) -> None:
    """Adds one part's sections to the record, and shows them."""
    sections = record["sections"]
    began = time.monotonic()
    if left < 5:
        found: dict[str, Any] = {
            part.name: {"figures": [], "error": "skipped: no time left"}
        }
    elif part.work.get("marks"):
        found = {part.name: _marks(min(part.limit, left))}
    else:
        limit = min(part.limit, left)
        found = _process(Part(part.name, part.work, limit, part.settings), folder)
        if part.settings:
            found = {f"{name}, cuda_async": section for name, section in found.items()}
    seconds = round(time.monotonic() - began, 1)
    for name, section in found.items():
        section["process_seconds"] = seconds
        sections[name] = section
        figures = measure.figures_of(section)
        print(f"\n{name}" + (f": {section['error']}" if "error" in section else ""))
        if figures:
            print(*measure.table(figures), sep="\n", flush=True)


def _environment() -> dict[str, str]:
    """The caller's, with our settings."""
    return {**{k: v for k, v in os.environ.items() if k != _OTHER_NAME}, **SETTINGS}


def _process(part: Part, folder: pathlib.Path) -> dict[str, Any]:
    """Runs a part; what it had found when it failed or ran out of time still counts."""
    out = folder / "found.json"
    out.unlink(missing_ok=True)
    work = {**part.work, "name": part.name, "folder": str(folder), "out": str(out)}
    work |= {"tiny": _TINY.value, "limit": part.limit}
    command = [sys.executable, "-m", "benchmarks.gpu", "--work", json.dumps(work)]
    environment = {**_environment(), **part.settings}
    error = ""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=part.limit
        )
        if done.returncode:
            error = f"exit status {done.returncode}: {done.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        error = f"stopped after {part.limit:.0f} s"
    found = json.loads(out.read_text()) if out.exists() else {}
    if error:
        last = found.setdefault(list(found)[-1] if found else part.name, {"figures": []})
        last.setdefault("error", error)
    return found


def _marks(limit: float) -> dict[str, Any]:
    """The benchmark of completion marks, whose lines are kept as they are."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        repeats = 5 if _TINY.value else 100
        command = [sys.executable, "-m", "benchmarks.marks", f"--repeats={repeats}"]
        try:
            done = subprocess.run(
                [*command, f"--json={file.name}"],
                env=_environment(),
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return {"figures": [], "error": f"stopped after {limit:.0f} s"}
        text = pathlib.Path(file.name).read_text()
    if done.returncode or not text:
        error = f"exit status {done.returncode}: {done.stderr[-2000:]}"
        return {"figures": [], "error": error}
    print(done.stdout)
    return {"figures": [], "marks": json.loads(text)}


def _verdict(record: dict[str, Any]) -> str:
    sections: dict[str, Any] = record["sections"]
    figures = [(n, f) for n, section in sections.items() for f in section["figures"]]
    missed = [f"missed: {n}: {f['name']}" for n, f in figures if f["verdict"] == "MISS"]
    ended = [
        f"{n}: {section['error'][:200]}"
        for n, section in sections.items()
        if "error" in section
    ]
    skipped = [each for each in ended if ": skipped: " in each]
    failed = [f"failed: {each}" for each in ended if each not in skipped]
    counts = (
        f"{len(figures)} figures; {len(missed)} targets missed, {len(failed)} parts failed,"
        f" {len(skipped)} skipped"
    )
    return "\n  ".join([counts, *missed, *failed, *skipped])


# -- in a process of its own -----------------------------------------------------------


def _work(work: dict[str, Any]) -> None:
    out = pathlib.Path(work["out"])
    if work.get("environment"):
        found: dict[str, Any] = {"environment": measure.environment()}
        measure.write_json(out, found)
        measure.write_json(out, {**found, "cache": _cache_keeps_sizes()})
        return
    found = {}
    if "probes" in work:
        scale = gpu_probes.TINY if work["tiny"] else gpu_probes.FULL
        for name in work["probes"]:
            _collect(name, lambda n=name: PROBES[n](scale), 30.0, found, out)
    elif "fields" in work:
        for name, times in work["fields"].items():
            figures = lambda n=name, t=times: gpu_fields.field(n, t)
            _collect(name, figures, 30.0, found, out)
    else:
        _collect(work["name"], lambda: _model(work), work["limit"], found, out)


def _cache_keeps_sizes() -> bool:
    """Whether an executable from JAX's cache on disk still tells its workspace."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return False
    sizes: list[int] = []
    for _ in range(2):
        jax.clear_caches()
        struct = jax.ShapeDtypeStruct((512, 512), np.float32)
        compiled = jax.jit(lambda x: jnp.sort(x @ x, axis=0) @ x).lower(struct).compile()
        analysis: Any = compiled.memory_analysis()
        sizes.append(analysis.temp_size_in_bytes)
    return sizes[0] == sizes[1] > 0


def _model(work: dict[str, Any]) -> Iterator[Figure]:
    one = gpu_models.problem(work["model"], work["mode"], work["size"], work["changes"])
    left = pathlib.Path(work["folder"]) / f"{work['model']}-{work['mode']}.json"
    repeats = 2 if work["tiny"] else 5
    if work["share"] is None:
        return gpu_models.baseline(one, repeats, lambda r: measure.write_json(left, r))
    if not left.exists():
        raise SkippedError("jax.jit's own run failed, and with it what to compare with")
    before = json.loads(left.read_text())
    return gpu_models.budgeted(one, work["share"], before, repeats, work["strategies"])


def _collect(
    name: str,
    figures: Callable[[], Iterator[Figure]],
    limit: float,
    found: dict[str, Any],
    out: pathlib.Path,
) -> None:
    """Writes each figure as it comes, and what ended them."""
    section: dict[str, Any] = {"figures": []}
    found[name] = section
    began = time.perf_counter()
    try:
        with _time_limit(limit):
            for figure in figures():
                section["figures"].append(figure.to_json_dict())
                measure.write_json(out, found)
    except SkippedError as why:
        section["error"] = f"skipped: {why}"
    except Exception as error:
        section["error"] = f"{type(error).__name__}: {error}"
    section["seconds"] = round(time.perf_counter() - began, 2)
    measure.write_json(out, found)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after so long, wherever Python is by then."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    app.run(main)
