"""``MemoryPlan``: the memory that each strategy needs on every rank, the memory available, and the strategy to use.

``alternatives`` are changes that make a run fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

from ..core.degrees import Degrees
from ..core.errors import unknown
from ..core.precision import Precision
from ..core.registry import STRATEGIES
from ..core.size_text import size_text
from ..core.wording import counted
from ..parallel.resources import candidates
from ..parallel.strategy import MemoryLayout
from .available_memory import Memory
from .communication import Traffic
from .formulas import Bytes, Footprint, ModelSize, Ranks, footprint
from .measure import Activations

# The usable part of the available memory: allocators fragment it, and libraries take some.
_USABLE = 0.9
# A model that takes less than this part of the memory fits without measuring it.
_EASILY = 0.25
_NOTHING = "Nothing fits by this count"


@dataclass(frozen=True)
class PlanRow:
    """One strategy: the memory that it needs on each rank, and why it cannot be used, if so."""

    name: str
    needs: Footprint
    shortage: str | None = None
    """The place whose memory is too small, ``"device"``, ``"host"`` or ``"disk"``; None if everything fits."""
    refusal: str | None = None
    """The reason why the strategy cannot be used here, in a sentence; None if it can."""
    rank: int | None = None
    """The rank whose step was rehearsed; None: ``needs`` is by formulas."""
    traffic: tuple[Traffic, ...] = ()
    """The collectives of a step that was rehearsed."""
    layout: MemoryLayout | None = None
    """The layout of the state, for which there are formulas; None if there are none for this strategy."""

    @property
    def fits(self) -> bool:
        """Whether the memory is sufficient."""
        return self.shortage is None

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.refusal is not None:
            return self.refusal.partition(". ")[0].partition(": ")[0]
        verdict = "fits" if self.shortage is None else f"too large for the {self.shortage}"
        return verdict if self.rank is None else f"{verdict}, rehearsed"


@dataclass(frozen=True)
class TrainingData:
    """The size of the training data; None: unknown."""

    micro_batch: int | None = None
    """Samples of a micro-batch of one rank."""
    samples: int | None = None
    """Samples of an epoch."""
    drop_last: bool = False
    """Whether a last global batch that is not full is left out."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that each strategy needs on every rank. Its ``str`` is a table.

    ``chosen`` is the strategy that ``strategy="auto"`` uses, as far as these numbers say. Of ``single`` (one rank) or
    ``ddp``, ``fsdp``, ``zero3-offload`` and ``zero3-nvme`` it is the first that can be used and fits; if none fits, the
    one that needs the least memory on the device. Degrees of parallelism leave fewer, or one.
    """

    rows: tuple[PlanRow, ...]
    chosen: str
    memory: Memory
    size: ModelSize
    world_size: int
    device_type: str
    precision: str
    activations: Activations | None
    """None if they could not be measured; they then count as 0 bytes."""
    notes: tuple[str, ...] = ()
    data: TrainingData | None = None
    """None if no batch was read."""
    local_size: int | None = None
    """Ranks of a node; None: all."""
    accumulates: bool = False
    degrees: Degrees = field(default_factory=Degrees)

    @property
    def ranks(self) -> Ranks:
        """The ranks as the formulas take them."""
        return Ranks(self.world_size, self.local_size, self.degrees)

    def __getitem__(self, name: str) -> PlanRow:
        """Return the row of a strategy.

        Raises:
            UnknownNameError: there is no row of that name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown("strategy", name, [row.name for row in self.rows])

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def with_row(self, row: PlanRow) -> MemoryPlan:
        """Return a plan with another row for a strategy, or one more."""
        rows = [row if each.name == row.name else each for each in self.rows]
        rows += [] if any(each.name == row.name for each in rows) else [row]
        return replace(self, rows=tuple(rows))

    def with_notes(self, *notes: str) -> MemoryPlan:
        """Return a plan with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    @property
    def candidates(self) -> tuple[str, ...]:
        """The strategies among which ``strategy="auto"`` chooses, the fastest first."""
        return candidates(self.world_size, self.degrees)

    def choosing(self, names: Sequence[str]) -> MemoryPlan:
        """Return a plan whose choice is the first of ``names`` that can be used and fits.

        If none fits, it is the one that needs the least memory on the device, and a note says so.
        """
        notes = tuple(note for note in self.notes if not note.startswith(_NOTHING))
        tried = [row for name in names for row in self.rows if row.name == name and row.refusal is None]
        fitting = next((row for row in tried if row.fits), None)
        if fitting is not None or not tried:
            # If none can be used, fit is to fail with the refusal of the first one.
            known = [row for name in names for row in self.rows if row.name == name]
            return replace(self, chosen=(fitting or (known or self.rows)[0]).name, notes=notes)
        chosen = min(tried, key=lambda row: _on_device(row.needs, self.memory)).name
        return replace(
            self, chosen=chosen, notes=(*notes, f"{_NOTHING}; {chosen} needs the least memory on the device.")
        )

    @property
    def fits(self) -> bool:
        """Whether the chosen strategy fits."""
        return self[self.chosen].fits

    def __str__(self) -> str:
        return self.table()

    def table(self, names: Sequence[str] | None = None) -> str:
        """Return all rows, or those of ``names``, as a table below the summary line."""
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
        """The size of the model and the available memory, in one line."""
        size, memory = self.size, self.memory
        kept = (
            "activations unknown" if self.activations is None else f"{size_text(self.activations.kept)} of activations"
        )
        available = [f"{size_text(memory.device)} on the {self.device_type}"]
        available += [] if memory.device_is_host else [f"{size_text(memory.host)} on the host"]
        available += [f"{size_text(memory.disk)} on disk"] if memory.disk else []
        frozen = f" ({size.frozen:,} frozen)" if size.frozen else ""
        return (
            f"Memory for each of {counted(self.world_size, 'rank')} in {self.precision}: {size.elements:,} "
            f"parameters{frozen}, {kept}; available are {', '.join(available)}."
        )

    def _cells(self, row: PlanRow) -> list[str]:
        needs = row.needs
        name = f"> {row.name}" if row.name == self.chosen else f"  {row.name}"
        places = (needs.device.total, needs.host.total, needs.disk.total)
        return [name, *map(size_text, needs.everywhere), *map(size_text, places), row.verdict]


_HEAD = ["  strategy", *(each.name.partition("_")[0] for each in fields(Bytes)), "device", "host", "disk", ""]


def counted_layouts() -> dict[str, MemoryLayout]:
    """Return what each strategy splits that the formulas know, by its name in the registry."""
    found = {}
    for name in STRATEGIES:
        with suppress(Exception):  # a plug-in may need arguments
            strategy = STRATEGIES.load(name)()
            # Others are a second name of a strategy.
            if strategy.name == name and strategy.memory_layout is not None:
                found[name] = strategy.memory_layout
    return found


def make_plan(
    layouts: Mapping[str, MemoryLayout],
    size: ModelSize,
    ranks: Ranks,
    precision: Precision,
    device_type: str,
    memory: Memory,
    activations: Activations | None,
    refusals: Mapping[str, str],
    notes: Sequence[str] = (),
    accumulates: bool = False,
    data: TrainingData | None = None,
) -> MemoryPlan:
    """Return the plan.

    Args:
        layouts: what each strategy splits, by its name; at least one.
        refusals: why strategies cannot be used, by their names.
        accumulates: whether windows have several micro-batches.
    """
    saved = activations or Activations(0, casts_of(size, precision))
    rows = []
    for name, layout in layouts.items():
        needs = footprint(layout, size, ranks, precision, saved.kept, saved.casts, accumulates)
        rows.append(PlanRow(name, needs, shortage(needs, memory), refusals.get(name), layout=layout))
    plan = MemoryPlan(
        tuple(rows),
        rows[0].name,
        memory,
        size,
        ranks.world_size,
        device_type,
        precision.name,
        activations,
        tuple(notes),
        data,
        ranks.local_size,
        accumulates,
        ranks.degrees,
    )
    return plan.choosing(plan.candidates)


def shortage(needs: Footprint, memory: Memory, usable: float = _USABLE) -> str | None:
    """Return the first place whose memory is too small, or None."""
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
    """Whether unsplit parameters, gradients and Adam's moments take only a small part of the memory."""
    needs = footprint(MemoryLayout(), replace(size, state_bytes=None), ranks, precision)
    return shortage(Footprint(needs.device), memory, _EASILY) is None


def casts_of(size: ModelSize, precision: Precision) -> int:
    """Return the bytes of the copies that autocast makes, if it casts every parameter."""
    return size.elements * precision.compute_dtype.itemsize if precision.is_mixed else 0


# ---- changes that make a run fit ------------------------------------------------------------------------------------


# No search goes beyond it.
_MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class Alternatives:
    """Changes to a run, each of which alone makes it fit."""

    strategies: tuple[str, ...]
    """Other strategies on the same ranks."""
    micro_batch: int | None
    """The largest power of two as micro-batch under the same strategy, if that is known; activations are taken to be
    proportional to it."""
    ranks: int | None
    """The smallest number of ranks under the same strategy, by doubling; the memory of a rank stays the same."""


def alternatives(plan: MemoryPlan, name: str, precision: Precision) -> Alternatives:
    """Return the changes to a plan under the strategy ``name``, which the formulas know, that fit."""
    layout = plan[name].layout
    assert layout is not None
    strategies = tuple(row.name for row in plan if row.fits and row.refusal is None and row.name != name)
    own = plan.ranks
    ranks = own
    while not _fits(plan, layout, precision, ranks, 1.0) and ranks.world_size < _MOST_RANKS:
        ranks = replace(ranks, world_size=2 * ranks.world_size)
    fits = _fits(plan, layout, precision, ranks, 1.0)
    now = plan.data.micro_batch if plan.data is not None else None
    smaller = largest_micro_batch(plan, name, precision, now - 1) if now is not None else None
    return Alternatives(strategies, smaller, ranks.world_size if fits else None)


def first_micro_batch(plan: MemoryPlan, name: str, precision: Precision, share: int) -> int | None:
    """Return the largest of the sizes that halving ``share`` gives that fits under the strategy ``name``.

    None as for ``largest_micro_batch``.
    """
    return _largest(plan, name, precision, [share >> power for power in range(share.bit_length())])


def largest_micro_batch(plan: MemoryPlan, name: str, precision: Precision, most: int) -> int | None:
    """Return the largest power of two, at most ``most``, that fits as micro-batch under the strategy ``name``.

    None if no power of two fits, if the plan has no such strategy, or if a micro-batch was not measured.
    """
    return _largest(plan, name, precision, [1 << power for power in reversed(range(most.bit_length()))])


def _largest(plan: MemoryPlan, name: str, precision: Precision, sizes: Sequence[int]) -> int | None:
    now = plan.data.micro_batch if plan.data is not None else None
    layout = next((row.layout for row in plan if row.name == name), None)
    if now is None or plan.activations is None or layout is None:
        return None
    return next((size for size in sizes if _fits(plan, layout, precision, plan.ranks, size / now)), None)


def _fits(plan: MemoryPlan, layout: MemoryLayout, precision: Precision, ranks: Ranks, part: float) -> bool:
    """Whether a strategy fits with a part of the activations."""
    kept = plan.activations.kept if plan.activations is not None else 0
    casts = plan.activations.casts if plan.activations is not None else casts_of(plan.size, precision)
    needs = footprint(layout, plan.size, ranks, precision, round(part * kept), casts, plan.accumulates)
    return shortage(needs, plan.memory) is None
