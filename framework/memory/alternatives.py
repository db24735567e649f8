"""Changes that make a run fit into memory, by the formulas of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.precision import Precision
from .formulas import LAYOUTS, footprint
from .memory_plan import MemoryPlan, casts_of, shortage
from .ranks import Ranks

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
    """Return the changes to a plan under the strategy ``name`` that fit."""
    strategies = tuple(row.name for row in plan if row.fits and row.refusal is None and row.name != name)
    own = plan.ranks
    ranks = own
    while not _fits(plan, name, precision, ranks, 1.0) and ranks.world_size < _MOST_RANKS:
        ranks = replace(ranks, world_size=2 * ranks.world_size)
    fits = _fits(plan, name, precision, ranks, 1.0)
    now = plan.data.micro_batch if plan.data is not None else None
    smaller = largest_micro_batch(plan, name, precision, now - 1) if now is not None else None
    return Alternatives(strategies, smaller, ranks.world_size if fits else None)


def largest_micro_batch(plan: MemoryPlan, name: str, precision: Precision, most: int) -> int | None:
    """Return the largest power of two, at most ``most``, that fits as micro-batch under the strategy ``name``.

    None if no power of two fits, if the plan has no such strategy, or if a micro-batch was not measured.
    """
    now = plan.data.micro_batch if plan.data is not None else None
    if now is None or plan.activations is None or name not in LAYOUTS:
        return None
    own = plan.ranks
    sizes = (1 << power for power in reversed(range(most.bit_length())))
    return next((size for size in sizes if _fits(plan, name, precision, own, size / now)), None)


def _fits(plan: MemoryPlan, name: str, precision: Precision, ranks: Ranks, part: float) -> bool:
    """Whether a strategy fits with a part of the activations."""
    kept = plan.activations.kept if plan.activations is not None else 0
    casts = plan.activations.casts if plan.activations is not None else casts_of(plan.size, precision)
    needs = footprint(LAYOUTS[name], plan.size, ranks, precision, round(part * kept), casts, plan.accumulates)
    return shortage(needs, plan.memory) is None
