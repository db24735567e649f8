"""Averages of gradients over ranks after each backward pass of manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..core.optimizer_config import parameters_of
from ..run.run import Run


class BackwardAverage:
    """Averages all gradients at the end of a backward pass, for a strategy whose own passes do not communicate.

    ``parameter.grad`` is then that of the global batch wherever the user's code reads, clips or changes it. A pass that
    is run by ``loss.backward()`` or ``torch.autograd.backward`` is averaged as one of ``manual_backward``. Averaging a
    second time does not change the part of a gradient that was averaged before.

    Args:
        run: the fit.
        averaged: called when the gradients have been averaged.
    """

    def __init__(self, run: Run, averaged: Callable[[], None]) -> None:
        self._run = run
        self._averaged = averaged
        self._handles: dict[Tensor, Any] = {}
        self._parameters: list[Tensor] = []
        self._is_queued = False
        self.passes = 0
        """The number of backward passes that were averaged."""
        run.at_end.callback(self._remove)

    def refresh(self) -> None:
        """Watch the parameters that are trained now."""
        found: dict[Tensor, None] = dict.fromkeys(self._run.module.parameters())
        found |= dict.fromkeys(each for optimizer in self._run.optimizers for each in parameters_of(optimizer))
        self._parameters = list(found)
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._meet)

    def begin(self) -> None:
        """Begin a batch: a backward pass that failed has left its average out."""
        self._is_queued = False

    def _meet(self, parameter: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            # torch calls it when the pass has computed all gradients, as it does for DistributedDataParallel.
            Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._is_queued = False
        self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients of all parameters that require one now. Collective."""
        self._run.strategy.reduce_gradients([each for each in self._parameters if each.requires_grad])
        self.passes += 1
        self._averaged()

    def _remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
