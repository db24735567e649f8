"""Reading of one-element tensors that are logged, and the memory view that makes repeated reads of one tensor cheap."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_double, c_float
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..core.errors import MetricError

View = tuple[Callable[[], Any], int, "c_float | c_double"]
"""A tensor's weak reference, the address of its only element, and a view of the memory at that address."""

# Python's float is a C double: reading one of these through ctypes is exactly what ``item()`` returns.
_CELLS: dict[torch.dtype, type[c_float] | type[c_double]] = {torch.float32: c_float, torch.float64: c_double}


def _nothing() -> None:
    """Take the place of a weak reference: no tensor is None."""


NO_VIEW: View = (_nothing, 0, c_double())


def view_of(tensor: Tensor) -> View:
    """Return the view of a CPU tensor that ``item()`` has just read; ``NO_VIEW`` where memory alone is not its value.

    The view owns no memory. It may be read only while the weak reference is alive and ``tensor.data_ptr()`` is still
    the address: ``tensor.data = other`` leaves the old memory to its next owner. It has to be memory because a
    tensor's ``_version`` does not count every change: ``all_reduce``, ``tensor.data.add_`` and NumPy leave it alone.
    """
    cell = _CELLS.get(tensor.dtype)
    # Lazily negated tensors (an imaginary part of a conjugate) and zero tensors have other values than their memory.
    if cell is None or tensor.__class__ is not Tensor or tensor.is_neg() or tensor.layout is not torch.strided:
        return NO_VIEW
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        # A wrapper of torch.func has no memory of its own.
        return NO_VIEW
    return (ref(tensor), address, cell.from_address(address)) if address else NO_VIEW


def not_one_element(name: str, value: Tensor) -> MetricError:
    """Return the error for a tensor of several elements, or none."""
    return MetricError(
        f"log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; a value must have one element: "
        "reduce it first, with .mean() for example."
    )
