"""Zero backward passes for steps that ran the model but returned no loss.

If forward passes contain collectives, such a step has already run them, so the backward pass must follow. It starts
from the outputs of the modules that the step called directly, with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import LoopError
from .blocks import callable_children

Calls = list[tuple[nn.Module, Any]]
"""The modules that a step called directly, in order, and their outputs."""


class CallWatch:
    """Records calls of modules with parameters while it is open.

    During the first steps it hooks all of them, to learn which ones a step calls directly. Later it hooks only those
    and the module's children, so that the overhead of a step is a few hooks.
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
        """Start recording a step."""
        if not self._handles:
            self._install()
        self._calls = []
        self._depth = 0
        self._open = True

    def close(self) -> Calls:
        """Stop recording; return the calls of the step."""
        self._open = False
        calls, self._calls = self._calls, []
        return calls

    def learn(self, calls: Calls) -> None:
        """Record these calls as those of an ordinary step: one that returned a loss."""
        before, self._usual = self._usual, [id(part) for part, _ in calls]
        if self._usual != before:
            self._known.update(part for part, _ in calls)
            if before is None:
                self.remove()

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def idle_loss(self, calls: Calls) -> Tensor:
        """Return a loss that depends on the outputs of all these calls.

        Raises:
            LoopError: as far as is known, ranks with a loss make other calls too.
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
            # No step of this rank has had a loss yet to compare with.
            leaves = sum(_is_leaf(node) for node in nodes_of(loss))
            if leaves < sum(parameter.requires_grad for parameter in self._module.parameters()):
                raise _partial()
        return loss

    def _install(self) -> None:
        # Plain functions: copying the module copies its hooks, which must not copy this object.
        def before(part: nn.Module, inputs: Any) -> None:
            # Inside a compiled part they have no effect: its own hooks, which run outside, record the call.
            if not torch.compiler.is_compiling() and self._open:
                self._depth += 1

        def after(part: nn.Module, inputs: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and self._open:
                self._depth -= 1
                if self._depth == 0:
                    self._calls.append((part, output))

        learned = self._usual is not None
        parts = (
            {self._module, *callable_children(self._module), *self._known} if learned else set(self._module.modules())
        )
        for part in parts:
            if any(True for _ in part.parameters()):
                self._handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]


def _partial() -> LoopError:
    return LoopError(
        "training_step returned None after it had run only a part of the model, whose forward pass contains "
        "collectives here: return None before the model is called or after it has run completely, or give the "
        "batch a batch_weight of 0."
    )


_PLAIN = (str, bytes, int, float, type(None), type, nn.Module)


def attributes_of(data: Any) -> dict[str, Any]:
    """Return the attributes of an object; empty for one that cannot have any."""
    try:
        attributes: dict[str, Any] = vars(data)
    except TypeError:
        return {}
    return attributes


def tensors_in(data: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nested collection, and in the attributes of objects in it."""
    return _tensors_in(data, set())


def _tensors_in(data: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
        return
    if isinstance(data, _PLAIN) or id(data) in seen:
        return
    parts: Iterable[Any] = ()
    if isinstance(data, Mapping):
        parts = data.values()
    elif isinstance(data, (list, tuple, set, frozenset)):
        parts = data
    elif is_dataclass(data):
        parts = (getattr(data, each.name, None) for each in fields(data))
    elif not callable(data):
        parts = attributes_of(data).values()
    # An object may contain itself.
    seen.add(id(data))
    for part in parts:
        yield from _tensors_in(part, seen)


CARRIES_OTHERS = "carries_gradients_of_other_ranks"
"""The name of an attribute of nodes in the graph of a loss: their backward passes return gradients of other ranks, too.

An ``autograd.Function`` sets the attribute on its ``ctx``.
"""


_zero_backward = False


def runs_zero_backward() -> bool:
    """Whether a backward pass that is run now computes gradients of zero alone, see ``zero_gradients``."""
    return _zero_backward


@contextmanager
def zero_gradients(loss: Tensor) -> Generator[Tensor, None, None]:
    """Yield a zero loss with the backward pass of ``loss``; all gradients inside it are exactly zero.

    Zero times an infinite activation would be NaN, which a reduction would carry to all ranks: so the gradient that
    enters each node of the graph is set to zero. This does not cover a backward pass that is nested in the backward
    pass to recompute activations, nor nodes that gradients of other ranks' losses reach, see ``CARRIES_OTHERS``.
    """
    global _zero_backward
    zero = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
    nodes = nodes_of(zero)
    carriers = [node for node in nodes if hasattr(node, CARRIES_OTHERS)]
    if carriers:
        nodes -= set().union(*(_nodes_from(node) for node in carriers))
    handles = [node.register_prehook(_zeros) for node in nodes]
    before, _zero_backward = _zero_backward, not carriers
    try:
        yield zero
    finally:
        _zero_backward = before
        # The nodes of parameters outlive the graph, so their hooks would remain.
        for handle in handles:
            handle.remove()


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """Return a zero loss that depends on one element of every trainable parameter."""
    parts = [parameter.flatten()[:1].sum() for parameter in parameters if parameter.requires_grad]
    return torch.stack([part.float() for part in parts]).nan_to_num().sum() * 0.0


def _zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def nodes_of(loss: Tensor) -> set[Any]:
    """Return the nodes of a loss's graph."""
    return _nodes_from(loss.grad_fn)


def _nodes_from(start: Any) -> set[Any]:
    found: set[Any] = set()
    waiting: list[Any] = [start]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")
