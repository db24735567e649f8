"""``Absent``: the hidden states of a stage that another rank computes: shape and dtype without values."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...framework.core.errors import LoopError
from ...framework.core.torch_internals import tree_map, without_subclasses
from ...framework.diagnostics.program_state import Change, ProgramState


class Absent(Tensor):
    """A tensor on the meta device. Whatever is computed from it is absent too, so it cannot become part of a loss."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute shapes only. Other operands are moved to the meta device."""

        def moved(leaf: Any) -> Any:
            return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

        name = getattr(func, "__name__", "")
        if name in _READS:
            raise no_value()
        if name == "register_hook":
            # The stage that has the values registers it too, where it is called.
            return RemovableHandle({})

        def shapes() -> Any:
            given, named = tree_map(moved, tuple(args)), tree_map(moved, kwargs or {})
            return tree_map(_absent, func(*given, **named))

        return without_subclasses(shapes)


_READS = {"item", "tolist", "numpy", "retain_grad"}
_READS |= {"__bool__", "__float__", "__int__", "__index__", "__format__", "__array__"}


def absent_like(tensor: Tensor) -> Tensor:
    """Return an absent tensor of the shape and dtype of a tensor."""
    plain = without_subclasses(torch.empty_like, tensor, device="meta", requires_grad=False)
    absent: Tensor = plain.as_subclass(Absent)
    return absent


def no_value() -> LoopError:
    """Return the error for a value that another stage of the pipeline computes."""
    return LoopError(
        "the step reads a value that depends on the output of a block which another stage of the pipeline computes, "
        "other than through the blocks that follow it: let the loss and the logged values depend on the output of the "
        "last block only, or use strategy='ddp' or 'fsdp'."
    )


def _absent(leaf: Any) -> Any:
    return leaf.as_subclass(Absent) if isinstance(leaf, Tensor) and leaf.is_meta else leaf


class BlockMarks:
    """The side effects of a block on its attributes and on containers among its arguments, such as an auxiliary loss.

    A block that this rank holds shows it once. Blocks that it does not hold leave absent values at the same places, so
    that a step which reads them is refused.
    """

    def __init__(self) -> None:
        self._changes: list[Change] = []

    @contextmanager
    def learning(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Generator[None, None, None]:
        """Notice what the block does in this context, and undo it."""
        state = _state_of(block, args, kwargs)
        taken = state.take()
        try:
            yield
        finally:
            self._changes = [each for each in state.changes(taken) if each.kind in ("set", "tail", "all")]
            state.put_back(taken)

    def leave(self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Do what a block of another rank does, with values that are absent."""
        if self._changes:
            _state_of(block, args, kwargs).apply(self._changes, _absent_value)


def _state_of(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ProgramState:
    # Parts of classes of libraries too: the same ones in each block.
    return ProgramState([*block.modules(), args, dict(kwargs)])


def _absent_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return absent_like(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return absent_like(torch.tensor(value)) if is_number else value
