"""Values that tensors get from elsewhere, such as a file, and that are read only where something needs them.

In the context ``SuppliedValues``, ``supply`` lets a tensor have the values that a function returns. The function is
called by the first operation that needs them, a copy or a norm for example. If none does, it is not called at all, and
the caller that has supplied them can write them into the tensor later, in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from ..core.torch_internals import storage_key, tree_leaves, version_of

# These read no values: shapes, attributes, and views, which share the memory by which tensors are known here.
_WITHOUT_VALUES = {"__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex"}
_WITHOUT_VALUES |= {"requires_grad_", "detach", "view", "t", "untyped_storage", "__len__", "__hash__"}
# torch passes a call to the active modes if it has a tensor.
_PROBE = torch.empty(0)


def is_dispatched(tensor: Tensor) -> bool:
    """Whether torch passes a call with a tensor to the active modes, or to the tensor's class."""
    return bool(has_torch_function_unary(tensor))


def is_supplying() -> bool:
    """Whether the context ``SuppliedValues`` is active."""
    return is_dispatched(_PROBE) and bool(handle_torch_function(is_supplying, (_PROBE,)))


def supply(tensor: Tensor, read: Callable[[], Tensor]) -> None:
    """Let a tensor have the values that ``read`` returns, in the context ``SuppliedValues``.

    A tensor on the meta device gets none, except under a strategy that builds parameters without data.
    """
    if is_dispatched(tensor):
        handle_torch_function(supply, (tensor,), tensor, read)


def has_supplied_values(tensor: Tensor) -> bool:
    """Whether the values of a tensor are those of ``supply``, which were not changed since."""
    return is_dispatched(tensor) and bool(handle_torch_function(has_supplied_values, (tensor,), tensor))


def read_into(tensor: Tensor, read: Callable[[], Tensor]) -> None:
    """Write the values that ``read`` returns into a tensor."""
    tensor.copy_(read())


@dataclass
class _Supplied:
    """The values of a tensor. ``read`` is None once they are in it."""

    tensor: Tensor
    read: Callable[[], Tensor] | None
    is_changed: bool = False


class SuppliedValues(TorchFunctionMode):
    """The context in which ``supply`` has an effect. Tensors are known by their storage, which views share."""

    def __init__(self) -> None:
        super().__init__()
        self._by_storage: dict[int, _Supplied] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is is_supplying:
            return True
        if func is supply:
            return self._supply(*args)
        if func is has_supplied_values:
            found = self._find(args[0])
            return found is not None and found.tensor is args[0] and not found.is_changed
        if not self._by_storage or getattr(func, "__name__", "") in _WITHOUT_VALUES:
            return func(*args, **kwargs)
        used = [(leaf, found) for leaf in tree_leaves((args, kwargs)) if (found := self._find(leaf)) is not None]
        for _, found in used:
            self._read(found)
        versions = [version_of(leaf) for leaf, _ in used]
        result = func(*args, **kwargs)
        for (leaf, found), version in zip(used, versions, strict=True):
            found.is_changed |= version_of(leaf) != version
        return result

    def _supply(self, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        # Without data there is nothing to read into, and nothing that could be changed.
        self._by_storage[storage_key(tensor)] = _Supplied(tensor, None if tensor.is_meta else read)

    def _find(self, value: Any) -> _Supplied | None:
        if type(value) not in (Tensor, nn.Parameter):
            return None
        try:
            return self._by_storage.get(storage_key(value))
        except NotImplementedError:
            # Sparse tensors have no storage.
            return None

    @staticmethod
    def _read(found: _Supplied) -> None:
        if found.read is not None:
            read, found.read = found.read, None
            with torch.no_grad():
                read_into(found.tensor, read)
