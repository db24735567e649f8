"""The results of all groups, the bars that they are compared with, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..tables import Table
from ..task import SIZES

NOMINAL_FLOPS = 989e12
"""Dense bf16 operations of an H100 or H200 (SXM) in a second, by its data sheet."""
TOLERANCE = 0.01
"""The relative difference that losses may have: sides round to bf16 at different places."""
_BARRED = ("phalanx", "phalanx Fabric", "phalanx ddp", "phalanx fsdp")
_SPEED, _WAITS, _MICROSECONDS = 0.99, 0.0, 30.0


@dataclass
class Record:
    """The measurements of a side in a group; ``problem`` is the reason why some are missing."""

    group: str
    side: str
    reference: str
    size: str
    problem: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of a step, one value for each round."""
    peak_bytes: int | None = None
    waits: float | None = None
    """The operations of a step for which the host waits, by torch's debug mode."""
    places: list[str] = field(default_factory=list)
    profile: dict[str, Any] | None = None

    def take(self, result: dict[str, Any]) -> None:
        """Add the result of a fit."""
        self.seconds += [result.pop("seconds")] if "seconds" in result else []
        for name, value in result.items():
            setattr(self, name, value)

    @property
    def all_waits(self) -> float | None:
        """The waits of a step: the larger of what torch's debug mode and the profiler have counted."""
        counts = [] if self.waits is None else [self.waits]
        if self.profile is not None:
            counts.append(sum(self.profile["waits"].values()))
        return max(counts, default=None)


@dataclass(frozen=True)
class Bar:
    """A value that phalanx promises to keep to; None as ``value`` if it was not measured."""

    title: str
    value: float | None
    limit: float
    is_minimum: bool
    is_judged: bool

    @property
    def passes(self) -> bool | None:
        """Whether the value keeps to the limit; None if it was not measured, or means nothing."""
        if self.value is None or not self.is_judged:
            return None
        return self.value >= self.limit if self.is_minimum else self.value <= self.limit


@dataclass
class Results:
    """All that was measured.

    Attributes:
        problems: groups that are missing, with the reason.
        is_judged: whether the bars mean something: on a GPU, with models of the sizes that are named.
    """

    is_judged: bool = True
    machine: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def paired(self, record: Record, side: str, what: Callable[[float, float], float]) -> float | None:
        """Return the median over the rounds of a function of the seconds of another side and of a record.

        Rounds of both were measured moments apart, so their ratio is steadier than the ratio of the medians.
        """
        for other in self.records:
            if (other.group, other.side) == (record.group, side) and len(other.seconds) == len(record.seconds) > 0:
                return statistics.median(map(what, other.seconds, record.seconds))
        return None

    def speed(self, record: Record) -> float | None:
        """Return the speed relative to the side that a record is compared with."""
        return self.paired(record, record.reference, lambda theirs, own: theirs / own)

    def added(self, record: Record, side: str) -> float | None:
        """Return the microseconds that a step takes longer than that of another side."""
        return self.paired(record, side, lambda theirs, own: (own - theirs) * 1e6)

    def bars(self) -> list[Bar]:
        """Return the bars of speed, waits and cost of the host, for each side that has them."""
        found = []
        for record in self.records:
            title = f"{record.group}, {record.side}"
            if record.side in _BARRED and record.group in ("350m", "350m-compiled"):
                speed = self.speed(record)
                found.append(Bar(f"{title}: speed of {record.reference}", speed, _SPEED, True, self.is_judged))
            if record.side in _BARRED and record.group == "350m":
                found.append(Bar(f"{title}: waits of the host", record.all_waits, _WAITS, False, self.is_judged))
            if record.side in _BARRED and record.group == "small":
                added = self.added(record, record.reference)
                found.append(Bar(f"{title}: µs over {record.reference}", added, _MICROSECONDS, False, self.is_judged))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all of it, with the bars."""
        return asdict(self) | {"bars": [asdict(bar) | {"passes": bar.passes} for bar in self.bars()]}

    def markdown(self) -> str:
        """Return all tables."""
        lines = [", ".join(f"{name} {_number(value)}" for name, value in self.machine.items())]
        lines += [f"### {table.name}\n\n{table}" for table in self._tables() if table.rows]
        missing = [f"- {record.group}, {record.side}: {record.problem}" for record in self.records if record.problem]
        missing += [f"- {problem}" for problem in self.problems]
        return "\n\n".join([*lines, *(["### Not measured\n\n" + "\n".join(missing)] if missing else [])]) + "\n"

    def _tables(self) -> Iterator[Table]:
        words = {True: "pass", False: "FAIL", None: "not judged"}
        rows = [
            [bar.title, _number(bar.value, 3), f"{'>=' if bar.is_minimum else '<='} {bar.limit:g}", words[bar.passes]]
            for bar in self.bars()
        ]
        yield Table("bars", ["", "measured", "bar", ""], rows)
        for group in dict.fromkeys(record.group for record in self.records):
            yield Table(
                group, _HEAD, [self._row(each) for each in self.records if each.group == group and each.seconds]
            )
        for kind in dict.fromkeys(case["group"] for case in self.inputs):
            cases = [case for case in self.inputs if case["group"] == kind]
            medians = [statistics.median(case["seconds"]) * 1e3 if case["seconds"] else "-" for case in cases]
            rows = [[case["title"], each, case["problem"]] for case, each in zip(cases, medians, strict=True)]
            yield Table(kind, ["", "ms a micro-batch", ""], rows)
        fields = ("gigabytes", "step_ms", "stall_ms", "longest_ms", "until_written")
        rows = [[save["way"], *(_number(save.get(name), 3) for name in fields), save["problem"]] for save in self.saves]
        head = ["", "GB of state", "ms a step", "stall, ms", "longest step, ms more", "s until written", ""]
        yield Table("a save during training", head, rows)

    def _row(self, record: Record) -> list[object]:
        size, seconds = SIZES[record.size], statistics.median(record.seconds)
        tokens_per_second = size.rows * size.length / seconds
        idle = (record.profile or {}).get("idle_share")
        return [
            record.side,
            f"{tokens_per_second:.0f}",
            record.reference,
            _number(self.speed(record), 3),
            *(
                _number(peak and 100 * utilization(size.elements, tokens_per_second, peak))
                for peak in (NOMINAL_FLOPS, self.machine.get("matmul_flops"))
            ),
            _number(None if record.peak_bytes is None else record.peak_bytes / 1e9),
            _number(None if idle is None else 100 * idle),
            _number(record.all_waits),
            _number(seconds * 1e6, 0),
            _number(self.added(record, record.reference)),
            100 * (max(record.seconds) - min(record.seconds)) / seconds,
        ]


_HEAD = [
    *("", "tokens/s", "speed of", "ratio", "MFU of 989, %", "MFU of measured, %", "peak GB", "idle, %"),
    *("waits a step", "µs a step", "µs over it", "rounds differ by, %"),
]


def utilization(elements: int, tokens_per_second: float, peak_flops: float) -> float:
    """Return the share of a peak that training uses.

    Forward and backward pass take six operations for each parameter and token. Those of attention, which depend on the
    length, are not counted.
    """
    return 6 * elements * tokens_per_second / peak_flops


def difference(expected: Sequence[float], found: Sequence[float]) -> str:
    """Return the reason why losses are not those of the raw loop, which fall; empty if they are."""
    if not expected:
        return "the raw loop has failed, so that its losses cannot be compared"
    # On one batch, by more than the tolerance for several times.
    if not expected[-1] < expected[0] * (1 - 4 * TOLERANCE):
        return f"the losses of the raw loop do not fall, so that nothing can be compared: {expected}"
    pairs = zip(expected, found, strict=False)
    if len(expected) == len(found) and all(abs(own - its) <= TOLERANCE * abs(its) for its, own in pairs):
        return ""
    return f"its losses {found} are not those of the raw loop {expected}"


def _number(value: Any, digits: int = 1) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"
