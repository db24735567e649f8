"""Cross-process triggers and the one control reduction of an optimizer step.

Any rank may raise a named trigger at any moment; all ranks see it at the same step boundary. What they decide by
travels in one vector of eleven numbers, summed over the ranks apart from gradients: launched when a window is fetched,
read before its first backward, so that it hides behind the forward pass. Only when some rank has raised something is
there a second exchange, of the names. In one process nothing is exchanged at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from ..core.errors import DesyncError, did_you_mean
from .straggler import Pace
from .world import World


class Signal(str, Enum):
    """The triggers of phalanx's own. Users may raise others, by any other name."""

    NONFINITE = "nonfinite"
    """A rank found a loss that is NaN or infinite; the payload is the error's message."""
    NOTE = "note"
    """Something to show on rank 0; the payload is the text."""
    SAVE_DONE = "saved"
    """An asynchronous save has finished; the payload is the save's number."""
    END_EPOCH = "end_epoch"
    """A hook wants no more batches of this epoch."""
    CONTINUE = "go_on"
    """A stop that was requested before is withdrawn."""
    PREEMPT = "leave"
    """A rank received a preemption signal, or a job's time is nearly up; the payload is the signal's name."""
    STOP = "stop"
    """Training is to stop; the payload is the reason, which may be empty."""
    VALIDATE = "validate"
    """Rank 0's clock says that a validation is due."""

    def __str__(self) -> str:
        return self.value


Sent = dict[int, Any]
"""The payloads of one trigger by the rank that raised it."""

# Steps are told apart by their squares too: modulo this, sums of those over thousands of ranks stay exact in float64.
_STEPS_TOLD = 1 << 20


class NameTable(Protocol):
    """The names that this rank has logged for the epoch's end. ``mark`` is a number below 2**20 that tells them apart.

    Sums of its square over thousands of ranks stay exact in float64.
    """

    mark: int

    def epoch_names(self) -> list[str]: ...


class _NoNames:
    mark = 0

    def epoch_names(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Agreement:
    """What all ranks know alike about an optimizer step."""

    total_weight: float
    """Sum of the window's weights over the ranks."""
    ranks_with_data: int
    batches: int | None
    """Micro-batches in the window where every rank has the same number, else None."""


class Triggers:
    """Named triggers of one run. ``fired`` maps a name to ``{rank: payload}`` and is the same on every rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fired: dict[str, Sent] = {}
        self._handlers: dict[Signal, Callable[[Sent], None]] = {}
        self.raised: dict[str, Any] = {}
        """What this rank has raised and no boundary has seen. The loop looks whether it is empty in every step."""
        self.posted: deque[tuple[str, Any]] = deque()
        """What other threads of this rank have raised. The loop looks here as well."""
        self.table: NameTable = _NoNames()
        self.pace = Pace()
        self._launched: tuple[torch.Tensor, Any, dict[str, Any]] | None = None
        self._marks = self._told = (0.0, 0.0)
        self._step = 0

    def on(self, signal: Signal, handler: Callable[[Sent], None]) -> None:
        """Call ``handler`` with ``{rank: payload}`` whenever ``signal`` has fired and ``handle`` is called."""
        self._handlers[signal] = handler
        self._handlers = {signal: self._handlers[signal] for signal in Signal if signal in self._handlers}

    def handle(self) -> None:
        """Call the handlers of all signals that have fired, in the order of ``Signal``."""
        for signal, handler in self._handlers.items():
            if (sent := self.fired.get(signal)) is not None:
                handler(sent)

    def set(self, name: str, payload: Any = None) -> None:
        """Raise a trigger on this rank. Safe in a signal handler; raising it twice before it fires keeps the first."""
        self.raised.setdefault(name, payload)

    def post(self, name: str, payload: Any = None) -> None:
        """Raise a trigger from another thread than the one that trains; the last payload counts."""
        self.posted.append((name, payload))

    def _accept(self) -> None:
        while self.posted:
            name, payload = self.posted.popleft()
            self.raised[name] = payload

    def take(self) -> None:
        """One process: make what was raised fire now."""
        self._accept()
        raised, self.raised = self.raised, {}
        self.fired = {name: {0: payload} for name, payload in raised.items()}

    def launch(self, step: int, weight: float, batches: int) -> None:
        """Start the control reduction of optimizer step ``step``. Collective."""
        if self.posted:
            self._accept()
        # The swap comes first: what a signal handler raises between the lines goes into the old dict and is counted.
        raised, self.raised = self.raised, {}
        pace = self.pace
        pace.launched()
        mark, own = self.table.mark, pace.own
        at = step % _STEPS_TOLD
        ranks_alike = (at, at * at, mark, mark * mark, own, own * own)
        vector = torch.tensor(
            (weight, batches, batches * batches, batches > 0, bool(raised), *ranks_alike), dtype=torch.float64
        )
        self._step = step
        self._launched = (vector, self.world.control_reduce(vector), raised)

    def read(self) -> Agreement:
        """Wait for the reduction that ``launch`` started. Collective.

        Raises:
            DesyncError: the ranks are not at the same optimizer step.
        """
        assert self._launched is not None
        vector, work, raised = self._launched
        self._launched = None
        self.pace.arrived()
        work.wait()
        weight, batches, squares, with_data, raised_anywhere, *alike = vector.tolist()
        steps, step_squares, marks, mark_squares, own, own_squares = alike
        size = self.world.size
        if size * step_squares != steps * steps:
            raise self._out_of_step()
        if raised_anywhere or self.fired:
            self._fire(raised if raised_anywhere else None)
        # A rank without data need not log what others do.
        if size * mark_squares != marks * marks and with_data == size:
            self._compare_names((marks, mark_squares))
        if size * own_squares > own * own and self.pace.differs(self._step, size, own, own_squares):
            self._tell(self.pace.straggler(self.world.all_gather_object(self.pace.own)))
        equal = size * squares == batches * batches
        return Agreement(weight, int(with_data), int(batches) // size if equal else None)

    def _out_of_step(self) -> DesyncError:
        """Name the first rank that is elsewhere. Collective."""
        steps = self.world.all_gather_object(self._step)
        other = next(rank for rank, step in enumerate(steps) if step != steps[0])
        return DesyncError(
            f"the {self.world.size} ranks are not at the same optimizer step (this one is rank {self.world.rank}): "
            f"rank {other} is at {steps[other]}, rank 0 at {steps[0]}; every rank must run the same loop. Look for a "
            "condition on the rank around a step or a fit."
        )

    def _compare_names(self, marks: tuple[float, float]) -> None:
        """Tell of logged names that differ for the second step, once for each difference. Collective."""
        lasts, self._marks = marks == self._marks, marks
        if not lasts or marks == self._told:
            return
        self._told = marks
        tables = [set(names) for names in self.world.all_gather_object(self.table.epoch_names())]
        for rank, names in enumerate(tables):
            for name in sorted(names ^ tables[0]):
                has, lacks = (rank, 0) if name in names else (0, rank)
                self._tell(
                    f"Rank {lacks} has not logged {name!r} in this epoch, rank {has} has (optimizer step "
                    f"{self._step}): the end of the epoch fails unless every rank that has data logs the same names."
                    f"{did_you_mean(name, tables[lacks] - tables[has])}"
                )
                return

    def _tell(self, text: str | None) -> None:
        if text is not None:
            self.fired.setdefault(Signal.NOTE, {})[0] = text

    def agree(self) -> dict[str, dict[int, Any]]:
        """Exchange what was raised and wait for it: the blocking form. Collective. Returns ``fired``."""
        if self.world.size == 1:
            self.take()
            return self.fired
        self._accept()
        raised, self.raised = self.raised, {}
        anywhere = torch.tensor([bool(raised)], dtype=torch.float64)
        self.world.control_reduce(anywhere).wait()
        self._fire(raised if anywhere.item() else None)
        return self.fired

    def _fire(self, raised: dict[str, Any] | None) -> None:
        self.fired = {}
        if raised is None:
            return
        for rank, names in enumerate(self.world.all_gather_object(raised)):
            for name, payload in names.items():
                self.fired.setdefault(name, {})[rank] = payload
