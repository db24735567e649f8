"""A gate that blocks the ``step`` of optimizers while another thread copies their state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class Hold:
    """Blocks calls of ``step`` between ``begin`` and ``release``; at other times a call only checks a flag."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        # By ``id``; the optimizer is referenced so that its id is not reused.
        self._held: dict[int, tuple[Optimizer, RemovableHandle]] = {}

    def begin(self, optimizers: Sequence[Optimizer | None]) -> bool:
        """Start to block updates, if possible; return whether it is possible.

        It is not possible if a strategy does not know the optimizer that steps (None), or if a class has replaced
        torch's wrapper around ``step``.
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
        """Unblock waiting updates."""
        self._free.set()

    def close(self) -> None:
        """Remove all hooks from the optimizers."""
        self.release()
        for _, handle in self._held.values():
            handle.remove()
        self._held.clear()
