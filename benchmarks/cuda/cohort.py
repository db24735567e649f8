"""Sides that share the device, each in a process of its own: started together, compared, and measured in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from .cells import Cell, phases, size_of
from .channel import Child, ChildError

TOLERANCE = 0.01
"""The relative difference that losses may have: sides round to bf16 at different places."""
_START_SECONDS, _PHASE_SECONDS = 90.0, 120.0
# Several processes compile at once, so each does so in few processes of its own.
_VARIABLES = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
_OUT_OF_TIME = "no time was left"

Note = Callable[[str], None]


@dataclass
class Record:
    """The measurements of a cell; ``problem`` is the reason why some are missing."""

    side: str
    size: str
    compiled: bool
    cohort: int = 0
    """The number of the group of sides that took turns; only these are compared."""
    problem: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of a step, one value for each round."""
    peak_bytes: int | None = None
    waits: float | None = None
    """The operations of a step for which the host waits, by torch's debug mode."""
    places: list[str] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    profile: dict[str, Any] | None = None

    def take(self, result: dict[str, Any]) -> None:
        """Add the result of a phase."""
        for name, value in result.items():
            if name == "seconds":
                self.seconds.append(value)
            else:
                setattr(self, name, value)


class Budget:
    """The time that is left for all cells."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()


@dataclass(frozen=True)
class Setting:
    """The place of all measurements, and their limits."""

    device: str
    tiny: bool
    quick: bool
    folder: Path
    """For temporary files and the output of processes."""
    budget: Budget
    note: Note


class Cohort:
    """Measures sides of one size in turn.

    Args:
        number: its number in results.
        names: the sides, ``raw`` first: the losses of all others are compared with its.
        title: the name of the size in results.
        size_name: its name among the sizes.
        abreast: how many processes may run their first steps at once.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        title: str,
        size_name: str,
        compiled: bool,
        setting: Setting,
        abreast: int,
    ) -> None:
        self._size_name, self._setting, self._abreast = size_name, setting, max(abreast, 1)
        self.records = {name: Record(name, title, compiled, number) for name in names}
        self._children: dict[str, Child] = {}
        self._phases = phases(size_of(size_name, setting.tiny, setting.quick), compiled)

    def run(self) -> list[Record]:
        """Measure all phases; a side that fails is reported, and the others are measured."""
        try:
            self._start()
            self._compare()
            for phase in self._phases[1:]:
                for name in list(self._children):
                    self._children[name].go()
                    self._collect(name, _PHASE_SECONDS)
                self._setting.note(f"    {phase.kind}: {len(self._children)} sides")
            # Ends as the processes do, with the errors of the last steps.
            for name in list(self._children):
                self._collect(name, _START_SECONDS, ends=True)
        finally:
            for child in self._children.values():
                child.end()
        return list(self.records.values())

    def _start(self) -> None:
        setting = self._setting
        for index, (name, record) in enumerate(self.records.items()):
            folder = setting.folder / f"cohort-{record.cohort}" / f"side-{index}"
            (folder / "files").mkdir(parents=True)
            files = str(folder / "files")
            cell = Cell(name, self._size_name, record.compiled, setting.device, setting.tiny, setting.quick, files)
            module = f"{__package__}.side"
            self._children[name] = Child(module, asdict(cell), folder / "log.txt", _VARIABLES)
        for name in list(self._children):
            self._collect(name, _START_SECONDS)

    def _compare(self) -> None:
        """Run the first steps of all sides, and leave out those with other losses than the raw loop."""
        # The first one alone: the others find the code that it has compiled.
        names = list(self._children)
        for wave in [names[:1], *_chunks(names[1:], self._abreast)]:
            for name in wave:
                self._children[name].go()
            for name in wave:
                self._collect(name, _PHASE_SECONDS)
        first, *others = self.records.values()
        if first.losses and not falls(first.losses):
            self._drop(first.side, f"its loss does not fall, so that nothing can be compared: {first.losses}")
        for record in others:
            if record.side in self._children and (reason := difference(first.losses, record.losses)):
                self._drop(record.side, reason)

    def _collect(self, name: str, seconds: float, ends: bool = False) -> None:
        """Add the next result of a side, or drop the side."""
        child, left = self._children[name], self._setting.budget.left
        try:
            if left <= 0:
                raise ChildError(_OUT_OF_TIME)
            result = child.answer(min(seconds, left))
            if (result is None) != ends:
                raise ChildError("it ended before its last phase" if result is None else "it sent an unknown result")
            self.records[name].take({key: value for key, value in (result or {}).items() if key != "torch"})
        except ChildError as error:
            self._drop(name, _OUT_OF_TIME if self._setting.budget.left <= 0 else str(error))

    def _drop(self, name: str, reason: str) -> None:
        self.records[name].problem = reason
        self._children.pop(name).end()
        self._setting.note(f"    {name} is left out: {reason}")


def falls(losses: Sequence[float]) -> bool:
    """Whether losses on one batch fall by more than the tolerance for several times."""
    return losses[-1] < losses[0] * (1 - 4 * TOLERANCE)


def difference(expected: Sequence[float], found: Sequence[float]) -> str:
    """Return the reason why losses are not those of the raw loop; empty if they are."""
    if not expected:
        return "the raw loop has failed, so that its losses cannot be compared"
    pairs = list(zip(expected, found, strict=False))
    same = len(expected) == len(found) and all(abs(ours - theirs) <= TOLERANCE * abs(theirs) for theirs, ours in pairs)
    return "" if same else f"its losses {_short(found)} are not those of the raw loop {_short(expected)}"


def _short(losses: Sequence[float]) -> str:
    return f"[{', '.join(f'{loss:.4f}' for loss in losses)}]"


def _chunks(names: Sequence[str], count: int) -> Iterator[list[str]]:
    remaining = iter(names)
    while chunk := list(islice(remaining, count)):
        yield chunk
