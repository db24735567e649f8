"""Updates that leave out parameters without a gradient, as torch's optimizers do.

DeepSpeed gives its optimizer one flat tensor for a group of parameters, with one step counter. Once a parameter has no
gradient in a window, the optimizer steps on the pieces of the others, each with its range of the flat state and its own
scalars, such as a step counter. Updates in which all parameters have gradients from the start need none of this.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from .flat_groups import FlatGroups, Piece, is_flat

Scalars = Mapping[str, Any]
"""The slots of a parameter that are no ranges of flat tensors, such as its step counter."""


class PartialSteps:
    """Replaces the flat tensors in the groups of DeepSpeed's optimizer by pieces during its steps.

    Args:
        groups: the flat tensors and their pieces.
    """

    def __init__(self, groups: FlatGroups) -> None:
        self._groups, self._inner = groups, groups.inner
        self._group_of = {id(flat): number for number, flat in enumerate(groups.flats)}
        # None for a parameter without state, since no update has changed it.
        self._own: dict[int, Scalars | None] = {}
        self._unused: Set[int] = frozenset()
        self._unused_by_all: Set[int] | None = None
        self._stepping: list[tuple[Any, Piece, nn.Parameter]] = []
        self._replaced: list[tuple[dict[str, Any], list[Any]]] = []
        self._inner.register_step_pre_hook(self._begin)
        self._inner.register_step_post_hook(self._end)

    def leave_out(self, unused: Set[int], by_all: Set[int] | None) -> None:
        """Leave parameters out of the next update; see ``EngineState.leave_out``."""
        self._unused, self._unused_by_all = unused, by_all

    def scalars_of(self, parameter: Tensor, shared: Scalars | None) -> Scalars | None:
        """Return the scalars of a parameter; ``shared``, those of its group, if it has none of its own."""
        return self._own.get(id(parameter), shared)

    def load(self, parameter: Tensor, scalars: Scalars | None) -> None:
        """Set the scalars of a parameter; None if it has no state."""
        self._own[id(parameter)] = scalars

    def settle(self, number: int) -> None:
        """Give the parameters of a group scalars of their own, before those of the group change."""
        flat = self._groups.flats[number]
        for piece in self._groups.groups[number]:
            if id(piece.parameter) not in self._own:
                self._own[id(piece.parameter)] = copy.deepcopy(shared_scalars(self._inner.state.get(flat)))

    def _begin(self, optimizer: Any, *_: Any) -> None:
        if optimizer is not self._inner:
            return
        for group in optimizer.param_groups:
            self._replaced.append((group, group["params"]))
            group["params"] = [one for flat in group["params"] for one in self._pieces(flat)]

    def _pieces(self, flat: Any) -> list[Any]:
        number = self._group_of.get(id(flat))
        if number is None:
            return [flat]
        found = []
        self.settle(number)
        state = self._inner.state.get(flat, {})
        for piece in self._groups.groups[number]:
            key = id(piece.parameter)
            gradient = flat.grad.narrow(0, piece.offset, piece.length)
            if self._is_left_out(key, gradient):
                continue
            view = nn.Parameter(flat.detach().narrow(0, piece.offset, piece.length))
            view.grad = gradient
            own = self._own[key]
            if own is not None:
                parts = {slot: value for slot, value in state.items() if is_flat(value)}
                parts = {slot: value.narrow(0, piece.offset, piece.length) for slot, value in parts.items()}
                self._inner.state[view] = {**parts, **own}
            self._stepping.append((flat, piece, view))
            if piece.length:
                found.append(view)
        return found

    def _is_left_out(self, key: int, gradient: Tensor) -> bool:
        if self._unused_by_all is not None:
            return key in self._unused_by_all
        # A gradient that another rank has computed is hardly ever zero in all of this rank's piece.
        return key in self._unused and not gradient.any()

    def _end(self, optimizer: Any, *_: Any) -> None:
        if optimizer is not self._inner:
            return
        while self._replaced:
            group, params = self._replaced.pop()
            group["params"] = params
        for flat, piece, view in self._stepping:
            own, state = self._inner.state.pop(view, {}), self._inner.state[flat]
            scalars = {}
            for slot, value in own.items():
                if isinstance(value, Tensor) and slot != "step" and value.shape == view.shape:
                    if slot not in state:
                        state[slot] = torch.zeros_like(flat.data, dtype=value.dtype)
                    part = state[slot].narrow(0, piece.offset, piece.length)
                    if part.data_ptr() != value.data_ptr():
                        part.copy_(value)
                else:
                    state[slot] = scalars[slot] = value
            if piece.length:
                self._own[id(piece.parameter)] = scalars
        self._stepping.clear()


def shared_scalars(state: Mapping[str, Any] | None) -> Scalars | None:
    """Return the scalars in the state of a flat tensor; None if it has no state."""
    return {slot: value for slot, value in state.items() if not is_flat(value)} if state else None
