"""The state of a run while it evaluates: the module in evaluation mode, without gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from ..distributed.user_collectives import varying
from ..run.run import Run


class Evaluated(Protocol):
    """An evaluation's plan."""

    @property
    def prefix(self) -> str: ...
    @property
    def inference_mode(self) -> bool: ...


@contextmanager
def evaluating(run: Run, plan: Evaluated) -> Generator[None, None, None]:
    """Prepare the module for evaluation: the buffers of one rank, and averaged weights if there are any."""
    run.strategy.sync_buffers(run.module)
    with varying(run.world), run.averages.evaluated(), in_evaluation_mode(run, plan.prefix, plan.inference_mode):
        yield


@contextmanager
def in_evaluation_mode(run: Run, prefix: str, inference_mode: bool) -> Generator[None, None, None]:
    """Put the module in evaluation mode without gradients; on exit restore the mode of each submodule."""
    modes = {part: part.training for part in run.module.modules()}
    own_eval = run.module_hook(f"on_{prefix}_model_eval")
    for hook in own_eval:
        hook()
    if not own_eval:
        run.module.eval()
    # A forward pass that gathers parameters leaves inference mode, and could not update the state of a metric that was
    # reset in it. Layers of a precision may not support it either: torchao's raise NotImplementedError.
    supported = not run.traits.forward_has_collectives and not run.precision.replaces_layers
    inference = inference_mode and supported
    context = torch.inference_mode() if inference else torch.no_grad()
    ordinary = [each for each in run.module.parameters() if not each.is_inference()] if inference else []
    run.evaluating = True
    try:
        with context:
            yield
    finally:
        if inference:
            _to_training(ordinary, run.module)
        run.evaluating = False
        own_train = run.module_hook(f"on_{prefix}_model_train")
        for hook in own_train:
            hook()
        if not own_train:
            for part, mode in modes.items():
                part.training = mode


def _to_training(parameters: Sequence[nn.Parameter], module: nn.Module) -> None:
    """Make ordinary tensors, which training can use, of data of parameters and buffers set in inference mode."""
    for parameter in parameters:
        if parameter.is_inference():
            parameter.data = parameter.detach().clone()
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_inference() and not buffer.is_meta:
                part._buffers[name] = buffer.clone()
