"""Charts of the report: which curves share one, and their drawing as SVG."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

from .series import LEARNING_RATE, MEMORY, OWN_PREFIX, RATE, THROUGHPUT, thinned
from .values import as_number, number_text

_ROLES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
_ROLE = re.compile(rf"^({'|'.join(_ROLES)})(?:[/_.\- ]+)(?=\S)", re.IGNORECASE)
_OWN_TITLES = {
    THROUGHPUT: "throughput",
    LEARNING_RATE: "learning rate",
    RATE: "steps a second",
    MEMORY: "memory in use",
}
# A drawing with more points than pixels only makes the page larger.
_MOST_DRAWN = 400
_MOST_CHARTS = 60
_COLORS = 6
# Size in pixels, also of charts of which three are beside one another.
_WIDTH, _HEIGHT = 560, 246
_NARROW_WIDTH, _NARROW_HEIGHT = 372, 196
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 44
_LOG_RATIO = 1_000
# A curve of many points is drawn faintly, with its average, if its way up and down is so many times its range.
_LEAST_SMOOTHED, _ROUGH = 60, 5.0


@dataclass
class Line:
    """One curve of a chart."""

    name: str
    label: str
    color: int
    steps: list[int]
    values: list[float]


@dataclass
class Chart:
    """Curves that are compared with one another, such as the loss in training and in validation."""

    title: str
    lines: list[Line] = field(default_factory=list)
    own: bool = False
    """Whether phalanx has measured it."""


def charts_of(curves: dict[str, Any]) -> list[Chart]:
    """Return the charts of a report, those of losses first and those that phalanx measures last."""
    charts: dict[str, Chart] = {}
    for name, curve in curves.items():
        steps, values = _finite_points(curve)
        if not steps:
            continue
        title, label, role = _placed(name)
        chart = charts.setdefault(title, Chart(title, own=name.startswith(OWN_PREFIX)))
        taken = {line.color for line in chart.lines}
        free = (color for color in range(_COLORS) if color not in taken)
        color = role if role is not None and role not in taken else next(free, len(chart.lines) % _COLORS)
        chart.lines.append(Line(name, label, color, steps, values))
    for chart in charts.values():
        chart.lines.sort(key=lambda line: line.color)
    return _ordered(charts.values())


def overlaid(runs: Mapping[str, dict[str, Any]]) -> list[Chart]:
    """Return a chart for each curve, with a line for each run that has it.

    Args:
        runs: the curves of each run by the label of its lines.
    """
    charts: dict[str, Chart] = {}
    for color, (label, curves) in enumerate(runs.items()):
        for name, curve in curves.items():
            steps, values = _finite_points(curve)
            if steps:
                own = name.startswith(OWN_PREFIX)
                chart = charts.setdefault(name, Chart(_placed(name)[0] if own else name, own=own))
                chart.lines.append(Line(name, label, color % _COLORS, steps, values))
    return _ordered(charts.values())


def _ordered(charts: Iterable[Chart]) -> list[Chart]:
    return sorted(charts, key=lambda chart: (chart.own, "loss" not in chart.title.lower()))[:_MOST_CHARTS]


def _placed(name: str) -> tuple[str, str, int | None]:
    """Return the title of a curve's chart, its label there, and its colour if it has a role."""
    for own, title in _OWN_TITLES.items():
        if name.startswith(own):
            more = name.removeprefix(own).lstrip("- ")
            label = f"{more} a second" if own == THROUGHPUT else more
            return title, label if more else title, 0
    plain = re.sub(r"/dataloader_idx_\d+$", "", name)
    kind = re.search(r"_(step|epoch)$", plain)
    plain = plain[: kind.start()] if kind else plain
    match = _ROLE.match(plain)
    title = plain[match.end() :] if match else plain
    role = _ROLES[match[1].lower()] if match else None
    return title or name, name, None if kind and kind[1] == "epoch" and role == 0 else role


def _finite_points(curve: Any) -> tuple[list[int], list[float]]:
    """Return the points of a curve that can be drawn, thinned to those that can be seen."""
    steps, values = (curve.get(key) for key in ("step", "value")) if isinstance(curve, dict) else (None, None)
    if not isinstance(steps, list) or not isinstance(values, list):
        return [], []
    numbers = [(as_number(step), as_number(value)) for step, value in zip(steps, values, strict=False)]
    pairs = [(int(at), value) for at, value in numbers if at is not None and value is not None and math.isfinite(value)]
    while len(pairs) > _MOST_DRAWN:
        pairs = [pairs[index] for index in thinned([value for _, value in pairs])]
    return [at for at, _ in pairs], [value for _, value in pairs]


# ---- drawing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """A range of values, and its place among the pixels of a drawing."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, here = (self._plain(each) for each in (self.low, self.high, value))
        part = (here - low) / (high - low) if high > low else 0.5
        return round(self.start + part * (self.end - self.start), 1)

    def _plain(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def value_scale(values: Sequence[float], height: float = _HEIGHT, from_zero: bool = False) -> Scale:
    """Return the vertical scale for values: logarithmic where positive values span several magnitudes."""
    low, high = min(values), max(values)
    if from_zero and low >= 0:
        return Scale(0.0, high * 1.08 or 1.0, height - _BOTTOM, _TOP)
    logarithmic = low > 0 and high / low >= _LOG_RATIO
    if not logarithmic:
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        # A quantity that is never negative does not get a range below 0.
        low, high = (max(0.0, low - margin) if low >= 0 else low - margin), high + margin
    return Scale(low, high, height - _BOTTOM, _TOP, logarithmic)


def ticks(scale: Scale, count: int = 5) -> list[float]:
    """Return round values within a scale, about ``count``."""
    if scale.logarithmic:
        first, last = math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high))
        every = max(1, (last - first) // count + 1)
        return [10.0**power for power in range(first, last + 1, every)]
    width = (scale.high - scale.low) / count
    if not width > 0 or not math.isfinite(width):
        return [scale.low]
    power = 10.0 ** math.floor(math.log10(width))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= width * 0.999)
    first = math.ceil(scale.low / step)
    return [number * step for number in range(first, math.floor(scale.high / step) + 1)]


def draw(chart: Chart) -> str:
    """Return a chart as SVG; its values are in an attribute, for the script that shows them."""
    values = [value for line in chart.lines for value in line.values]
    steps = [step for line in chart.lines for step in line.steps]
    width, height = (_NARROW_WIDTH, _NARROW_HEIGHT) if chart.own else (_WIDTH, _HEIGHT)
    first, last = min(steps), max(steps)
    across, down = Scale(first, last, _LEFT, width - _RIGHT), value_scale(values, height, from_zero=chart.own)
    in_bytes = any(line.name == MEMORY for line in chart.lines)
    text = bytes_text if in_bytes else tick_text
    parts = [*_grid(across, down, text), *_steps_axis(across, height)]
    for line in chart.lines:
        points = [(across.at(step), down.at(value)) for step, value in zip(line.steps, line.values, strict=True)]
        parts.append(_path(points, line.color))
    data = {
        "box": [_LEFT, width - _RIGHT, _TOP, height - _BOTTOM], "x": [first, last],
        "y": [down.low, down.high, down.logarithmic], "bytes": in_bytes,
        "lines": [
            {"label": line.label, "color": line.color, "x": line.steps, "y": [_short(value) for value in line.values]}
            for line in chart.lines
        ],
    }  # fmt: skip
    label, kind = escape(f"{chart.title} over optimizer steps"), "chart" if chart.own else "chart wide"
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}" '
        f'data-chart="{escape(json.dumps(data, separators=(",", ":")))}">{"".join(parts)}'
        f'<line class="cursor" y1="{_TOP}" y2="{height - _BOTTOM}"/></svg>'
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _grid(across: Scale, down: Scale, text: Any) -> Iterable[str]:
    for value in ticks(down):
        y = down.at(value)
        yield f'<line class="grid" x1="{across.start}" x2="{across.end}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{text(value)}</text>'
    if down.logarithmic:
        yield f'<text class="tick" x="{across.end}" y="{_TOP + 8}" text-anchor="end">log scale</text>'


def _steps_axis(across: Scale, height: float) -> Iterable[str]:
    whole = [value for value in ticks(across, int(across.end) // 80) if value == int(value)] or [across.low]
    for value in whole:
        x = across.at(value)
        anchor = "end" if x > across.end - 30 else "middle"
        yield f'<text class="tick" x="{x}" y="{height - 24}" text-anchor="{anchor}">{int(value):,}</text>'
    middle = (across.start + across.end) / 2
    yield f'<text class="tick" x="{middle}" y="{height - 6}" text-anchor="middle">optimizer steps</text>'


def _path(points: list[tuple[float, float]], color: int) -> str:
    if len(points) == 1:
        return f'<circle class="dot c{color}" cx="{points[0][0]}" cy="{points[0][1]}" r="3.5"/>'
    dots = "".join(f'<circle class="dot c{color}" cx="{x}" cy="{y}" r="2"/>' for x, y in points if len(points) <= 24)
    if not _is_rough(points):
        return f'<path class="line c{color}" d="{_way(points)}"/>{dots}'
    return (
        f'<path class="line raw c{color}" d="{_way(points)}"/><path class="line c{color}" d="{_way(_smooth(points))}"/>'
    )


def _way(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def _is_rough(points: list[tuple[float, float]]) -> bool:
    """Whether a curve goes up and down so much that its course is hard to see."""
    heights = [y for _, y in points]
    way = sum(abs(after - before) for before, after in pairwise(heights))
    return len(points) >= _LEAST_SMOOTHED and way > _ROUGH * (max(heights) - min(heights))


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a curve's average over its neighbours, the same number on both sides."""
    reach, averages = max(2, len(points) // 30), []
    for index, (x, _) in enumerate(points):
        side = min(reach, index, len(points) - 1 - index)
        near = points[index - side : index + side + 1]
        averages.append((x, round(sum(y for _, y in near) / len(near), 1)))
    return averages


def tick_text(value: float) -> str:
    """Return the label of a tick."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.3g}" if abs(value) < 100 else number_text(round(value))


def bytes_text(value: float) -> str:
    """Return the label of a tick of a scale in bytes."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
