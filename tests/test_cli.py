"""The `jturnip` command, the demo's table and the doctor's advice."""

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import jax
import pytest

from jturnip import cli, demo, doctor, placement
from jturnip.models import llama


def execute(*arguments: str) -> int | str:
    return cli.main(cli.parse(["jturnip", *arguments]))


# The command


@pytest.mark.long
def test_no_command_prints_help_and_fails():
    ran = subprocess.run([sys.executable, "-m", "jturnip"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "demo" in ran.stdout
    assert "doctor" in ran.stdout


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        execute("dance")
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--steps=0", "--budget_fraction=0", "--link_gbps=-1"])
def test_demo_flags_out_of_range_are_usage_errors(
    flag: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        execute("demo", flag)
    assert "must be" in capsys.readouterr().err


def test_a_missing_package_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    message = execute("demo", "--size=tiny")
    assert isinstance(message, str)
    assert 'pip install "jturnip[demo]"' in message


# The demo


def a_training(losses: tuple[float, ...], **changed: int | float) -> demo.Training:
    figures = {"peak_bytes": 2**30, "seconds": 1.0, "setup_seconds": 3.0, **changed}
    return demo.Training(losses, **figures)


def a_result(losses: tuple[float, ...]) -> demo.DemoResult:
    return demo.DemoResult(
        options=demo.DemoOptions(steps=2),
        model=llama.config("demo"),
        parameters=1_234_567,
        device="abacus",
        gpu_bytes=2**28,
        strategy="ours",
        stock=a_training((5.5, 4.25)),
        budgeted=a_training(
            losses, peak_bytes=2**27, h2d_bytes=3 * 2**30, d2h_bytes=0, stall_seconds=0.125
        ),
    )


def cells(table: str) -> dict[str, list[str]]:
    """The table's rows by name; its cells are apart by two spaces or more."""
    rows = (re.split(r" {2,}", line.strip()) for line in table.splitlines())
    return {name: rest for name, *rest in rows if rest}


def test_the_table_shows_both_trainings_side_by_side():
    assert cells(demo.render(a_result((5.5, 4.250001)))) == {
        "jax.jit": ["jturnip.jit"],
        "loss of step 1": ["5.500000", "5.500000", "differ by 0.0e+00"],
        "loss of step 2": ["4.250000", "4.250001", "differ by 1.0e-06"],
        "peak bytes on the device": ["1 GiB", "128 MiB", "x 0.12"],
        "moved to the device, a step": ["-", "3 GiB"],
        "moved to the host, a step": ["-", "0 B"],
        "seconds, a step": ["1.000", "1.000", "x 1.00"],
        "waiting for transfers, a step": ["-", "0.125"],
        "setting up, once": ["3.000", "3.000", "x 1.00"],
    }


@pytest.mark.parametrize("last", [4.3, float("nan")])
def test_losses_apart_are_said_to_be_so(last: float):
    result = a_result((5.5, last))
    assert not result.agrees
    assert "DO NOT agree" in demo.render(result)


def test_peak_bytes_count_a_donated_argument_once():
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(
        jax.ShapeDtypeStruct((1024,), "float32")
    )
    assert demo.peak_bytes(compiled.compile()) == 4096


@pytest.mark.story
def test_the_tiny_demo_keeps_its_budget_and_agrees(capsys: pytest.CaptureFixture[str]):
    flags = ["--size=tiny", "--steps=2", "--budget_fraction=0.7", "--link_gbps=1"]
    assert execute("demo", *flags) == 0
    rows = cells(capsys.readouterr().out)
    assert len(rows["loss of step 2"]) == 3
    assert float(rows["peak bytes on the device"][-1].removeprefix("x ")) <= 0.7
    assert rows["moved to the device, a step"][-1] != "0 B"


# The doctor


def test_the_doctor_reports_on_each_topic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "LINK_SIZES", (doctor.MIB,))
    assert execute("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    topics = "python jturnip jax jaxlib numpy xla_ext host backend device memories link"
    for topic in topics.split():
        assert any(line[2:].split()[:1] == [topic] for line in lines), topic
    assert any(re.search(r"link both +\d+\.\d\d GB/s at 1 MiB", line) for line in lines)


def test_the_report_marks_what_has_advice_and_counts_it():
    findings = [
        doctor.Finding("wheel", "round"),
        doctor.Finding("road", "wet", "Drive slowly."),
    ]
    assert doctor.render(findings).splitlines() == [
        "  wheel  round",
        "! road   wet",
        "         -> Drive slowly.",
        "",
        "1 to look at, marked !",
    ]
    assert doctor.render(findings[:1]).endswith("Nothing to fix.")


def test_a_backend_that_does_not_start_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def fail():
        raise RuntimeError("no such card")

    monkeypatch.setattr(jax, "local_devices", fail)
    last = doctor.examine()[-1]
    assert "no such card" in last.found
    assert last.advice


def test_an_unused_gpu_is_pointed_out(tmp_path: pathlib.Path):
    driver = tmp_path / "version"
    assert [each.advice for each in doctor.accelerator("cpu", driver)] == [""]
    driver.touch()
    assert "jturnip[cuda13]" in next(doctor.accelerator("cpu", driver)).advice
    assert [each.advice for each in doctor.accelerator("gpu", driver)] == [""]


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        ({doctor.FRACTION: "0.8"}, ["", ""]),
        ({}, ["", f"set {doctor.FRACTION}"]),
        ({doctor.FRACTION: "0.95"}, [f"set {doctor.ALLOCATOR}=cuda_async", ""]),
        ({doctor.FRACTION: "0.95", doctor.ALLOCATOR: "cuda_async"}, ["", ""]),
        ({doctor.FRACTION: "0.8", doctor.ALLOCATOR: "platform"}, ["Unset", ""]),
        ({doctor.FRACTION: "0.8", doctor.PREALLOCATE: "false"}, ["", "unset"]),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}, [doctor.ALLOCATOR, ""]),
    ],
)
def test_allocator_settings_are_judged(environ: dict[str, str], advice: list[str]):
    findings = list(doctor.allocator(environ))
    assert [each.topic for each in findings] == ["allocator", "preallocation"]
    for finding, expected in zip(findings, advice, strict=True):
        assert expected in finding.advice
        assert bool(expected) == bool(finding.advice)


@pytest.mark.parametrize(
    ("setting", "libc", "environ", "found"),
    [
        ("always [madvise] never", ("glibc", "2.36"), {}, [f"{doctor.HUGE_PAGES}=1"]),
        ("always [madvise] never", ("glibc", "2.36"), {"GLIBC_TUNABLES": "a=1"}, ["set"]),
        (
            "always [madvise] never",
            ("glibc", "2.36"),
            {"GLIBC_TUNABLES": "a=1:glibc.malloc.hugetlb=1"},
            [""],
        ),
        ("[always] madvise never", ("glibc", "2.36"), {}, [""]),
        ("always madvise [never]", ("glibc", "2.36"), {}, [""]),
        ("always [madvise] never", ("glibc", "2.31"), {}, []),
        ("always [madvise] never", ("", ""), {}, []),
        (None, ("glibc", "2.36"), {}, []),
    ],
)
def test_large_pages_are_asked_for_where_the_kernel_has_them(
    tmp_path: pathlib.Path,
    setting: str | None,
    libc: tuple[str, str],
    environ: dict[str, str],
    found: list[str],
):
    kernel = tmp_path / "enabled"
    if setting is not None:
        kernel.write_text(setting)
    findings = list(doctor.pages(environ, kernel, libc))
    assert len(findings) == len(found)
    for finding, expected in zip(findings, found, strict=True):
        assert expected in finding.advice
        assert bool(expected) == bool(finding.advice)


@pytest.mark.parametrize(
    ("environ", "host_gib", "advice"),
    [
        ({}, 70, ""),
        ({}, 512, f"{doctor.PINNED_LIMIT}=460"),
        ({}, 32, f"{doctor.PINNED_LIMIT}=28"),
        ({doctor.PINNED_LIMIT: "460"}, 512, ""),
    ],
)
def test_the_pinned_limit_is_held_against_host_memory(
    environ: dict[str, str], host_gib: int, advice: str
):
    (finding,) = doctor.pinned_limit(environ, host_gib * doctor.GIB)
    assert advice in finding.advice
    assert bool(advice) == bool(finding.advice)


def test_host_memory_is_what_the_container_leaves(tmp_path: pathlib.Path):
    assert placement.available_host_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable:    4096 kB\n")
    assert placement.available_host_bytes(tmp_path) == 4096 * 1024
    groups = tmp_path / "sys/fs/cgroup"
    groups.mkdir(parents=True)
    (groups / "memory.max").write_text("max\n")
    (groups / "memory.current").write_text("1000\n")
    assert placement.available_host_bytes(tmp_path) == 4096 * 1024
    (groups / "memory.max").write_text("3000\n")
    assert placement.available_host_bytes(tmp_path) == 2000
    (groups / "memory.stat").write_text("anon 300\nactive_file 200\ninactive_file 500\n")
    assert placement.available_host_bytes(tmp_path) == 2500  # those files can go


def test_the_pinned_pool_has_the_arguments_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(doctor.PINNED_LIMIT, "1")
    monkeypatch.setattr(placement, "host_memory_available", lambda: 3 * doctor.GIB)
    limit = lambda platform, *bytes: placement.host_bytes_limit(
        Mock(platform=platform), *bytes
    )
    left, why = limit("gpu", 2**20, 2**28)
    assert left == 2**30 - 2**28 - 2**20
    assert "(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB) is 1 GiB, of which arguments take" in why
    monkeypatch.setenv(doctor.PINNED_LIMIT, "64")
    # What the caller has there is not available any more.
    left, why = limit("gpu", 2**20, 2**28)
    assert left == 3 * 2**30 - 2**20
    assert why.startswith("the memory that the machine has available is 3 GiB")
    assert limit("cpu")[0] == 3 * 2**30


USERS = """
import jax
import jax.numpy as jnp
import numpy as np
import jturnip


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


gradients = jax.grad(loss)
wrapped = jturnip.jit(gradients, gpu_bytes="300KiB")


def arguments():
    weights = [np.full((128, 128), 0.01, np.float32)] * 6
    return weights, np.ones((32, 128), np.float32)


structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments())
"""


@pytest.fixture
def users_module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's in the current folder."""
    (tmp_path / "of_a_user.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "of_a_user"
    sys.modules.pop("of_a_user", None)


def test_plan_says_what_limits_a_function(
    users_module: str, capsys: pytest.CaptureFixture[str]
):
    named = [f"{users_module}:gradients", "--args", f"{users_module}:structs"]
    assert execute("plan", *named, "--gpu_bytes", "300KiB") == 0
    said = capsys.readouterr().out
    assert "limits it" in said
    assert "of_a_user.py" in said
    own = [f"{users_module}:wrapped", "--args", f"{users_module}:arguments", "--json"]
    assert execute("plan", *own) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["gpu_bytes"] == 300 * 1024
    assert "limits it" in plain["explained"]


def test_compare_draws(users_module: str, tmp_path: pathlib.Path):
    pytest.importorskip("matplotlib").use("Agg")
    named = [f"{users_module}:wrapped", "--args", f"{users_module}:arguments"]
    curve = tmp_path / "curve.png"
    asked = ["--gpu_bytes", "0.6", "--rounds", "1", "--plot", str(curve)]
    assert execute("compare", *named, *asked) == 0
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_compare_runs_side_by_side(users_module: str, capsys: pytest.CaptureFixture[str]):
    named = [f"{users_module}:wrapped", "--args", f"{users_module}:arguments"]
    asked = ["--gpu_bytes", "300KiB,0.6", "--rounds", "1"]
    assert execute("compare", *named, *asked) == 0
    assert "the answers agree" in capsys.readouterr().out
    assert execute("compare", *named, *asked, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == ["jax.jit", "jturnip", "jturnip"]
    assert rows[1]["gpu_bytes"] == 300 * 1024


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        ("of_a_user", "of_a_user:arguments", "write module:name"),
        ("of_a_user:nothing", "of_a_user:arguments", "has no nothing"),
        ("no_such_module:f", "of_a_user:arguments", "no_such_module"),
        ("of_a_user:structs", "of_a_user:arguments", "no function"),
        ("of_a_user:loss", "of_a_user:USERS_NUMBER", "has no USERS_NUMBER"),
    ],
)
def test_what_is_not_there_is_said(users_module: str, function: str, args: str, said: str):
    found = execute("plan", function, "--args", args)
    assert said in str(found)
