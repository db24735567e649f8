"""FLOPs of compiled parts of a module, which are not visible to a dispatch mode.

Their code runs unchanged. Before each call, ``forward`` is also run uncompiled on fake tensors. They have shapes but no
data, and take no memory. Random generators, and the attributes of the module with the items of its lists, dicts and
sets, are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.position_rng import RandomStream
from ..core.torch_internals import FakeTensorMode, tree_map, without_modes
from ..diagnostics.program_state import ProgramState
from ..parallel.blocks import replace_method
from ..parallel.compilation import CompiledForward, uncompiled
from ..profiling.flop_count import FlopCount


def counted_step(step: Callable[..., Any], count: FlopCount, module: nn.Module) -> Callable[..., Any]:
    """Return ``step``, the FLOPs of which are added to ``count`` in every call, with those of compiled parts."""
    parts = [part for part in module.modules() if isinstance(vars(part).get("forward"), CompiledForward)]

    def counted(*args: Any) -> Any:
        with _Counted(module, parts, count), count:
            return step(*args)

    return counted


class _Counted:
    """Counts the calls of compiled parts while it is entered."""

    def __init__(self, module: nn.Module, parts: list[nn.Module], count: FlopCount) -> None:
        self._module, self._parts, self._count = module, parts, count
        self._undos: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._undos = [replace_method(part, "forward", partial(self._forward, part)) for part in self._parts]

    def __exit__(self, *_: object) -> None:
        while self._undos:
            self._undos.pop()()

    def _forward(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Count a call of a part, then make it as in any other step, so that torch does not compile it again."""
        self.__exit__()
        try:
            with without_modes():
                taken = ProgramState([*self._module.modules()]).take()
                try:
                    with RandomStream(0).entered():
                        _count_without_data(part, self._count, args, kwargs)
                except Exception:  # values that fake tensors lack; training continues
                    self._count.fail()
                finally:
                    ProgramState.put_back(taken)
                return part.forward(*args, **kwargs)
        finally:
            self.__enter__()


class _Plain(nn.Module):
    """Calls the uncompiled ``forward`` of a part, without the hooks of the part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part.forward(*args, **kwargs)


def _count_without_data(part: nn.Module, count: FlopCount, args: Any, kwargs: Any) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def faked(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return fake.from_tensor(leaf.detach()).requires_grad_(leaf.requires_grad)

    plain = _Plain(part)
    state = {name: faked(tensor) for name, tensor in (*plain.named_parameters(), *plain.named_buffers())}
    with ExitStack() as stack:
        for context in (uncompiled(part), fake, count):
            stack.enter_context(context)
        torch.func.functional_call(plain, state, tree_map(faked, args), tree_map(faked, kwargs))
