"""Rehearsals for a plan: the step of a strategy among ranks that are not there, and degrees that fit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..core.degrees import Degrees
from ..core.errors import PhalanxError
from ..core.global_batch import pieces_of
from ..core.registry import STRATEGIES
from ..core.size_text import size_text
from ..launch import launch_function
from ..memory.formulas import LAYOUTS, Footprint
from ..memory.memory_plan import MemoryPlan, PlanRow, shortage
from ..rehearsal import Part, rehearse
from .model_measurements import first_batch
from .sequence_checks import check_sequences

if TYPE_CHECKING:
    from ..api.train_module import TrainModule
    from ..parallel.resources import Resources
    from ..parallel.strategy import Strategy
    from ..rehearsal.one_rank import Rehearsed
    from .plan_target import PlanTarget
    from .session import Session, StageRequest

# Errors that mean a strategy cannot be used on this machine.
_REFUSALS = (PhalanxError, ImportError, OSError)
# The search for degrees that fit begins no further rehearsal after this time, and ends with so many.
_SEARCH_SECONDS = 30.0
_MOST_FOUND = 3
WHOLE_LAYERS = "Layers that tp splits count in full, so each rank needs less than this."
"""The note of a plan by formulas."""


def refusal_of(
    given: str | Strategy,
    resources: Resources,
    module: TrainModule,
    optimizers: int,
    clipping: tuple[float | None, str],
) -> str | None:
    """Return why a strategy cannot be used here, by the checks that ``fit`` makes; None if it can."""
    try:
        strategy = _checked(given, resources)
        strategy.check_module(module)
        check_sequences(module, "fit", replace(resources, strategy=strategy))
    except _REFUSALS as error:
        return str(error)
    if optimizers > 1 and strategy.traits.takes_one_optimizer:
        return f"It supports one optimizer, and there are {optimizers} optimizers."
    if clipping[0] is not None and clipping[1] == "value" and not strategy.traits.replicates:
        return "It clips only by norm."
    return None


def _checked(given: str | Strategy, resources: Resources) -> Strategy:
    """Return a strategy with the degrees of a plan, whose ranks, device and precision it accepts."""
    # Without arguments, as "auto" would construct it: zero3-nvme then takes its folder from the environment.
    strategy = STRATEGIES.load(given)() if isinstance(given, str) else given.clone()
    strategy = strategy.with_degrees(resources.degrees)
    strategy.check(resources.world_size, resources.device_type, resources.num_nodes, resources.precision)
    return strategy


def with_rehearsal(session: Session, request: StageRequest, plan: MemoryPlan, target: PlanTarget) -> MemoryPlan:
    """Return a plan with the row of one strategy rehearsed, in a process of its own.

    If it does not fit, notes name degrees that do. If it cannot be rehearsed, a note says so.
    """
    given = target.rehearse
    given = plan.chosen if given == "auto" or given is None else given
    name = given if isinstance(given, str) else given.name
    machines = target.resources(session.fabric.resources)
    machines = replace(machines, device_type=plan.device_type)
    refusal = refusal_of(given, machines, request.module, 1, session.settings.clipping)
    if refusal is not None:
        return plan.with_row(_refused(plan, name, refusal))
    if name in LAYOUTS and LAYOUTS[name].engine:
        return replace(plan, notes=(*plan.notes, f"{name} is counted by formulas: its engine cannot be rehearsed."))
    found: tuple[Rehearsed, list[Rehearsed]] | _Failure
    try:
        found = launch_function(_rehearsed, (session, request, plan, machines, given), 1)
    except PhalanxError as error:
        # Such as a process that cannot be forked, as CUDA is in use in it.
        found = _Failure(_summary(error), False)
    if isinstance(found, _Failure):
        if found.is_refusal or name not in LAYOUTS:
            return plan.with_row(_refused(plan, name, found.text))
        note = f"{name} is counted by formulas, as it could not be rehearsed: {found.text}"
        return replace(plan, notes=(*plan.notes, note))
    own, fitting = found
    notes = [f"{each.strategy} with {_as_argument(each)} fits: {size_text(each.peak.total)}." for each in fitting]
    passes, window = _checked(given, machines).window_passes, _window(session, plan, machines)
    remark = None if passes is None else passes.remark([window], f"accumulate_grad_batches={window}")
    kept = [note for note in plan.notes if note != WHOLE_LAYERS]
    plan = replace(plan, notes=(*kept, *([] if remark is None else [remark])))
    return plan.with_row(_row(own, plan), notes)


def _refused(plan: MemoryPlan, name: str, refusal: str) -> PlanRow:
    known = next((row for row in plan if row.name == name), PlanRow(name, Footprint()))
    return replace(known, refusal=refusal)


def _row(found: Rehearsed, plan: MemoryPlan) -> PlanRow:
    needs = Footprint(found.peak)
    return PlanRow(found.strategy, needs, shortage(needs, plan.memory), None, found.rank, found.traffic)


# ---- in a process of its own -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failure:
    """The reason for which there is no rehearsal."""

    text: str
    is_refusal: bool
    """Whether a fit would be refused, or fail, for the same reason."""


def _rehearsed(
    session: Session, request: StageRequest, plan: MemoryPlan, machines: Resources, given: str | Strategy
) -> tuple[Rehearsed, list[Rehearsed]] | _Failure:
    """Return the rehearsal and, if it does not fit, those of degrees that do."""
    strategy = STRATEGIES.load(given)() if isinstance(given, str) else given
    try:
        part = _part(session, request, plan, machines)
    except Exception as error:  # user code may raise anything
        return _Failure(_summary(error), False)
    try:
        own = rehearse(strategy.with_degrees(machines.degrees), part, machines.world_size, machines.num_nodes)
    except PhalanxError as error:
        return _Failure(str(error), True)
    except Exception as error:  # user code may raise anything on tensors without data
        smaller = _smaller(strategy, part, machines)
        if smaller is None:
            return _Failure(_summary(error), False)
        return _Failure(f"A step with {machines.degrees} fails ({_summary(error)}) With {smaller} it does not.", True)
    return own, [] if _row(own, plan).fits else list(_fitting(own, part, plan, machines))


def _smaller(strategy: Strategy, part: Part, machines: Resources) -> Degrees | None:
    """Return the closest smaller degrees of ``tp`` and ``cp`` with which a step can be computed; None without any."""
    for axis in ("tp", "cp"):
        degree = machines.degrees.given.get(axis, 1)
        while degree > 2:
            degree = next(each for each in range(degree - 1, 0, -1) if degree % each == 0)
            degrees = replace(machines.degrees, **{axis: degree})
            with contextlib.suppress(Exception):  # the reason is the same
                rehearse(strategy.with_degrees(degrees), part, machines.world_size, machines.num_nodes)
                return degrees
    return None


def _summary(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0] or "no reason given"
    return f"{type(error).__name__}: {text}{'' if text.endswith('.') else '.'}"


def _window(session: Session, plan: MemoryPlan, machines: Resources) -> int:
    """Return the micro-batches of a step."""
    micro_batch = plan.data.micro_batch if plan.data is not None else None
    if session.settings.global_batch is None or micro_batch is None:
        return session.accumulation.constant or session.accumulation.largest
    data_ranks = machines.degrees.lay_out(machines.world_size).data_size
    return len(pieces_of(session.settings.global_batch.share(data_ranks), micro_batch))


def _part(session: Session, request: StageRequest, plan: MemoryPlan, machines: Resources) -> Part:
    settings, module = session.settings, request.module
    batch, _ = first_batch(session, request)
    return Part(
        module,
        batch,
        machines.precision,
        _window(session, plan, machines),
        settings.clipping,
        request.datamodule,
        None if settings.memory is None else settings.memory.apply,
        plan.device_type == "cuda",
        session.view,
    )


def _fitting(own: Rehearsed, part: Part, plan: MemoryPlan, machines: Resources) -> Iterator[Rehearsed]:
    """Yield rehearsals of other degrees that fit."""
    began, found = time.monotonic(), 0
    # A degree divides what a rank holds by itself at best.
    least = own.peak.total / max(1, plan.memory.device)
    for name, degrees in _candidates(own, machines, least):
        if time.monotonic() - began > _SEARCH_SECONDS or found == _MOST_FOUND:
            return
        others = replace(machines, degrees=degrees)
        if refusal_of(name, others, part.module, 1, part.clipping) is not None:
            continue
        try:
            strategy = STRATEGIES.load(name)().with_degrees(degrees)
            each = rehearse(strategy, part, machines.world_size, machines.num_nodes)
        except Exception:  # what cannot be rehearsed is not proposed
            continue
        if _row(each, plan).fits:
            found += 1
            yield each


def _candidates(own: Rehearsed, machines: Resources, least: float) -> Iterator[tuple[str, Degrees]]:
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
