"""``WindowState``: state that a window of micro-batches changes before its update, so that it can be repeated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
