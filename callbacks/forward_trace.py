"""Sizes and FLOPs of the modules of a model, measured in one forward pass."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from ..framework.parallel.compilation import uncompiled

_UNKNOWN = "?"


@dataclass
class Forward:
    """The forward passes of one module: sizes of the first call, and the FLOPs of all calls."""

    in_size: str = _UNKNOWN
    out_size: str = _UNKNOWN
    flops: int = 0
    started_at: list[int] = field(default_factory=list)
    """The FLOPs counted before each call in progress."""


def trace_forward(module: nn.Module, inputs: Any) -> dict[str, Forward]:
    """Run one forward pass in evaluation mode without gradients; return the measurements by module name.

    ``""`` is the name of the module itself. A tuple or list holds the arguments of ``forward``, a dict its keyword
    arguments. Buffers and random generators may change; modes do not.
    """
    found = {name: Forward() for name, _ in module.named_modules()}
    with (
        uncompiled(module),
        FlopCounterMode(display=False) as counter,
        _evaluating(module),
        _recording(module, found, counter),
    ):
        if isinstance(inputs, tuple | list):
            module(*inputs)
        elif isinstance(inputs, Mapping):
            module(**inputs)
        else:
            module(inputs)
    return found


@contextmanager
def _evaluating(module: nn.Module) -> Generator[None, None, None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def _recording(
    module: nn.Module, found: Mapping[str, Forward], counter: FlopCounterMode
) -> Generator[None, None, None]:
    """Fill the measurements by hooks, which are removed at the end."""
    handles: list[RemovableHandle] = []
    for name, part in module.named_modules():
        # A compiled TorchScript module takes no hooks with keyword arguments.
        if not isinstance(part, torch.jit.ScriptModule):
            before, after = partial(_begin, found[name], counter), partial(_end, found[name], counter)
            handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(part.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _begin(record: Forward, counter: FlopCounterMode, part: nn.Module, args: Any, kwargs: Any) -> None:
    record.started_at.append(counter.get_total_flops())


def _end(record: Forward, counter: FlopCounterMode, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    record.flops += counter.get_total_flops() - record.started_at.pop()
    if record.in_size == _UNKNOWN:
        inputs = (*args, *kwargs.values())
        record.in_size = _size(inputs[0] if len(inputs) == 1 else inputs)
        record.out_size = _size(output)


def _size(value: Any) -> str:
    """Return the shape of a tensor as ``[4, 16]``, those of several as ``[[4, 16], [4]]``."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return _size(list(value.values()))
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_size, value))}]"
    return _UNKNOWN
