"""Plans with rehearsed rows: that of one strategy, or those by which ``strategy="auto"`` chooses; degrees that fit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.degrees import Degrees
from ..core.errors import PhalanxError
from ..core.registry import STRATEGIES
from ..core.size_text import size_text
from ..launch import launch_function
from ..memory.formulas import LAYOUTS
from ..memory.memory_plan import MemoryPlan
from .model_measurements import first_batch, is_small, summary_of
from .rehearsals import Rehearsals, by_formulas, row_of

if TYPE_CHECKING:
    from ..parallel.resources import Resources
    from ..parallel.strategy import Strategy
    from ..rehearsal.one_rank import Rehearsed
    from .plan_target import PlanTarget
    from .session import Session, StageRequest

# The search for degrees that fit ends after this time, and with so many.
_SEARCH_SECONDS = 30.0
_MOST_FOUND = 3


def with_rehearsal(session: Session, request: StageRequest, plan: MemoryPlan, target: PlanTarget) -> MemoryPlan:
    """Return a plan with the row of one strategy rehearsed, in a process of its own.

    With ``rehearse="auto"`` the choice is confirmed as in a fit. If nothing fits, notes name degrees that do. If a
    strategy cannot be rehearsed, a note says so.
    """
    machines = replace(target.resources(session.fabric.resources), device_type=plan.device_type)
    given = target.rehearse or plan.chosen
    try:
        return launch_function(_planned, (session, request, plan, machines, given), 1)
    except PhalanxError as error:
        # Such as a process that cannot be forked, as CUDA is in use in it.
        name = plan.chosen if given == "auto" else given if isinstance(given, str) else given.name
        return plan.with_notes(by_formulas(name, summary_of(error)))


def _planned(
    session: Session, request: StageRequest, plan: MemoryPlan, machines: Resources, given: str | Strategy
) -> MemoryPlan:
    rehearsals = Rehearsals(session, request, machines, lambda: first_batch(session, request)[0])
    if given == "auto":
        return confirmed(rehearsals, plan, is_small(request.module, machines, plan.memory))
    plan, found = rehearsals.tried(plan, given)
    return plan if found is None else _with_degrees_that_fit(rehearsals, plan, found)


def confirmed(rehearsals: Rehearsals, plan: MemoryPlan, only_fastest: bool = False) -> MemoryPlan:
    """Return a plan in which ``strategy="auto"`` has chosen: the first strategy whose rehearsed step fits.

    Those that fit by formulas come first. With degrees, which formulas count only in part, it is the fastest.

    Args:
        rehearsals: the step.
        plan: the plan by formulas.
        only_fastest: try the fastest strategy alone, which a fit of a small model takes without a rehearsal.
    """
    names = [name for name in plan.candidates if name not in LAYOUTS or plan[name].refusal is None]
    if only_fastest:
        names = list(plan.candidates[:1])
    if not plan.degrees.used:
        names.sort(key=lambda name: not plan[name].fits)
    found = None
    for name in names:
        plan, rehearsed = rehearsals.tried(plan, name)
        found = rehearsed or found
        if plan[name].fits and plan[name].refusal is None:
            return plan.choosing([name])
    plan = plan.choosing(names or plan.candidates)
    return plan if found is None else _with_degrees_that_fit(rehearsals, plan, found)


def _with_degrees_that_fit(rehearsals: Rehearsals, plan: MemoryPlan, own: Rehearsed) -> MemoryPlan:
    """Return a plan with notes on degrees that fit, if the rehearsed strategy does not."""
    if row_of(own, plan).fits:
        return plan
    found = _fitting(rehearsals, plan, own)
    notes = [f"{each.strategy} with {_as_argument(each)} fits: {size_text(each.peak.total)}." for each in found]
    return plan.with_notes(*notes)


def _fitting(rehearsals: Rehearsals, plan: MemoryPlan, own: Rehearsed) -> Iterator[Rehearsed]:
    """Yield rehearsals of other degrees that fit."""
    end, found = time.monotonic() + _SEARCH_SECONDS, 0
    part, machines = rehearsals.part(plan), rehearsals.machines
    # A degree divides what a rank holds by itself at best.
    least = own.peak.total / max(1, plan.memory.device)
    for name, degrees in _other_degrees(own, machines, least):
        if (left := end - time.monotonic()) <= 0 or found == _MOST_FOUND:
            return
        others = replace(machines, degrees=degrees)
        if rehearsals.refusal_of(name, others) is not None:
            continue
        try:
            each = rehearsals.run(STRATEGIES.load(name)().with_degrees(degrees), part, left)
        except Exception:  # what cannot be rehearsed is not proposed
            continue
        if row_of(each, plan).fits:
            found += 1
            yield each


def _other_degrees(own: Rehearsed, machines: Resources, least: float) -> Iterator[tuple[str, Degrees]]:
    """Yield strategies with degrees of at least ``least`` that divide the ranks, the likeliest to fit first."""
    if own.strategy != "fsdp" or machines.degrees.used:
        yield "fsdp", Degrees()
    for degree in (8, 4, 2):
        if degree >= least and machines.world_size % degree == 0:
            yield "fsdp", Degrees(cp=degree)
            if machines.devices % degree == 0:
                yield "fsdp", Degrees(tp=degree)
            yield "fsdp", Degrees(ep=degree)
            yield "pipeline", Degrees(pp=degree)


def _as_argument(found: Rehearsed) -> str:
    return f"parallel={found.layout.replace(' x ', ',')!r}"
