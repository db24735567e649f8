"""Cross-process triggers and the one control reduction of an optimizer step.

Any rank may raise a named trigger at any moment; all ranks see it at the same step boundary. What they decide by
travels in one vector of seven numbers, summed over the ranks apart from gradients: launched when a window is fetched,
read before its first backward, so that it hides behind the forward pass. Only when some rank has raised something is
there a second exchange, of the names. In one process nothing is exchanged at all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from .errors import DesyncError
from .world import World


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
        self.fired: dict[str, dict[int, Any]] = {}
        self.raised: dict[str, Any] = {}
        """What this rank has raised and no boundary has seen. The loop looks whether it is empty in every step."""
        self.posted: deque[tuple[str, Any]] = deque()
        """What other threads of this rank have raised. The loop looks here as well."""
        self._launched: tuple[torch.Tensor, Any, dict[str, Any]] | None = None

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
        vector = torch.tensor(
            (weight, batches, batches * batches, batches > 0, bool(raised), step, step * step), dtype=torch.float64
        )
        self._launched = (vector, self.world.control_reduce(vector), raised)

    def read(self) -> Agreement:
        """Wait for the reduction that ``launch`` started. Collective.

        Raises:
            DesyncError: the ranks are not at the same optimizer step.
        """
        assert self._launched is not None
        vector, work, raised = self._launched
        self._launched = None
        work.wait()
        weight, batches, squares, with_data, raised_anywhere, steps, step_squares = vector.tolist()
        size = self.world.size
        if size * step_squares != steps * steps:
            raise DesyncError(
                f"the {size} ranks are not at the same optimizer step (this one is rank {self.world.rank}); "
                "every rank must run the same loop. Look for a condition on the rank around a step or a fit."
            )
        if raised_anywhere or self.fired:
            self._fire(raised if raised_anywhere else None)
        equal = size * squares == batches * batches
        return Agreement(weight, int(with_data), int(batches) // size if equal else None)

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
