"""What a step's own calls of modules return, for a step that ran its model and then gave no loss.

Where forward passes hold collectives, those of such a step are done, and its backward pass must follow. It starts from
what the modules returned that the step called itself, at a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import LoopError

Calls = list[tuple[nn.Module, Any]]
"""Modules that a step called itself, in order, and what they returned."""


class CallWatch:
    """Sees the calls of modules that hold parameters, while it is open.

    Through the first steps it watches them all, to learn which of them a step calls itself; later those alone, and the
    module's direct parts, so that an ordinary step pays for a few hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._handles: list[Any] = []
        self._usual: list[int] | None = None
        self._known: set[nn.Module] = set()
        self._calls: Calls = []
        self._open = False
        self._depth = 0

    def open(self) -> None:
        """Begin to watch a step."""
        if not self._handles:
            self._install()
        self._calls = []
        self._depth = 0
        self._open = True

    def close(self) -> Calls:
        """Stop watching; return the calls of the step."""
        self._open = False
        calls, self._calls = self._calls, []
        return calls

    def learn(self, calls: Calls) -> None:
        """Take these calls for those of an ordinary step: one that had a loss."""
        before, self._usual = self._usual, [id(part) for part, _ in calls]
        if self._usual != before:
            self._known.update(part for part, _ in calls)
            if before is None:
                self.remove()

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def idle_loss(self, calls: Calls) -> Tensor:
        """Return a loss that the outputs of all these calls feed.

        Raises:
            LoopError: they are not all the calls that ranks with a loss make, so far as that can be known.
        """
        made = [id(part) for part, _ in calls]
        usual = self._usual
        outputs = [tensor for _, output in calls for tensor in tensors_in(output) if tensor.requires_grad]
        partial = usual is not None and len(made) < len(usual) and made == usual[: len(made)]
        if partial or not outputs:
            raise _partial()
        sums = [tensor.real.sum() if tensor.is_complex() else tensor.sum() for tensor in outputs]
        loss = torch.stack([each.float().to(sums[0].device) for each in sums]).sum()
        if usual is None:
            # No step here has had a loss yet, to compare with.
            leaves = sum(_is_leaf(node) for node in nodes_of(loss))
            if leaves < sum(parameter.requires_grad for parameter in self._module.parameters()):
                raise _partial()
        return loss

    def _install(self) -> None:
        # Plain functions: a copy of the module, which copies its hooks, must not copy what they belong to.
        def before(part: nn.Module, inputs: Any) -> None:
            if self._open:
                self._depth += 1

        def after(part: nn.Module, inputs: Any, output: Any) -> None:
            if self._open:
                self._depth -= 1
                if self._depth == 0:
                    self._calls.append((part, output))

        learned = self._usual is not None
        parts = {*_direct_parts(self._module), *self._known} if learned else set(self._module.modules())
        for part in parts:
            if any(True for _ in part.parameters()):
                self._handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]


def _direct_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its children; of a child that cannot be called, such as a list, its own."""
    yield module
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _direct_parts(child)
        else:
            yield child


def _partial() -> LoopError:
    return LoopError(
        "training_step returned None after it had run only a part of the model, which ranks run in step here: return "
        "None before the model is called or after it has run as a whole, or give the batch a batch_weight of 0."
    )


def tensors_in(data: Any) -> Iterator[Tensor]:
    """Yield the tensors in a collection of any form."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_in(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from tensors_in(value)
    elif is_dataclass(data) and not isinstance(data, type):
        for each in fields(data):
            yield from tensors_in(getattr(data, each.name))


@contextmanager
def zero_gradients(loss: Tensor) -> Generator[Tensor, None, None]:
    """Give a loss of zero with the backward pass of ``loss``, of which every gradient is exactly zero inside.

    Zero times an infinite activation would be NaN, which a reduction would carry to all ranks: so what enters each node
    of the graph is set to zero. Recomputation by a backward pass within the backward pass is out of its reach.
    """
    zero = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
    handles = [node.register_prehook(_zeros) for node in nodes_of(zero)]
    try:
        yield zero
    finally:
        # The nodes of parameters outlive the graph.
        for handle in handles:
            handle.remove()


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """Return a loss of zero that every trainable parameter feeds, through one of its elements."""
    parts = [parameter.flatten()[:1].sum() for parameter in parameters if parameter.requires_grad]
    return torch.stack([part.float() for part in parts]).nan_to_num().sum() * 0.0


def _zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def nodes_of(loss: Tensor) -> set[Any]:
    """Return the nodes of a loss's graph."""
    found: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")
