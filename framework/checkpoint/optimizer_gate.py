"""A gate that makes optimizers wait with their step while another thread copies their state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class Hold:
    """Between ``begin`` and ``release`` a call of ``step`` waits; at any other time that costs it a look at a flag."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        # By identity; the optimizer is kept so that no other one gets its number.
        self._held: dict[int, tuple[Optimizer, RemovableHandle]] = {}

    def begin(self, optimizers: Sequence[Optimizer | None]) -> bool:
        """Hold updates from here on, if they can be held; return whether they can.

        They cannot where a strategy does not know what steps (None), and where a class has replaced what torch wraps
        around ``step``.
        """
        known = [one for one in optimizers if one is not None and getattr(type(one).step, "hooked", False)]
        if len(known) != len(optimizers):
            return False
        for one in known:
            if id(one) not in self._held:
                self._held[id(one)] = one, one.register_step_pre_hook(self._wait)
        self._free.clear()
        return True

    def _wait(self, *_: Any) -> None:
        if not self._free.is_set():
            self._free.wait()

    def release(self) -> None:
        """Release waiting updates."""
        self._free.set()

    def close(self) -> None:
        """Remove all hooks from the optimizers."""
        self.release()
        for _, handle in self._held.values():
            handle.remove()
        self._held.clear()
