"""Calls of a sharded module's parts outside of a routed step.

The hooks of torch's FSDP gather a submodule's parameters only if the call comes through the outermost module. A hook, a
callback or a method other than ``forward`` calls submodules directly. A hook on all calls of modules, which is
registered only while no routed step is running, gathers the parameters of such a call and frees them afterwards.

The hooks of torch's states are private: ``_pre_forward``, ``_post_forward``, and ``_training_state``, which tells a
recomputation. The public ``register_fsdp_forward_method`` wraps methods of a sharded module, and the calls here are
those of any submodule, whose hooks of the user's need gathered parameters too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook

from ...framework.core.precision import at_least_fp32
from ...framework.core.torch_internals import tree_map_only
from .torch_fsdp import state_of

Context: TypeAlias = "AbstractContextManager[Any] | None"


class OutsideCalls:
    """Gathers parameters for calls of a model's submodules that do not come through its outermost module.

    Args:
        root: the sharded adapter around the user's module.
        context: returns the context of a forward pass, None if it needs none.
        reshard: frees all gathered parameters.
    """

    def __init__(self, root: Any, context: Callable[[], Context], reshard: Callable[[], None]) -> None:
        self._root = root
        self._context = context
        self._reshard = reshard
        self.routing = False
        self._above = dict(_states_above(root, ()))
        self._outermost: nn.Module | None = None
        self._handles: list[Any] = []
        # Not ``__del__``: in a reference cycle, a handle has then lost torch's table of hooks, and the hook stays.
        finalize(self, _remove, self._handles).atexit = False
        self.watch()

    def watch(self) -> None:
        """Gather parameters for calls from now on."""
        if not self._handles:
            # A weak reference: torch's table of hooks must not keep a model alive that was not torn down.
            own = ref(self)

            def hook(module: nn.Module, args: Any) -> Any:
                calls = own()
                return None if calls is None else calls._before(module, args)

            self._handles.append(register_module_forward_pre_hook(torch.compiler.disable(hook)))

    def ignore(self) -> None:
        """Leave calls alone."""
        _remove(self._handles)

    def begin_step(self) -> None:
        """Leave the calls of a routed step alone: it gathers what they need, and a hook costs time in each call."""
        self.routing = True
        self.ignore()

    def end_step(self) -> None:
        """Gather parameters again after a routed step."""
        self.routing = False
        self.watch()

    def _before(self, module: nn.Module, args: Any) -> Any:
        """Gather the parameters of an outermost call, and free them at its end. Collective."""
        states = self._above.get(module)
        if states is None or self._outermost is not None:
            return None
        if any(state._training_state.name == "PRE_BACKWARD" for state in states):
            # A checkpointed part is recomputed, and the backward pass has gathered its parameters.
            return None
        routing = self.routing
        if routing:
            # The step frees its parameters at its end; here some were freed before it.
            self._root.unshard()
            # A part of a module whose forward runs has what that has gathered. To enter it again would add nodes to
            # the graph, by which gradients are summed in another order than in a step that freed nothing.
            states = tuple(
                state
                for state in states
                if state is not state_of(self._root) and state._training_state.name != "FORWARD"
            )
            if not states:
                return None
        self._outermost = module
        frees = not routing and not torch.is_grad_enabled()
        context = None if routing else self._context()
        if context is not None:
            context.__enter__()
        for state in states:
            args, _ = state._pre_forward(module, args, {})

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            handle.remove()
            self._outermost = None
            if context is not None:
                context.__exit__(None, None, None)
                output = tree_map_only(Tensor, at_least_fp32, output)
            for state in reversed(states):
                output = state._post_forward(module, args, output)
            if frees:
                self._reshard()
            return output

        handle = module.register_forward_hook(after, always_call=True)
        return args


def _states_above(part: Any, above: tuple[Any, ...]) -> Iterator[tuple[nn.Module, tuple[Any, ...]]]:
    """Yield each submodule with the states of the sharded modules around it, the outermost first."""
    if isinstance(part, FSDPModule):
        above = (*above, state_of(part))
    for child in part.children():
        yield child, above
        yield from _states_above(child, above)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
