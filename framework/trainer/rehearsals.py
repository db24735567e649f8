"""Rehearsals of a module's step with a strategy, among ranks that are not there, and plans with their rows."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from ..core.degrees import Degrees
from ..core.errors import PhalanxError
from ..core.global_batch import pieces_of
from ..core.patches import patch
from ..core.position_rng import RandomStream
from ..core.registry import STRATEGIES, automatic
from ..core.size_text import size_text
from ..core.torch_internals import FakeTensorMode
from ..distributed.groups_aside import groups_aside
from ..launch import launch_function
from ..memory.formulas import Footprint
from ..memory.memory_plan import MemoryPlan, PlanRow, shortage
from ..rehearsal import Part, TimeLimit, rehearse
from .checks import check_sequences
from .model_measurements import first_batch, is_small, summary_of

if TYPE_CHECKING:
    from ..api.train_module import TrainModule
    from ..metrics.logger import Logger
    from ..parallel.resources import Resources
    from ..parallel.strategy import Strategy
    from ..rehearsal.one_rank import Rehearsed
    from .plan_target import PlanTarget
    from .session import Session, StageRequest

# Errors that mean a strategy cannot be used on this machine.
_REFUSALS = (PhalanxError, ImportError, OSError)
# Packages whose errors mean in a rehearsal what they mean in a fit.
_REFUSING = ("strategies.", "framework.parallel.", "framework.core.")
# All rehearsals of a plan or a fit together, where the other ranks wait for one of them.
_MOST_SECONDS = 120.0
WHOLE_LAYERS = "Layers that tp splits count in full, so each rank needs less than this."
"""The note of a plan by formulas."""
# The search for degrees that fit ends after this time, and with so many.
_SEARCH_SECONDS = 30.0
_MOST_FOUND = 3


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
    if clipping[0] is not None and clipping[1] == "value" and not strategy.gradients.clips_by_value:
        return "It clips only by norm."
    return None


def _checked(given: str | Strategy, resources: Resources) -> Strategy:
    """Return a strategy with the degrees of a plan, whose ranks, device and precision it accepts."""
    strategy = _built(given).with_degrees(resources.degrees)
    strategy.check(resources.world_size, resources.device_type, resources.num_nodes, resources.precision)
    return strategy


def _built(given: str | Strategy) -> Strategy:
    # Without arguments, as "auto" would construct it: zero3-nvme then takes its folder from the environment.
    return STRATEGIES.load(given)() if isinstance(given, str) else given.clone()


class _Sink:
    """Takes the place of a logger: accepts every call, and records nothing."""

    def __getattr__(self, name: str) -> _Sink:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Sink:
        return self


@contextlib.contextmanager
def _without_loggers(session: Session) -> Generator[None, None, None]:
    """Return a context in which a step that logs by itself records nothing."""
    loggers = list(session.loggers)
    session.loggers[:] = [cast("Logger", _Sink()) for _ in loggers]
    try:
        yield
    finally:
        session.loggers[:] = loggers


def by_formulas(name: str, reason: str) -> str:
    """Return the note on a strategy that cannot be rehearsed."""
    return f"{name} is counted by formulas, as it could not be rehearsed: {reason}"


def _refused(plan: MemoryPlan, name: str, refusal: str) -> PlanRow:
    known = next((row for row in plan if row.name == name), PlanRow(name, Footprint()))
    return replace(known, refusal=refusal)


def row_of(found: Rehearsed, plan: MemoryPlan) -> PlanRow:
    """Return the row of a strategy that was rehearsed."""
    needs = Footprint(found.peak)
    return PlanRow(found.strategy, needs, shortage(needs, plan.memory), None, found.rank, found.traffic)


@dataclass(frozen=True)
class _Failure:
    """The reason for which there is no rehearsal."""

    text: str
    is_refusal: bool
    """Whether a fit would be refused, or fail, for the same reason."""


@dataclass(frozen=True)
class Rehearsals:
    """The step of a module, to be rehearsed in this process on the machines of a plan.

    It may be one of several ranks, which wait meanwhile: nothing communicates with them, and no device is used.
    """

    session: Session
    request: StageRequest
    machines: Resources
    read: Callable[[], Any]
    """Returns the first micro-batch of a rank."""
    end: float = field(default_factory=lambda: time.monotonic() + _MOST_SECONDS)
    """``time.monotonic()`` at which rehearsals are given up."""

    def tried(self, plan: MemoryPlan, given: str | Strategy) -> tuple[MemoryPlan, Rehearsed | None]:
        """Return a plan with the rehearsed row of a strategy, and the rehearsal; None if there is none."""
        name = given if isinstance(given, str) else given.name
        machines = self.machines
        refusal = self.refusal_of(given, machines)
        if refusal is not None:
            return plan.with_row(_refused(plan, name, refusal)), None
        strategy = _built(given)
        layout = strategy.memory_layout
        if layout is not None and layout.engine:
            return plan.with_notes(f"{name} is counted by formulas: its engine cannot be rehearsed."), None
        found = self._rehearsed(strategy, plan)
        if isinstance(found, _Failure):
            if found.is_refusal or layout is None:
                return plan.with_row(_refused(plan, name, found.text)), None
            return plan.with_notes(by_formulas(name, found.text)), None
        passes, window = _checked(given, machines).window_passes, _window(self.session, plan, machines)
        remark = None if passes is None else passes.remark([window], f"accumulate_grad_batches={window}")
        kept = tuple(note for note in plan.notes if note != WHOLE_LAYERS)
        plan = replace(plan, notes=kept).with_row(row_of(found, plan))
        return (plan if remark is None else plan.with_notes(remark)), found

    def refusal_of(self, given: str | Strategy, machines: Resources) -> str | None:
        """Return why a strategy cannot be used on machines; None if it can."""
        # The checks call methods of the module, which the other ranks do not.
        with groups_aside():
            return refusal_of(given, machines, self.request.module, 1, self.session.settings.clipping)

    def _rehearsed(self, strategy: Strategy, plan: MemoryPlan) -> Rehearsed | _Failure:
        if not self.request.module.automatic_optimization:
            return _Failure("its steps are those of manual optimization.", False)
        try:
            part = self.part(plan)
        except Exception as error:  # user code may raise anything
            return _Failure(summary_of(error), False)
        try:
            return self.run(strategy.with_degrees(self.machines.degrees), part)
        except TimeoutError as error:
            return _Failure(summary_of(error), False)
        except PhalanxError as error:
            return _Failure(str(error), _is_of_strategy(error))
        except Exception as error:  # user code may raise anything on tensors without data
            degrees = self._smaller(strategy, part)
            if degrees is None:
                return _Failure(summary_of(error), False)
            text = f"A step with {self.machines.degrees} fails ({summary_of(error)}) With {degrees} it does not."
            return _Failure(text, True)

    def run(self, strategy: Strategy, part: Part, most_seconds: float = math.inf) -> Rehearsed:
        """Rehearse a step.

        Raises:
            TimeoutError: it takes too long.
            Exception: code of the module, or of an optimizer, needs the values of tensors.
        """
        machines, seconds = self.machines, min(most_seconds, max(0.0, self.end - time.monotonic()))
        if not seconds:
            raise TimeoutError("the time for rehearsals is over.")
        with ExitStack() as stack:
            stack.enter_context(groups_aside())
            stack.enter_context(_without_loggers(self.session))
            stack.enter_context(self.session.records.assuming_length())
            # Training finds the generators as the user left them.
            stack.enter_context(RandomStream(0).entered())
            # It prints the stack of each operation that fails.
            patch(stack, logging.getLogger(FakeTensorMode.__module__), "disabled", True)
            stack.enter_context(TimeLimit(seconds))
            return rehearse(strategy, part, machines.world_size, machines.num_nodes)

    def part(self, plan: MemoryPlan) -> Part:
        """Return the module and its step."""
        settings, module = self.session.settings, self.request.module
        return Part(
            module,
            self.read(),
            self.machines.precision,
            _window(self.session, plan, self.machines),
            settings.clipping,
            self.request.datamodule,
            None if settings.memory is None else settings.memory.apply,
            plan.device_type == "cuda",
            self.session.view,
        )

    def _smaller(self, strategy: Strategy, part: Part) -> Degrees | None:
        """Return the closest smaller degrees of ``tp`` and ``cp`` with which a step can be computed, or None."""
        for axis in ("tp", "cp"):
            degree = self.machines.degrees.given.get(axis, 1)
            while degree > 2:
                degree = next(each for each in range(degree - 1, 0, -1) if degree % each == 0)
                degrees = replace(self.machines.degrees, **{axis: degree})
                with contextlib.suppress(Exception):  # the reason is the same
                    self.run(strategy.with_degrees(degrees), part)
                    return degrees
        return None


def _is_of_strategy(error: Exception) -> bool:
    """Whether a strategy raised the error, as it does in a fit, and not a part that knows of the rehearsal."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).partition(".")[2].startswith(_REFUSING)


def _window(session: Session, plan: MemoryPlan, machines: Resources) -> int:
    """Return the micro-batches of a step."""
    micro_batch = plan.data.micro_batch if plan.data is not None else None
    if session.settings.global_batch is None or micro_batch is None:
        return session.accumulation.constant or session.accumulation.largest
    data_ranks = machines.degrees.lay_out(machines.world_size).data_size
    return len(pieces_of(session.settings.global_batch.share(data_ranks), micro_batch))


# ---- plans with rehearsed rows -----------------------------------------------------------------------------------


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
    refused = {row.name for row in plan if row.refusal is not None}
    names = [name for name in plan.candidates if name not in refused]
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
    notes = [
        f"{each.strategy} with parallel={each.layout.replace(' x ', ',')!r} fits: {size_text(each.peak.total)}."
        for each in found
    ]
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
    """Yield other strategies and degrees of at least ``least`` that divide the ranks, the likeliest to fit first."""
    for name, degrees in automatic("smaller")(machines.world_size, machines.devices, least):
        if name != own.strategy or degrees.used or machines.degrees.used:
            yield name, degrees
