"""What objects show in a notebook: HTML that needs nothing else."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.graph.taskgraph import TaskGraph
from jturnip.show import pictures, slots, timeline
from jturnip.show.pictures import format_seconds
from jturnip.units import format_bytes


_LARGEST = 12  # tasks that a graph's table names
_SHOWN = 6  # pieces whose pictures are drawn


def of_run(report: RunReport) -> str:
    """A run: its figures, and its timeline."""
    rows = [
        ("strategy", report.strategy),
        ("time", format_seconds(report.seconds)),
        ("compute", format_seconds(report.compute_seconds)),
        ("stalled", format_seconds(report.stall_seconds)),
        ("peak on the device", format_bytes(report.peak_bytes)),
        ("to the device", format_bytes(report.h2d_bytes)),
        ("to the host", format_bytes(report.d2h_bytes)),
    ]
    if report.strategy == "whole":
        rows[1:4] = [("time of the dispatch", format_seconds(report.seconds))]
    if report.plan is not None:
        rows.insert(1, ("budget", format_bytes(report.plan.gpu_bytes)))
    return block("A run", figures(rows), picture_of_run(report))


def picture_of_run(report: RunReport, plan: Plan | None = None) -> str:
    """The timeline of a run, or why there is none."""
    try:
        run = timeline.of_run(report, plan)
    except ValueError as error:
        return paragraph(f"{error}.")
    left_out = ""
    if run.left_out:
        left_out = paragraph(
            f"{run.left_out} operations more, of a long loop, are left out."
        )
    return pictures.of_timeline(run) + left_out


def of_plan(plan: Plan) -> str:
    """A plan: its figures, who has which bytes, and the run that is predicted."""
    rows = [
        ("strategy", plan.strategy),
        ("budget", format_bytes(plan.gpu_bytes)),
        ("peak on the device", format_bytes(plan.peak_bytes)),
        ("to the device", format_bytes(plan.h2d_bytes)),
        ("to the host", format_bytes(plan.d2h_bytes)),
        ("copies on the host", format_bytes(plan.host_bytes)),
    ]
    if plan.strategy != "whole":
        rows += [
            ("predicted", format_seconds(plan.predicted_seconds)),
            ("at least", format_seconds(plan.lower_bound_seconds)),
        ]
    parts = [figures(rows)]
    if plan.pieces:
        parts += [
            folded(piece.name or "a piece", of_plan(piece))
            for piece in plan.pieces[:_SHOWN]
        ]
        if len(plan.pieces) > _SHOWN:
            parts.append(paragraph(f"and {len(plan.pieces) - _SHOWN} pieces more"))
    elif plan.predicted_run is not None:
        run = plan.predicted_run
        stays = slots.of_plan(plan)
        parts += [
            paragraph("Who has which bytes of the budget, in the predicted run:"),
            pictures.of_slots(stays, run.seconds, plan.gpu_bytes),
            folded("the predicted run", picture_of_run(run, plan)),
        ]
    return block("A plan", *parts)


def of_taskgraph(graph: TaskGraph) -> str:
    """A graph of tasks: how much there is, and the tasks that touch most."""
    rows = [
        ("tasks", f"{len(graph.tasks):,}"),
        ("buffers", f"{len(graph.buffers):,}"),
        ("executables", f"{len({t.executable for t in graph.tasks}):,}"),
        ("bytes of all buffers", format_bytes(sum(b.nbytes for b in graph.buffers))),
    ]
    touched = {
        t.id: sum(graph.buffers[b].nbytes for b in (*t.inputs, *t.new)) + t.workspace
        for t in graph.tasks
    }
    largest = sorted(graph.tasks, key=lambda t: -touched[t.id])[:_LARGEST]
    of_tasks = [
        (
            str(t.id),
            t.name,
            t.source,
            format_bytes(touched[t.id]),
            format_seconds(t.seconds),
        )
        for t in largest
    ]
    heads = ("task", "operation", "line", "bytes at once", "time")
    return block("A graph of tasks", figures(rows), table(heads, of_tasks))


def of_wrapped(name: str, rows: Sequence[tuple[str, str]], run: RunReport | None) -> str:
    """A function in a budget, and its last run."""
    last = paragraph("It has not run yet.") if run is None else of_run(run)
    return block(name, figures(rows), last)


# -- HTML ------------------------------------------------------------------------------


def block(title: str, *parts: str) -> str:
    """Some parts under a title."""
    head = f'<div style="font-weight:600;margin:4px 0">{escape(title)}</div>'
    return f'<div style="font-size:13px">{head}{"".join(parts)}</div>'


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f'<p style="margin:6px 0">{escape(text)}</p>'


def folded(title: str, inner: str) -> str:
    """What one opens to see it."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def figures(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, side by side."""
    cells = "".join(
        f'<div style="margin-right:22px"><div style="opacity:0.65">{escape(name)}</div>'
        f"<div>{escape(value)}</div></div>"
        for name, value in rows
    )
    return f'<div style="display:flex;flex-wrap:wrap;margin:4px 0 8px">{cells}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of plain cells."""
    style = 'style="text-align:left;padding:2px 14px 2px 0"'
    head = "".join(f"<th {style}>{escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{escape(str(c))}</td>" for c in row) + "</tr>"
        for row in rows
    )
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;'
        'font-size:13px;white-space:nowrap"><thead><tr>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
