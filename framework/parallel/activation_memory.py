"""Memory of activations: how the repeated blocks of a module keep the tensors that their backward passes need.

- ``"blocks"``: a block keeps its inputs, and computes the rest again in the backward pass.
- ``"selective"``: it keeps the results of matrix products, convolutions and attention too, which take longest.
- ``"offload"``: it keeps everything in host memory, from where the backward pass fetches it.

A block is changed by an attribute ``forward`` of the module itself, as ``compilation`` does, so names of parameters do
not change, and the hooks of strategies run outside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..core.errors import ConfigurationError, did_you_mean, unknown
from ..core.torch_internals import TorchDispatchMode, storage_key, tree_leaves
from ..distributed.devices import copies_in_order
from .blocks import ReplacedForward, repeated_blocks, replace_method
from .compilation import is_compiled
from .parameter_names import canonical_names

WORDS = ("blocks", "selective", "offload")
_KEPT_OPERATIONS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math"),
)
Forward = Callable[..., Any]
Record = Callable[[Tensor], Any]


@dataclass(frozen=True)
class ActivationMemory:
    """The words for the blocks of a module, by patterns of their names; the first match applies."""

    words: Mapping[str, str]

    def apply(self, module: nn.Module, record: Record | None = None) -> Callable[[], None]:
        """Change the blocks of a module in place; return a function that reverts this.

        Args:
            module: the module.
            record: called with every tensor that a block keeps outside of the graph of autograd, to count its bytes.

        Raises:
            ConfigurationError: see ``words_of``, or the module is the result of ``torch.compile``.
        """
        if any(is_compiled(part) for part in module.modules()):
            raise _compiled(_shown(self.words))
        chosen = self.words_of(module)
        undos = [
            replace_method(part, "forward", ReplacedForward(part, _frugal(part, word, record)))
            for part, word in chosen.items()
        ]

        def undo() -> None:
            for restore in undos:
                restore()

        return undo

    def words_of(self, module: nn.Module) -> dict[nn.Module, str]:
        """Return the word of each block of a module that has one.

        Raises:
            ConfigurationError: the module has no repeated blocks, or a pattern matches none.
        """
        blocks = _named_blocks(module)
        if not blocks:
            raise ConfigurationError(
                f"memory={_shown(self.words)} found no repeated blocks in {type(module).__name__}: call "
                "torch.utils.checkpoint.checkpoint in its forward, or leave memory out."
            )
        for pattern in self.words:
            if not any(fnmatchcase(name, pattern) for name in blocks):
                raise ConfigurationError(
                    f"memory: {pattern!r} matches no block of {type(module).__name__}, which are {_listed(blocks)}."
                    f"{did_you_mean(pattern, blocks)}"
                )
        found = {
            part: next((word for pattern, word in self.words.items() if fnmatchcase(name, pattern)), None)
            for name, part in blocks.items()
        }
        return {part: word for part, word in found.items() if word is not None}


def activation_memory(given: Any, compiles: bool) -> ActivationMemory | None:
    """Return the meaning of the argument ``memory``; None for ordinary activations.

    Args:
        given: None, a word, or a dict from patterns of the names of blocks to words.
        compiles: whether blocks are compiled.

    Raises:
        ConfigurationError: a word is unknown, or blocks are compiled.
    """
    if given is None:
        return None
    words = dict(given) if isinstance(given, Mapping) else {"*": given}
    if not words or not all(isinstance(pattern, str) for pattern in words):
        raise ConfigurationError(f"memory={given!r} must be one of {', '.join(WORDS)}, or a dict from names of blocks.")
    for word in words.values():
        if word not in WORDS:
            raise unknown("memory", str(word), WORDS)
    if compiles:
        raise _compiled(repr(given))
    return ActivationMemory(words)


def _compiled(given: str) -> ConfigurationError:
    # torch runs no compiled code within a compiled backward pass: other tensors would be computed again than were
    # saved.
    return ConfigurationError(
        f"memory={given} changes what blocks keep for the backward pass, which compiled code decides itself: leave "
        "memory or compile out."
    )


def _frugal(part: nn.Module, word: str, record: Record | None) -> Forward:
    """Return the ``forward`` of a block with a word."""
    if word == "offload":
        return offloaded(part, part.forward)
    return recomputed(part.forward, partial(_contexts, record) if word == "selective" else None)


def recomputed(forward: Forward, contexts: Callable[[], tuple[Any, Any]] | None = None) -> Forward:
    """Return a function that keeps its inputs for backward, and computes the rest again.

    Args:
        forward: computes an output; the random numbers that it draws are the same again. It is given no empty cache
            of keys and values, and it keeps everything with one that is filled.
        contexts: returns the contexts of the first and the second computation.
    """
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def compute(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Backward runs outside of the context that sets the dtype of new tensors, so the recomputation enters it again.
        before = torch.get_default_dtype()
        if before == dtype:
            return forward(*args, **kwargs)
        torch.set_default_dtype(dtype)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or any(_length(each) for each in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        # The second computation would append to a cache again.
        args = tuple(None if _length(each) == 0 else each for each in args)
        kwargs = {name: None if _length(each) == 0 else each for name, each in kwargs.items()}
        return checkpoint(compute, torch.get_default_dtype(), args, kwargs, use_reentrant=False, **options)

    return run


def _length(given: Any) -> int | None:
    """Return the number of positions in a cache of keys and values of transformers; None for anything else."""
    length = getattr(given, "get_seq_length", None)
    return int(length()) if callable(length) else None


def offloaded(part: nn.Module, forward: Forward) -> Forward:
    """Return a function that keeps the tensors for backward in host memory, all but the parameters of a module."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # Under strategies that gather parameters, these are the gathered ones.
        own = {storage_key(each) for each in part.parameters()}

        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            # Sharded activations of tensor parallelism, and other subclasses, stay where they are.
            if type(tensor) not in (Tensor, nn.Parameter) or storage_key(tensor) in own:
                return tensor.device, tensor
            # A copy on a CPU too: autograd does not notice that a tensor of such a hook is changed in place.
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            return tensor.device, host.copy_(tensor, non_blocking=copies_in_order(tensor.device))

        with torch.autograd.graph.saved_tensors_hooks(pack, _fetched):
            return forward(*args, **kwargs)

    return run


def _fetched(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=copies_in_order(device))


def _contexts(record: Record | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts that keep the results of expensive operations, and that use them."""
    first, again = create_selective_checkpoint_contexts(_policy)
    if record is None:
        return first, again
    stack = ExitStack()
    stack.enter_context(first)
    stack.enter_context(_Recorder(record))
    return stack, again


class _Recorder(TorchDispatchMode):
    """Reports the results of the operations that are kept."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._record(leaf)
        return result


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = _is_kept(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``"selective"`` keeps the result of an operation of torch."""
    if operation.overloadpacket not in _expensive():
        return False
    # The second computation would not draw the random numbers of one whose result is kept, and others after it.
    names = [each.name for each in operation._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return not given.get("dropout_p")


@functools.cache
def _expensive() -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in _KEPT_OPERATIONS if hasattr(torch.ops.aten, name))


def _named_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks by canonical name; a block in several places has its first one."""
    wanted, canonical = set(repeated_blocks(module)), canonical_names(module)
    return {canonical(name): part for name, part in module.named_modules() if part in wanted}


def _shown(words: Mapping[str, str]) -> str:
    return repr(words["*"] if list(words) == ["*"] else dict(words))


def _listed(blocks: Mapping[str, nn.Module]) -> str:
    names = list(blocks)
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} to {names[-1]}"
