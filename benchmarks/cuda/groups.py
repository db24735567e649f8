"""The groups of measurements, in the order in which they run: the shorter and the more important ones first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cells import ALL_SIDES, SETTINGS, Size, cohorts, missing, size_of
from .channel import Child, ChildError
from .cohort import Cohort, Record, Setting
from .results import Results

_MACHINE_SECONDS, _DATA_SECONDS, _SAVES_SECONDS = 60.0, 100.0, 150.0
# Where the device is the CPU, which has no memory of its own.
_ROOM_OF_CPU, _ABREAST_OF_CPU = 4, 2
_MOST_PROCESSES = 12
_MOST_ABREAST = 4


@dataclass
class Run:
    """One call of the benchmark.

    Args:
        sides: the sides to measure.
    """

    setting: Setting
    sides: Sequence[str]
    results: Results = field(default_factory=Results)
    _cohorts: int = 0

    def machine(self) -> None:
        """Measure the machine."""
        self._receive(
            "machine", self._child("machine"), _MACHINE_SECONDS, lambda found: self.results.machine.update(found)
        )
        self.results.machine |= self.results.machine.pop("machine", {})

    def data(self) -> None:
        """Measure how batches reach the device."""
        cases: dict[tuple[str, str], dict[str, Any]] = {}

        def take(message: dict[str, Any]) -> None:
            case = message["data"]
            cases[case["group"], case["title"]] = case

        self._receive("data", self._child("data"), _DATA_SECONDS, take)
        self.results.data += cases.values()

    def saves(self) -> None:
        """Measure saves."""
        saves = self.results.saves
        self._receive("saves", self._child("saves"), _SAVES_SECONDS, lambda message: saves.append(message["save"]))

    def sizes(self, title: str, name: str, compiled: bool, sides: Sequence[str]) -> None:
        """Measure sides of a size.

        Args:
            title: the name of the size in the results.
        """
        size = size_of(name, self.setting.tiny, self.setting.quick)
        chosen = [side for side in sides if ALL_SIDES[side].compiles or not compiled]
        absent = {side: libraries for side in chosen if (libraries := missing(ALL_SIDES[side]))}
        for side, libraries in absent.items():
            self.results.records.append(Record(side, title, compiled, -1, f"{libraries} is not installed"))
        free = self.results.machine.get("free_bytes")
        for names in cohorts([side for side in chosen if side not in absent], room(size, free)):
            self._cohorts += 1
            self.setting.note(f"  {', '.join(names)}")
            count = abreast(size, len(names), free)
            self.results.records += Cohort(self._cohorts, names, title, name, compiled, self.setting, count).run()

    def _child(self, module: str) -> Child:
        setting = self.setting
        folder = setting.folder / module
        folder.mkdir()
        given = {"device": setting.device, "tiny": setting.tiny, "quick": setting.quick, "folder": str(folder)}
        threads = {"OMP_NUM_THREADS": "1"} if setting.device == "cpu" else {}
        return Child(f"{__package__}.{module}", given, setting.folder / f"{module}.txt", threads)

    def _receive(self, title: str, child: Child, seconds: float, take: Callable[[dict[str, Any]], object]) -> None:
        """Take all results of a process, and report why some are missing."""
        limit = max(self.setting.budget.left - seconds, 0.0)
        try:
            while (message := child.answer(self.setting.budget.left - limit)) is not None:
                take(message)
        except ChildError as error:
            self.results.problems.append(f"{title}: {error}")
            self.setting.note(f"  {title}: {error}")
        finally:
            child.end()


def room(size: Size, free_bytes: float | None) -> int:
    """Return how many processes can hold the state of a model while one of them trains.

    Args:
        free_bytes: the free memory of the device; None for a CPU.
    """
    if free_bytes is None:
        return _ROOM_OF_CPU
    return min(int((free_bytes - size.temporary_bytes) // size.resident_bytes), _MOST_PROCESSES)


def abreast(size: Size, processes: int, free_bytes: float | None) -> int:
    """Return how many of some processes can train at once."""
    if free_bytes is None:
        return _ABREAST_OF_CPU
    return min(int((free_bytes - processes * size.resident_bytes) // size.temporary_bytes), _MOST_ABREAST)


def sizes(title: str, name: str, compiled: bool) -> Callable[[Run], None]:
    """Return the group of a size."""
    return lambda run: run.sizes(title, name, compiled, run.sides)


GROUPS: dict[str, Callable[[Run], None]] = {
    "data": Run.data,
    "small": sizes("small", "small", False),
    "350m": sizes("350m", "350m", False),
    "350m-compiled": sizes("350m", "350m", True),
    "saves": Run.saves,
    "settings": lambda run: run.sizes("settings", "350m", False, list(SETTINGS)),
    "1.3b": sizes("1.3b", "1.3b", False),
    "1.3b-compiled": sizes("1.3b", "1.3b", True),
}
