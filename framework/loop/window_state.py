"""State that a window of micro-batches and its update change, so that either can be undone and repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import LoopError
from ..core.optimizer_config import parameters_of
from ..core.torch_internals import version_of
from ..diagnostics.out_of_memory import is_out_of_memory
from ..distributed.devices import empty_caches
from .step_base import TrainingStep


class WindowState:
    """The state of a step before a window: logged values, metrics, buffers, and what is known of losses.

    The random generators belong to the data, whose first batch is read before; see ``RepeatableWindows``.
    """

    def __init__(self, step: TrainingStep) -> None:
        run = step.run
        self._step = step
        self._log = run.train_log.record()
        self._buffers = _Buffers(run.module)
        self._spikes, self._latest_loss = step.loss_checks.spikes.copied(), run.latest_loss

    def restore(self) -> None:
        """Undo what the window has changed. Once; attributes of the user's objects keep their values."""
        step = self._step
        run = step.run
        run.train_log.go_back(self._log)
        self._buffers.restore()
        run.latest_loss = self._latest_loss
        run.triggers.keep()
        run.meter.drop_step()
        step.loss_checks.go_back(self._spikes)


class _Buffers:
    """Copies of the buffers of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._held: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = [
            (part._buffers, key, buffer, buffer.detach().clone())
            for part in module.modules()
            for key, buffer in part._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the same tensors their values of before."""
        for table, key, buffer, value in self._held:
            buffer.copy_(value)
            table[key] = buffer


T = TypeVar("T")


class OptimizerRecord:
    """The tensors that an optimizer updates and their versions, which every change in place increases."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._options = [dict(group) for group in optimizer.param_groups]
        self._state = {owner: dict(slots) for owner, slots in optimizer.state.items()}
        changed = [*parameters_of(optimizer)]
        changed += [each.grad for each in changed if each.grad is not None]
        changed += [slot for slots in self._state.values() for slot in slots.values() if isinstance(slot, Tensor)]
        self.tensors = changed
        self._versions = [version_of(tensor) for tensor in changed]

    def is_unchanged(self) -> bool:
        """Whether no weight, gradient or state has changed in place."""
        return self._versions == [version_of(tensor) for tensor in self.tensors]

    def restore_state(self) -> None:
        """Remove state that was created since, and put back tensors and numbers that were replaced."""
        state = self._optimizer.state
        for owner in [*state]:
            if owner not in self._state:
                del state[owner]
        for owner, slots in self._state.items():
            state[owner].clear()
            state[owner].update(slots)
        # Some optimizers count their steps there.
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.clear()
            group.update(options)


class OptimizerCopy:
    """Copies of what an optimizer updates, and of its gradients, so that an update can be undone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._record = OptimizerRecord(optimizer)
        self._copies = [(tensor, tensor.detach().clone()) for tensor in self._record.tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo an update. Any number of times."""
        self._record.restore_state()
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def update_or_repeat(optimizer: Optimizer, step: Callable[[], T], note: Callable[[], Any]) -> T:
    """Apply an update; if it runs out of memory before it has changed anything, free memory and apply it again.

    Other ranks may have applied theirs, so a rank cannot leave it out.

    Args:
        optimizer: holds the parameters.
        step: applies the update; without collectives, which other ranks would not call a second time.
        note: called when the update is applied a second time.

    Raises:
        LoopError: weights or state had changed already.
    """
    record = OptimizerRecord(optimizer)
    try:
        return step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if not record.is_unchanged():
            raise LoopError(
                "the update ran out of memory after it had changed a part of the weights or of the optimizer's state, "
                "so it cannot be repeated: resume from the newest checkpoint, with a smaller micro_batch_size or an "
                "optimizer that needs less memory, such as foreach=False."
            ) from error
    record.restore_state()
    empty_caches()
    note()
    return step()
