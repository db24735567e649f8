"""Communication hooks of torch's ``DistributedDataParallel``, which compress gradients before they are sent.

Hooks average a bucket of gradients in their own way: in fp16 or bf16, or as products of low rank (Vogels et al. 2019,
"PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization").
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..framework.core.errors import ConfigurationError
from ..framework.parallel.gradient_operations import FullGradients, GradientOperations

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
Wrapper = Callable[[Hook], Hook]

# What PowerSGDState holds of earlier steps, by the index of a bucket.
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


class CommunicationHook:
    """A hook, its state and its wrapper, for all modules that a strategy and its clones set up.

    Args:
        hook: averages a bucket: ``hook(state, bucket)`` returns a future.
        state: the first argument of the hook, or a function without arguments that returns one for each module.
        wrapper: makes another hook of the hook, such as torch's ``fp16_compress_wrapper``.

    Raises:
        ConfigurationError: there is no hook, an argument is not callable, or the hook leaves gradients different on the
            ranks.
    """

    def __init__(self, hook: Hook | None, state: Any, wrapper: Wrapper | None) -> None:
        if hook is None:
            raise ConfigurationError(
                "DDPStrategy was given ddp_comm_state or ddp_comm_wrapper without ddp_comm_hook: give the hook too."
            )
        for name, value in (("ddp_comm_hook", hook), ("ddp_comm_wrapper", wrapper)):
            if value is not None and not callable(value):
                raise ConfigurationError(
                    f"DDPStrategy({name}={value!r}) must be a function, such as those of "
                    "torch.distributed.algorithms.ddp_comm_hooks."
                )
        if "PostLocalSGDState" in {kind.__name__ for kind in type(state).__mro__}:
            raise ConfigurationError(
                "DDPStrategy(ddp_comm_state=PostLocalSGDState(...)) lets gradients differ between ranks, and all ranks "
                "must apply the same update: use LocalSGD of phalanx.compat.accelerate.local_sgd with an Accelerator of "
                "phalanx.compat.accelerate."
            )
        if getattr(hook, "__name__", "") == "batched_powerSGD_hook" and not _takes_one_matrix(hook):
            raise ConfigurationError(
                f"DDPStrategy(ddp_comm_hook=batched_powerSGD_hook) fails in torch {torch.__version__}, whose hook "
                "gives one matrix to a function that takes only a batch of them: use powerSGD_hook, and "
                "PowerSGDState(batch_tensors_with_same_shape=True)."
            )
        self._hook = _plain(hook if wrapper is None else wrapper(hook))
        self._state = state
        self._module: nn.Module | None = None
        # A module that is wrapped again, because parameters were unfrozen, keeps its state.
        self._made: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    def register(self, ddp: nn.parallel.DistributedDataParallel, module: nn.Module) -> GradientOperations:
        """Let a wrapper use this hook; return the operations on the gradients that it averages.

        The memory of earlier steps is dropped: it belongs to the buckets of an earlier wrapper.

        Raises:
            ConfigurationError: another module uses the state.
        """
        state = self._state
        if callable(state):
            if module not in self._made:
                self._made[module] = state()
            state = self._made[module]
        elif state is not None:
            if self._module is not None and self._module is not module:
                raise ConfigurationError(
                    f"a {type(module).__name__} and a {type(self._module).__name__} cannot share one ddp_comm_state: "
                    "give DDPStrategy a function that returns a new state for each module."
                )
            self._module = module
        ddp.register_comm_hook(state, self._hook)
        gradients = HookedGradients(state)
        gradients.discard()
        return gradients

    def release(self, module: nn.Module) -> None:
        """Let another module use the state."""
        if self._module is module:
            self._module = None


def _takes_one_matrix(hook: Hook) -> bool:
    """Whether the function that makes columns orthogonal, in the module of a PowerSGD hook, takes a single matrix."""
    try:
        sys.modules[hook.__module__]._orthogonalize(torch.eye(2))
    except AssertionError:
        return False
    return True


def _plain(hook: Hook) -> Hook:
    """Return a function for any callable: torch reads the name and the annotations of what it registers."""

    def average(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return average


class HookedGradients(FullGradients):
    """The operations on gradients that a hook with a memory of earlier steps averages."""

    def __init__(self, state: Any) -> None:
        self._memories = [getattr(state, name) for name in _MEMORIES if isinstance(getattr(state, name, None), dict)]

    def discard(self) -> None:
        """Drop the memory: the error of a gradient that is not finite would make all later gradients non-finite."""
        for memory in self._memories:
            memory.clear()
