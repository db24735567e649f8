"""``MemoryPlan``: what each strategy would hold on every rank, beside the memory that is there, and which to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ..core.errors import unknown
from ..core.precision import Precision
from .available_memory import Memory
from .formulas import LAYOUTS, Bytes, Footprint, ModelSize, Ranks, footprint
from .measure import Activations

# Of the memory there is: allocators leave holes, and libraries take some too.
_USABLE = 0.9
# What fits into this part of it needs no closer look.
_EASILY = 0.25
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class PlanRow:
    """One strategy: what it would hold on each rank, and what stands against it."""

    name: str
    needs: Footprint
    shortage: str | None = None
    """The place whose memory does not suffice, ``"device"``, ``"host"`` or ``"disk"``; None where all fits."""
    refusal: str | None = None
    """Why it cannot be used here, in a sentence; None where it can."""

    @property
    def fits(self) -> bool:
        """Whether its memory suffices."""
        return self.shortage is None

    @property
    def verdict(self) -> str:
        """What a table says of it."""
        if self.refusal is not None:
            return self.refusal.partition(". ")[0].partition(": ")[0]
        return "fits" if self.shortage is None else f"too large for the {self.shortage}"


@dataclass(frozen=True)
class MemoryPlan:
    """What each strategy would hold on every rank; printed, a table.

    ``chosen`` is what ``strategy="auto"`` takes: the first that can be used and fits of ``single`` (one rank) or
    ``ddp``, ``fsdp``, ``zero3-offload`` and ``zero3-nvme``; where none fits, the one of them that needs least of the
    device.
    """

    rows: tuple[PlanRow, ...]
    chosen: str
    memory: Memory
    size: ModelSize
    world_size: int
    device_type: str
    precision: str
    activations: Activations | None
    """None where they could not be measured; then they count as nothing."""
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PlanRow:
        """Return the row of a strategy.

        Raises:
            UnknownNameError: there is none of that name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown("strategy", name, [row.name for row in self.rows])

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    @property
    def fits(self) -> bool:
        """Whether what was chosen fits."""
        return self[self.chosen].fits

    def __str__(self) -> str:
        return self.table()

    def table(self, names: Sequence[str] | None = None) -> str:
        """Return the rows, or those of ``names``, as a table under a line on what was counted."""
        rows = [row for row in self.rows if names is None or row.name in names]
        lines = [_HEAD, *(self._cells(row) for row in rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        text = [
            "  ".join(
                cell.ljust(width) if column in (0, len(_HEAD) - 1) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.summary, *text, *self.notes])

    @property
    def summary(self) -> str:
        """What was counted, and the memory that is there, in a line."""
        size, memory = self.size, self.memory
        kept = "activations unknown" if self.activations is None else f"{shown(self.activations.kept)} of activations"
        there = [f"{shown(memory.device)} on the {self.device_type}"]
        there += [] if memory.device_is_host else [f"{shown(memory.host)} on the host"]
        there += [f"{shown(memory.disk)} on disk"] if memory.disk else []
        frozen = f" ({size.frozen:,} frozen)" if size.frozen else ""
        return (
            f"Memory for each of {self.world_size} rank(s) in {self.precision}: {size.elements:,} parameters{frozen}, "
            f"{kept}; there are {', '.join(there)}."
        )

    def _cells(self, row: PlanRow) -> list[str]:
        needs = row.needs
        name = f"> {row.name}" if row.name == self.chosen else f"  {row.name}"
        places = (needs.device.total, needs.host.total, needs.disk.total)
        return [name, *map(shown, needs.everywhere), *map(shown, places), row.verdict]


_HEAD = ["  strategy", *(each.name.partition("_")[0] for each in fields(Bytes)), "device", "host", "disk", ""]


def candidates(world_size: int) -> tuple[str, ...]:
    """Return what ``strategy="auto"`` tries, the cheapest in time first."""
    return ("single" if world_size == 1 else "ddp", "fsdp", "zero3-offload", "zero3-nvme")


def make_plan(
    size: ModelSize,
    ranks: Ranks,
    precision: Precision,
    device_type: str,
    memory: Memory,
    activations: Activations | None,
    refusals: Mapping[str, str],
    notes: Sequence[str] = (),
    accumulates: bool = False,
) -> MemoryPlan:
    """Return the plan; ``refusals`` say why strategies cannot be used, by name."""
    kept = activations or Activations(0, _casts(size, precision))
    rows = []
    for name, layout in LAYOUTS.items():
        needs = footprint(layout, size, ranks, precision, kept.kept, kept.casts, accumulates)
        rows.append(PlanRow(name, needs, shortage(needs, memory), refusals.get(name)))
    tried = [row for name in candidates(ranks.world_size) for row in rows if row.name == name and row.refusal is None]
    fitting = [row for row in tried if row.fits]
    frugal = sorted(tried, key=lambda row: _on_device(row.needs, memory))
    # Where nothing can be used, what every machine has says best what is wrong.
    chosen = (fitting or frugal or rows)[0].name
    if tried and not fitting:
        notes = [*notes, f"Nothing fits by this count; {chosen} needs least of the device."]
    return MemoryPlan(
        tuple(rows), chosen, memory, size, ranks.world_size, device_type, precision.name, activations, tuple(notes)
    )


def shortage(needs: Footprint, memory: Memory, usable: float = _USABLE) -> str | None:
    """Return the first place whose memory does not suffice, or None."""
    device, disk = _on_device(needs, memory), needs.disk.total
    host = 0 if memory.device_is_host else needs.host.total
    if device > memory.device * usable:
        return "device"
    if host > memory.host * usable:
        return "host"
    return "disk" if disk > memory.disk * usable else None


def _on_device(needs: Footprint, memory: Memory) -> int:
    return needs.device.total + (needs.host.total if memory.device_is_host else 0)


def fits_easily(size: ModelSize, ranks: Ranks, precision: Precision, memory: Memory) -> bool:
    """Whether whole parameters, gradients and Adam's moments take but a small part of the memory."""
    needs = footprint(LAYOUTS["single"], replace(size, state_bytes=None), ranks, precision)
    return shortage(Footprint(needs.device), memory, _EASILY) is None


def shown(number: int) -> str:
    """Return bytes with three digits or so: ``0``, ``999 B``, ``1.2 MB``."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    text = f"{value:.0f}" if not unit or value >= 99.95 else f"{value:.1f}"
    return f"{text} {_UNITS[unit]}" if number else "0"


def _casts(size: ModelSize, precision: Precision) -> int:
    return size.elements * precision.compute_dtype.itemsize if precision.is_mixed else 0
