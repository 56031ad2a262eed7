"""Pictures as SVG: self-contained, without scripts, readable on light and dark pages.

Text and lines have the colour of the page's text. Fills are from Okabe and Ito's palette,
which people with any colour vision can tell apart. Names show when one points at a shape.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

from jturnip.show.slots import Stay
from jturnip.show.timeline import Event, Lane, Timeline
from jturnip.units import format_bytes


COLOURS = {
    Lane.COMPUTE: "#56B4E9",
    Lane.H2D: "#E69F00",
    Lane.D2H: "#009E73",
}
IDLE = "#D55E00"
_KINDS = {
    "argument": "#E69F00",
    "intermediate": "#56B4E9",
    "result": "#009E73",
    "workspace": "#CC79A7",
}
_WIDTH = 960
_LEFT = 112  # where the axis of time begins
_RIGHT = 12
_LANE = 30
_MEMORY = 110
_SLOTS = 300
_GAP = 0.4  # units of the picture between two shapes that are drawn apart
_FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"'


def of_timeline(run: Timeline) -> str:
    """Lanes of what was done, and under them the memory in use."""
    scale = _Scale(run.seconds)
    parts = [*_legend([(COLOURS[lane], lane.title) for lane in Lane] + [(IDLE, "idle")])]
    top = 34
    for lane in Lane:
        y = top + lane * (_LANE + 6)
        parts.append(_text(_LEFT - 8, y + _LANE / 2 + 4, lane.title, "end"))
        parts.append(
            _box(_LEFT, y, scale.width, _LANE, 'fill="currentColor" opacity="0.06"')
        )
        if lane is Lane.COMPUTE:
            parts += _idle(run, scale, y)
        parts += _events(run.lane(lane), scale, y)
    y = top + 3 * (_LANE + 6) + 20
    parts += _memory(run, scale, y)
    bottom = y + _MEMORY
    parts += _axis_of_time(scale, bottom)
    return _svg(bottom + 40, parts, "timeline of a run")


def of_slots(stays: Sequence[Stay], seconds: float, gpu_bytes: int) -> str:
    """Offset against time: who has which bytes of the arena."""
    scale = _Scale(seconds)
    top, parts = 34, [*_legend([(colour, kind) for kind, colour in _KINDS.items()])]
    parts += _axis_of_bytes(gpu_bytes, top, _SLOTS, "offset")
    height = _SLOTS / max(1, gpu_bytes)
    drawn: set[tuple[int, int, int, int]] = set()
    for stay in stays:
        x, end = scale.x(stay.start), scale.x(stay.end)
        for offset, nbytes in stay.ranges:
            y, h = top + _SLOTS - (offset + nbytes) * height, nbytes * height
            w = max(end - x, 0.3)
            # Of shapes too narrow to be told apart, one is enough.
            if min(w, h) < 1:
                place = (round(x), round(y), round(w), round(h))
                if place in drawn:
                    continue
                drawn.add(place)
            where = f"\n{stay.source}" if stay.source else ""
            title = f"{stay.name}, {format_bytes(stay.nbytes)}{where}"
            style = f'fill="{_KINDS[stay.kind]}" stroke="currentColor" stroke-width="0.3"'
            parts.append(_box(x, y, w, h, style, title))
    parts += _axis_of_time(scale, top + _SLOTS)
    return _svg(top + _SLOTS + 40, parts, "who has which bytes of the budget")


def on_white(svg: str) -> str:
    """A picture for where it cannot know the page's colours: on white, black on it."""
    begin, end = svg.split(">", 1)
    begin = begin.replace('fill="currentColor"', 'fill="currentColor" color="black"')
    return f'{begin}><rect width="100%" height="100%" fill="white"/>{end}'


class _Scale:
    """Seconds to units of the picture."""

    def __init__(self, seconds: float):
        self.seconds = max(seconds, 1e-9)
        self.width = _WIDTH - _LEFT - _RIGHT

    def x(self, seconds: float) -> float:
        return _LEFT + self.width * min(1.0, max(0.0, seconds / self.seconds))


def _events(events: Iterable[Event], scale: _Scale, y: float) -> list[str]:
    """A shape each; what is too small to be seen apart, together."""
    parts: list[str] = []
    together: list[Event] = []

    def draw() -> None:
        if not together:
            return
        x, end = scale.x(together[0].start), scale.x(max(e.end for e in together))
        style = f'fill="{COLOURS[together[0].lane]}"'
        width = max(end - x - (0.2 if end - x > 2 else 0.0), 0.3)
        parts.append(_box(x, y, width, _LANE, style, _title(together)))
        together.clear()

    for event in events:
        if together:
            begin, last = scale.x(together[0].start), scale.x(together[-1].end)
            x, end = scale.x(event.start), scale.x(event.end)
            small = x - last < _GAP and max(last - begin, end - x) < 1.5 * _GAP
            if not (small and end - begin < 2):
                draw()
        together.append(event)
    draw()
    return parts


def _title(events: Sequence[Event]) -> str:
    first, last = events[0], events[-1]
    span = f"{format_seconds(first.start)} to {format_seconds(last.end)}"
    if len(events) > 1:
        nbytes = format_bytes(sum(e.nbytes for e in events))
        return f"{len(events)} operations, {nbytes}\n{span}"
    lines = [f"{first.name}, {format_bytes(first.nbytes)}", span]
    return "\n".join([*lines, first.source] if first.source else lines)


def _idle(run: Timeline, scale: _Scale, y: float) -> list[str]:
    parts = []
    for idle in run.idle:
        x, end = scale.x(idle.start), scale.x(idle.end)
        if end - x < _GAP:
            continue
        title = f"compute idle for {format_seconds(idle.end - idle.start)}"
        style = f'fill="{IDLE}"'
        parts.append(_box(x, y + _LANE - 6, end - x, 6, style, title))
    return parts


def _memory(run: Timeline, scale: _Scale, top: float) -> list[str]:
    """What is in use, as steps, against the budget."""
    most = max(run.gpu_bytes, run.peak_bytes, 1)
    parts = _axis_of_bytes(most, top, _MEMORY, "memory")
    height = lambda nbytes: top + _MEMORY - _MEMORY * nbytes / most
    # Of each stretch that is narrower than what one can see, the highest.
    steps: list[tuple[float, int]] = []
    for when, nbytes in run.memory:
        x = scale.x(when)
        if steps and x - steps[-1][0] < _GAP:
            steps[-1] = steps[-1][0], max(steps[-1][1], nbytes)
        else:
            steps.append((x, nbytes))
    if steps:
        path = [f"M{steps[0][0]:.1f} {top + _MEMORY:.1f}"]
        for x, nbytes in steps:
            path.append(f"H{x:.1f}V{height(nbytes):.1f}")
        path.append(f"H{scale.x(run.seconds):.1f}V{top + _MEMORY:.1f}Z")
        style = f'fill="{COLOURS[Lane.COMPUTE]}" opacity="0.5"'
        title = (
            f"<title>device memory in use: at most {format_bytes(run.peak_bytes)}</title>"
        )
        parts.append(f'<path d="{"".join(path)}" {style}>{title}</path>')
    y = height(run.gpu_bytes)
    dashed = 'stroke="currentColor" stroke-width="1.5" stroke-dasharray="6 4"'
    parts.append(_line(_LEFT, y, _LEFT + scale.width, y, dashed))
    label = f"budget {format_bytes(run.gpu_bytes)}"
    parts.append(_text(_LEFT + scale.width - 4, y - 5, label, "end"))
    return parts


# -- axes and shapes -------------------------------------------------------------------


def _axis_of_time(scale: _Scale, y: float) -> list[str]:
    parts = [_line(_LEFT, y, _LEFT + scale.width, y, 'stroke="currentColor"')]
    step = nice_step(scale.seconds, 8)
    count = math.floor(scale.seconds / step + 1e-9)
    for i in range(count + 1):
        x = scale.x(i * step)
        parts.append(_line(x, y, x, y + 5, 'stroke="currentColor"'))
        anchor = "end" if i == count and x > _LEFT + scale.width - 20 else "middle"
        parts.append(_text(x, y + 18, format_seconds(i * step), anchor))
    parts.append(_text(_LEFT + scale.width / 2, y + 34, "time", "middle"))
    return parts


def _axis_of_bytes(most: int, top: float, height: float, what: str) -> list[str]:
    parts = [_line(_LEFT, top, _LEFT, top + height, 'stroke="currentColor"')]
    unit, name = unit_of(most)
    step = max(1, nice_step(most / unit, 4)) if unit == 1 else nice_step(most / unit, 4)
    for i in range(math.floor(most / unit / step + 1e-9) + 1):
        y = top + height - height * i * step * unit / most
        parts.append(_line(_LEFT - 5, y, _LEFT, y, 'stroke="currentColor"'))
        parts.append(_text(_LEFT - 8, y + 4, f"{i * step:g} {name}", "end"))
    turned = f'transform="rotate(-90 14 {top + height / 2:.1f})"'
    parts.append(_text(14, top + height / 2, what, "middle", turned))
    return parts


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    parts, x = [], float(_LEFT)
    for colour, name in entries:
        parts.append(_box(x, 8, 12, 12, f'fill="{colour}"'))
        parts.append(_text(x + 17, 18, name))
        x += 36 + 6.4 * len(name)
    return parts


def _svg(height: float, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}"'
        f' width="100%" style="max-width:{_WIDTH + 100}px" role="img"'
        f' aria-label="{escape(label)}" {_FONT}>{"".join(parts)}</svg>'
    )


def _box(x: float, y: float, w: float, h: float, style: str, title: str = "") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
    if not title:
        return f"<rect {at} {style}/>"
    return f"<rect {at} {style}><title>{escape(title)}</title></rect>"


def _line(x: float, y: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {at} {more}>{escape(text)}</text>"


def nice_step(span: float, steps: int) -> float:
    """A step of 1, 2 or 5 times a power of ten, of which about so many fill the span."""
    raw = span / steps
    power = 10.0 ** math.floor(math.log10(raw))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= raw * 0.999)


def unit_of(nbytes: int) -> tuple[int, str]:
    """The largest unit of which there is one among so many bytes, and its name."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((unit for unit in units if nbytes >= unit[0]), (1, "B"))


def format_seconds(seconds: float) -> str:
    """Seconds for people, in the unit that suits them."""
    if seconds == 0:
        return "0"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds / 1e-6:.4g} µs"
