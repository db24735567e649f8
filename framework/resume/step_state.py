"""``StepState``: the part of the state after an optimizer step that later code of the fit may change."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..data.accumulation_window import Windows
from ..run.run import Run
from ..state.module_state import buffer_locations
from ..state.optimizer_state import groups_of
from .capture import RunState, StateHolders, counters, place_of

_Buffers = dict[tuple[int, str], Tensor]
"""Tensors by the ``id`` of a module's table of buffers and the key in the table."""


_LEAVES = frozenset({bool, int, float, str, type(None), Tensor})


class StepState:
    """The state of a fit after an optimizer step, read in little time.

    It holds buffers, counters, the position in the data, hyperparameters of optimizers, and the states of schedulers,
    callbacks and other objects. Names, weights and the tensors of optimizers are read by ``restored``: they are the
    same until the next update begins.
    """

    def __init__(self, run: Run, windows: Windows) -> None:
        """Read the state. No collective."""
        self._run = run
        self._progress, self._averages = copy(run.progress), run.averages.state_dict()
        self._place, self._marks = place_of(windows), run.loggers.mark()
        self._groups = [groups_of(optimizer) for optimizer in run.optimizers]
        self._states = _copied(StateHolders(run).states())
        self._buffers = _copied_buffers(run.module)

    def restored(self) -> RunState:
        """Return the full state of the step. Where every rank holds it, no collective.

        Raises:
            ConfigurationError: a hyperparameter of an optimizer cannot be saved.
        """
        run = self._run
        state = RunState(run)
        state.add_training(run, self._place, run.seed, self._marks, self._groups)
        buffers = {
            name: self._buffers[id(table), key]
            for name, (table, key) in buffer_locations(run.module).items()
            if (id(table), key) in self._buffers
        }
        state.go_back(counters(self._progress, self._averages), self._states, buffers)
        return state


def _copied(value: Any) -> Any:
    """Return a copy of nested containers with the same leaves."""
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    # tree_map knows all other containers, but is slow.
    return value if kind in _LEAVES else tree_map(lambda leaf: leaf, value)


def _copied_buffers(module: nn.Module) -> _Buffers:
    found = {
        (id(part._buffers), key): buffer
        for part in module.modules()
        for key, buffer in part._buffers.items()
        if buffer is not None and key not in part._non_persistent_buffers_set
    }
    if not found:
        return {}
    with torch.no_grad():
        copies = [torch.empty_like(buffer) for buffer in found.values()]
        # One kernel for many small tensors on a device.
        torch._foreach_copy_(copies, list(found.values()))
    return dict(zip(found, copies, strict=True))
