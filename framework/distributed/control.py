"""Cross-process triggers, and the one control reduction of an optimizer step.

Any rank may raise a named trigger at any moment; all ranks see it at the same step boundary. The numbers that ranks
must agree on form one ``ControlVector``, which is summed over the ranks on a separate CPU group. Its reduction starts
with a window, and is read before the window's first backward pass or, where nothing depends on it before, after the
last one: it hides behind the passes. A second exchange, of the names, happens only if a rank has raised a trigger. In
one process nothing is exchanged.

A rank without data reads the sums before its first forward pass, to decide which passes it runs. Passes may contain
collectives, so the second exchange is a call of its own, which every rank makes after all passes of its window.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ..core.errors import DesyncError, did_you_mean
from .straggler import Pace
from .world import Pending, World


class Signal(str, Enum):
    """The triggers that phalanx raises. Users may raise others, under any other name."""

    NONFINITE = "nonfinite"
    """A rank found a loss that is NaN or infinite; the payload is the error's message."""
    NOTE = "note"
    """A line for the console of rank 0; the payload is the text."""
    LOSS_SPIKE = "loss_spike"
    """A loss of a rank is far above the others; the payload is the optimizer step, and a line for the console."""
    OUT_OF_MEMORY = "out_of_memory"
    """An update ran out of memory and was repeated."""
    SAVE_DONE = "save_done"
    """An asynchronous save has finished; the payload is the save's number."""
    END_EPOCH = "end_epoch"
    """A hook requests that this epoch ends early."""
    CONTINUE = "continue"
    """An earlier request to stop is withdrawn."""
    PREEMPT = "preempt"
    """A rank received a preemption signal, or a job's time is nearly up; the payload is the signal's name."""
    STOP = "stop"
    """Training should stop; the payload is the reason, which may be empty."""
    VALIDATE = "validate"
    """A validation is due by the clock of rank 0."""

    def __str__(self) -> str:
        return self.value


Sent = dict[int, Any]
"""The payloads of one trigger by the rank that raised it."""

# The sums of x and of x*x show whether all ranks have the same number x. Modulo this value, the sums of squares over
# thousands of ranks stay exact in float64.
_STEP_MODULUS = 1 << 20


class Agreement(NamedTuple):
    """The result of the control reduction of an optimizer step, the same on all ranks."""

    total_weight: float
    """Sum of the window's weights over the ranks."""
    ranks_with_data: int
    batches: int | None
    """Micro-batches in the window if every rank has the same number, else None."""
    all_raised: bool = False
    """Whether every rank had raised a trigger before its window."""
    assures_next: bool = False
    """Whether every rank certainly has the micro-batches of another window of this size."""
    has_one_size: bool = True
    """Whether the windows of all ranks have the same size."""
    mean_size: float = 0.0
    """The mean over the ranks of the size of their windows."""


class NameTable(Protocol):
    """The metric names that this rank has logged for the end of the epoch."""

    mark: int
    """A number below 2**20 that differs for different sets of names."""

    def epoch_names(self) -> list[str]: ...


class NoNames:
    """A table without names."""

    mark = 0

    def epoch_names(self) -> list[str]:
        return []


class Tally(Protocol):
    """Numbers of each rank that are summed over the ranks beside those of the control reduction."""

    def unsent(self) -> Sequence[float]:
        """Return this rank's numbers since the last call, as many on every rank."""
        ...

    def receive(self, totals: Sequence[float]) -> None:
        """Take the sums over the ranks."""
        ...

    def waited(self, seconds: float) -> None:
        """Record how long this rank has waited for a control reduction."""
        ...


class NoTally:
    """A tally without numbers."""

    def unsent(self) -> Sequence[float]:
        return ()

    def receive(self, totals: Sequence[float]) -> None:
        pass

    def waited(self, seconds: float) -> None:
        pass


class ControlVector(NamedTuple):
    """The numbers that ranks sum for each optimizer step, beside those of a ``Tally``. The sums of a number and of its
    square show whether ranks agree.

    For ``n`` numbers, ``n * sum(x*x) == sum(x)**2`` holds exactly if all are equal.
    """

    weight: float
    """Sum of the weights of this rank's micro-batches."""
    batches: float
    """Micro-batches of this rank's window."""
    batches_squared: float
    has_data: float
    """1 where this rank has a micro-batch."""
    has_raised: float
    """1 where this rank has raised a trigger."""
    assures_next: float
    """1 where this rank certainly has the micro-batches of another window of this size."""
    window_size: float
    """Micro-batches of a window on a rank that has data for all of them."""
    window_size_squared: float
    step: float
    step_squared: float
    names: float
    """A hash of the names that were logged for the end of the epoch."""
    names_squared: float
    own_seconds: float
    """Seconds per step that this rank computes without waiting for other ranks; used to detect stragglers."""
    own_seconds_squared: float


_NUMBERS = len(ControlVector._fields)


class Triggers:
    """Named triggers of one run. ``fired`` maps a name to ``{rank: payload}`` and is the same on every rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fired: dict[str, Sent] = {}
        self.raised: dict[str, Any] = {}
        """Triggers of this rank that have not been exchanged yet. The loop checks in every step whether this is
        empty."""
        self._kept: dict[str, Sent] = {}
        """The triggers that have fired in a window that is repeated."""
        self._held: dict[str, Any] = {}
        """The triggers that this rank has raised in a window that is repeated."""
        self.posted: deque[tuple[str, Any]] = deque()
        """Triggers that other threads of this rank have raised. The loop checks these as well."""
        self.table: NameTable = NoNames()
        self.pace = Pace()
        self.tally: Tally = NoTally()
        self._handlers: dict[Signal, Callable[[Sent], None]] = {}
        self._launched: tuple[Pending, dict[str, Any]] | None = None
        self._read: ControlVector | None = None
        self._last_names = self._reported_names = (0.0, 0.0)
        self._step = 0

    def compare_names(self, table: NameTable) -> None:
        """Compare the metric names in ``table`` over the ranks whose results count, in every step."""
        if self.world.counts_data:
            self.table = table

    # ---- handlers -------------------------------------------------------------------------------------------------

    def on(self, signal: Signal, handler: Callable[[Sent], None]) -> None:
        """Call ``handler`` with ``{rank: payload}`` whenever ``signal`` has fired and ``handle`` is called."""
        handlers = {**self._handlers, signal: handler}
        # In the order of ``Signal`` on every rank: an error is raised before a stop is recorded.
        self._handlers = {signal: handlers[signal] for signal in Signal if signal in handlers}

    def handle(self) -> None:
        """Call the handlers of all signals that have fired, in the order of ``Signal``."""
        for signal, handler in self._handlers.items():
            if (sent := self.fired.get(signal)) is not None:
                handler(sent)

    # ---- raising --------------------------------------------------------------------------------------------------

    def set(self, name: str, payload: Any = None) -> None:
        """Raise a trigger on this rank. Safe in a signal handler; raising it twice before it fires keeps the first."""
        self.raised.setdefault(name, payload)

    def withdraw(self, name: str) -> None:
        """Withdraw a trigger that this rank has raised, if it has not been exchanged yet."""
        self.raised.pop(name, None)

    def post(self, name: str, payload: Any = None) -> None:
        """Raise a trigger from a thread other than the training thread; the last payload counts."""
        self.posted.append((name, payload))

    def keep(self) -> None:
        """Keep what has fired, as the window of this step is run again, with another control reduction.

        That reduction does not take what the window has raised, which would fire a step too early.
        """
        if self.world.size == 1:
            return  # a single process takes them at the end of the step
        self._kept |= self.fired
        raised, self.raised = self.raised, {}
        self._held = {**raised, **self._held}

    def _accept(self) -> None:
        while self.posted:
            name, payload = self.posted.popleft()
            self.raised[name] = payload

    def take(self) -> None:
        """Fire the raised triggers now, without communication. For a single process."""
        self._accept()
        raised, self.raised = self.raised, {}
        self.fired = {name: {0: payload} for name, payload in raised.items()}

    # ---- the control reduction ------------------------------------------------------------------------------------

    def launch(self, step: int, weight: float, batches: int, assures_next: bool = False, window_size: int = 0) -> bool:
        """Start the control reduction of a window; return whether this rank has raised a trigger before. Collective.

        Args:
            step: the number of optimizer steps that were reached before, ``Progress.steps_reached``. Skipped updates
                count, as ranks go through the same windows.
            weight: the sum of the weights of this rank's micro-batches.
            batches: the number of this rank's micro-batches.
            assures_next: whether this rank certainly has the micro-batches of another window of this size.
            window_size: the number of micro-batches in a window, which must be the same on every rank.
        """
        if self.posted:
            self._accept()
        # Between the micro-batches of a window, of which ranks have different numbers, no rank sees a trigger.
        self.fired = {}
        # Swap the dicts first: a trigger that a signal handler raises between these lines enters the old dict and is
        # counted below.
        raised, self.raised = self.raised, {}
        pace = self.pace
        pace.launched()
        at, mark, own = step % _STEP_MODULUS, self.table.mark, pace.own
        numbers = ControlVector(
            weight, batches, batches * batches, batches > 0, bool(raised), assures_next,
            window_size, window_size * window_size, at, at * at, mark, mark * mark, own, own * own,
        )  # fmt: skip
        self._step = step
        self._launched = self.world.control_reduce((*numbers, *self.tally.unsent())), raised
        return bool(raised)

    def read(self) -> Agreement:
        """Wait for the reduction that ``launch`` started, and run the exchanges that follow from it. Collective.

        Raises:
            DesyncError: the ranks are not at the same optimizer step.
        """
        self.pace.arrived()
        agreement = self.agreement()
        self.check_step()
        self.exchange()
        return agreement

    def agreement(self, share: float = 1.0) -> Agreement:
        """Wait for the reduction that ``launch`` started, and return its result.

        No other collective is part of this call, so that ranks may call it at different points of a step: a rank
        without data before its first forward pass, the others after it.

        Args:
            share: the share of steps in which this rank waits here for the others, and not in the reduction of
                gradients; 0 if it does not wait here.
        """
        assert self._launched is not None
        began = time.perf_counter()
        numbers = self._launched[0].wait()
        if share:
            self.tally.waited((time.perf_counter() - began) / share)
        total, size = ControlVector(*numbers[:_NUMBERS]), self.world.size
        self._read = total
        self.tally.receive(numbers[_NUMBERS:])
        equal = size * total.batches_squared == total.batches * total.batches
        return Agreement(
            total.weight,
            int(total.has_data),
            int(total.batches) // size if equal else None,
            total.has_raised == size,
            total.assures_next == size,
            size * total.window_size_squared == total.window_size * total.window_size,
            total.window_size / size,
        )

    def check_step(self, is_alone: bool = False) -> None:
        """Check that all ranks are at the same optimizer step, once ``agreement`` has returned. Collective if not.

        Args:
            is_alone: whether other ranks may check at another point, so that no collective may follow.

        Raises:
            DesyncError: they are not.
        """
        if (total := self._read) is not None and self.world.size * total.step_squared != total.step * total.step:
            self._launched = self._read = None
            raise self._out_of_step(total.step / self.world.size if is_alone else None)

    def exchange(self) -> None:
        """Run the exchanges that follow from the result of ``agreement``, of triggers among others. Collective.

        Every rank calls it at the same point in relation to all other collectives, those of passes included.
        """
        assert self._launched is not None
        assert self._read is not None
        raised, total, size = self._launched[1], self._read, self.world.size
        self._launched = self._read = None
        if total.has_raised:
            self._fire(raised)
        if self._kept:
            self.fired, self._kept = {**self._kept, **self.fired}, {}
        if self._held:
            held, self._held = self._held, {}
            for name, payload in held.items():
                self.set(name, payload)
        # A rank without data need not log the names that others log.
        counting = size // self.world.identical
        if counting * total.names_squared != total.names * total.names and total.has_data == size:
            self._compare_names((total.names, total.names_squared))
        own, squared = total.own_seconds, total.own_seconds_squared
        if size * squared > own * own and self.pace.differs(self._step, size, own, squared):
            self._note(self.pace.straggler(self.world.all_gather_object(self.pace.own)))

    def _out_of_step(self, mean: float | None) -> DesyncError:
        """Return the error that names the first rank at another step. Collective unless the mean of all is given."""
        if mean is None:
            steps = self.world.all_gather_object(self._step)
            other = next(rank for rank, step in enumerate(steps) if step != steps[0])
            found = f"rank {other} is at {steps[other]}, rank 0 at {steps[0]}"
        else:
            found = f"this rank is at {self._step}, the mean of all is {mean:g}"
        return DesyncError(
            f"the {self.world.size} ranks are not at the same optimizer step (this one is rank {self.world.rank}): "
            f"{found}; every rank must run the same loop. Look for a condition on the rank around a step or a fit."
        )

    def _compare_names(self, marks: tuple[float, float]) -> None:
        """Report names that ranks logged differently in two consecutive steps, once per difference. Collective."""
        lasts, self._last_names = marks == self._last_names, marks
        if not lasts or marks == self._reported_names:
            return
        self._reported_names = marks
        own = self.table.epoch_names() if self.world.counts_data else None
        tables = {rank: set(each) for rank, each in enumerate(self.world.all_gather_object(own)) if each is not None}
        for rank, names in tables.items():
            for name in sorted(names ^ tables[0]):
                has, lacks = (rank, 0) if name in names else (0, rank)
                self._note(
                    f"Rank {lacks} has not logged {name!r} in this epoch, rank {has} has (optimizer step "
                    f"{self._step}): the end of the epoch fails unless every rank that has data logs the same names."
                    f"{did_you_mean(name, tables[lacks] - tables[has])}"
                )
                return

    def _note(self, text: str | None) -> None:
        if text is not None:
            self.fired.setdefault(Signal.NOTE, {})[0] = text

    def agree(self) -> dict[str, Sent]:
        """Exchange the raised triggers, blocking, and return ``fired``. Collective."""
        if self.world.size == 1:
            self.take()
            return self.fired
        self._accept()
        raised, self.raised = self.raised, {}
        anywhere, *totals = self.world.control_reduce((bool(raised), *self.tally.unsent())).wait()
        self.fired = {}
        self.tally.receive(totals)
        if anywhere:
            self._fire(raised)
        return self.fired

    def _fire(self, raised: dict[str, Any]) -> None:
        for rank, names in enumerate(self.world.all_gather_object(raised)):
            for name, payload in names.items():
                self.fired.setdefault(name, {})[rank] = payload
