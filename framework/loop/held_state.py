"""``HeldState``: the attributes of a module and its submodules, which can be restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import nn

_LISTS = (list, deque)
_CONTAINERS = (*_LISTS, dict, set)


class HeldState:
    """Remembers which objects the attributes refer to, and the items of lists, deques, dicts and sets among them.

    Tensors that are changed in place are not restored, and neither are objects of other classes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        self._containers: dict[int, tuple[Any, Any]] = {}
        for _, before in self._attributes:
            self._hold(before.values())

    def restore(self) -> None:
        """Let all attributes refer to the objects that they referred to, with the same items."""
        for now, before in (*self._attributes, *self._containers.values()):
            if _is_same(now, before):
                continue
            now.clear()
            if isinstance(now, _LISTS):
                now.extend(before)
            else:
                now.update(before)

    def _hold(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, _CONTAINERS) and id(value) not in self._containers:
                self._containers[id(value)] = value, value.copy()
                self._hold(value.values() if isinstance(value, dict) else value)


def _is_same(now: Any, before: Any) -> bool:
    """Whether two containers of one class have the same objects in the same order."""
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return _is_same(list(now), list(before)) and _is_same(list(now.values()), list(before.values()))
    return all(one is other for one, other in zip(now, before, strict=True))
