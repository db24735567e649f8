"""Updates that leave out parameters without a gradient, as torch's optimizers do.

DeepSpeed gives its optimizer one flat tensor for a group of parameters, with one step counter. Once a parameter has no
gradient in a window, the optimizer steps on the pieces of the others, each with its range of the flat state and a step
counter of its own. Updates in which all parameters have gradients from the start need none of this.
"""

from __future__ import annotations

import copy
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn

from .pieces import FlatGroups, Piece

_NEVER = object()


class PieceSteps:
    """Replaces the flat tensors in the groups of DeepSpeed's optimizer by pieces during its steps.

    Args:
        groups: the flat tensors and their pieces.
    """

    def __init__(self, groups: FlatGroups) -> None:
        self._groups, self._inner = groups, groups.inner
        self._numbers = {id(flat): number for number, flat in enumerate(groups.flats)}
        self._steps: dict[int, Any] = {}
        self._unused: Set[int] = frozenset()
        self._stepping: list[tuple[Any, Piece, nn.Parameter]] = []
        self._replaced: list[tuple[dict[str, Any], list[Any]]] = []
        self._inner.register_step_pre_hook(self._begin)
        self._inner.register_step_post_hook(self._end)

    def leave_out(self, unused: Set[int]) -> None:
        """Leave parameters, by ``id``, out of the next update, unless another rank has a gradient for them."""
        self._unused = unused

    def step_of(self, parameter: Tensor, shared: Any) -> Any:
        """Return the step counter of a parameter.

        Returns:
            0 if the optimizer does not count, None if the parameter has no state, since no update has changed it, and
            ``shared``, the counter of its group, if it has none of its own.
        """
        step = self._steps.get(id(parameter), shared)
        return None if step is _NEVER else 0 if step is None else step

    def load(self, parameter: Tensor, step: Any, has_state: bool) -> None:
        """Set the step counter of a parameter; None for an optimizer that does not count."""
        self._steps[id(parameter)] = step if has_state else _NEVER

    def _begin(self, optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            self._replaced.append((group, group["params"]))
            group["params"] = [one for flat in group["params"] for one in self._pieces(flat)]

    def _pieces(self, flat: Any) -> list[Any]:
        number = self._numbers.get(id(flat))
        if number is None:
            return [flat]
        found = []
        state = self._inner.state.get(flat, {})
        for piece in self._groups.groups[number]:
            key = id(piece.parameter)
            if key not in self._steps:
                self._steps[key] = copy.deepcopy(state.get("step")) if state else _NEVER
            gradient = flat.grad.narrow(0, piece.offset, piece.length)
            # Only one that no rank has used has a gradient of zero alone.
            if key in self._unused and not gradient.any():
                continue
            view = nn.Parameter(flat.detach().narrow(0, piece.offset, piece.length))
            view.grad = gradient
            if self._steps[key] is not _NEVER:
                self._inner.state[view] = {
                    slot: self._steps[key] if slot == "step" else _part(value, flat, piece)
                    for slot, value in state.items()
                }
            self._stepping.append((flat, piece, view))
            if piece.length:
                found.append(view)
        return found

    def _end(self, optimizer: Any, *_: Any) -> None:
        while self._replaced:
            group, params = self._replaced.pop()
            group["params"] = params
        for flat, piece, view in self._stepping:
            own, state = self._inner.state.pop(view, {}), self._inner.state[flat]
            for slot, value in own.items():
                if isinstance(value, Tensor) and slot != "step" and value.numel() == view.numel():
                    if slot not in state:
                        state[slot] = torch.zeros_like(flat.data, dtype=value.dtype)
                    part = state[slot].narrow(0, piece.offset, piece.length)
                    if part.data_ptr() != value.data_ptr():
                        part.copy_(value)
                else:
                    state[slot] = value
            if piece.length:
                self._steps[id(piece.parameter)] = own.get("step")
        self._stepping.clear()


def _part(value: Any, flat: Tensor, piece: Piece) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.numel() == flat.numel():
        return value.narrow(0, piece.offset, piece.length)
    return value
