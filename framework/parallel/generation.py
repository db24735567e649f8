"""``generate`` of models of transformers, through the strategy.

``generate`` calls the model once per token, and before that an encoder if there is one, so that the number of passes
depends on the prompts of a rank. It is replaced by one that keeps ranks in lockstep (see ``lockstep``) where forward
passes contain collectives. transformers has an argument for this, ``synced_gpus``; it has no place for a rank without
prompts, and a rank that has finished continues past the longest position that the model supports.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import repeated_blocks, replace_method
from .lockstep import Call, FillerCalls, Lockstep
from .strategy import Strategy
from .zero_backward import tensors_in

# Of these a filler has one token.
_TOKENS = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds", "token_type_ids")
# A filler has no cache, and no masks and positions of the tokens in one.
_OF_CACHE = ("cache", "past", "mask", "position")
_PLAIN = (type(None), bool, int, float, str)


def route_generation(
    module: nn.Module, strategy: Strategy, context: AbstractContextManager[Any] | None
) -> Callable[[], None]:
    """Run ``generate`` of a module's parts through the strategy; return a function to revert it.

    Args:
        module: a module that was set up. Those of its parts that are models of transformers are changed.
        strategy: its strategy.
        context: the context of forward passes; None if they need none.
    """
    undos = ExitStack()
    models = [part for part in module.modules() if generates(part)]
    if models:
        # Blocks are called by the models alone: a hook on their parts would cost time, and end compiled code.
        inner = {part for model in models for block in repeated_blocks(model) for part in block.modules()}
        parts = [part for part in module.modules() if part not in inner]
        lockstep = Lockstep(parts, strategy, context, TokenCalls())
        for model in models:
            undos.callback(replace_method(model, "generate", _Generate(model, lockstep)))
    return undos.close


def generates(part: nn.Module) -> bool:
    """Whether a module generates tokens as models of transformers do."""
    return all(callable(getattr(part, name, None)) for name in ("generate", "prepare_inputs_for_generation"))


def empty_prompts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of ``generate`` if it has no rows, else None."""
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    return first if first is not None and first.dim() > 0 and first.shape[0] == 0 else None


class _Generate:
    """The replaced ``generate`` of one model. A copy or a pickle of the model has its own, plain one."""

    def __init__(self, model: nn.Module, lockstep: Lockstep) -> None:
        self.plain: Callable[..., Any] = model.generate  # type: ignore[assignment]
        self._lockstep = lockstep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; without prompts return the empty tensor itself. Collective if forward passes are."""
        empty = empty_prompts(args, kwargs)
        if empty is not None:
            return self._lockstep(lambda: empty)
        # transformers would exchange messages of its own, and the ranks without prompts take no part in them.
        return self._lockstep(partial(self.plain, *args, **{**kwargs, "synced_gpus": False}))

    def __reduce__(self) -> Any:
        # The greatest of one item is the item; a function of phalanx would be needed to read the pickle.
        return max, ((self.plain,),)


class TokenCalls(FillerCalls):
    """Fillers for the calls that ``generate`` makes: one row with one token, if possible without a cache."""

    variants = 3

    def variant(self, call: Call) -> int:
        """Return 1 for a call with tensors other than tokens, such as pixels, which other submodules compute with.

        2 stands for a decoder with a cache of the encoder's keys and values, which it does not compute again.
        """
        kwargs = call[1]
        if any(isinstance(value, Tensor) and not _is_token(name) for name, value in kwargs.items()):
            return 1
        return 2 if _encoder_cache(kwargs) is not None else 0

    def filler(self, call: Call) -> Call:
        """Return a call with the last token of the first row; one with pixels or the like is repeated in full."""
        args, kwargs = call
        if self.variant(call) == 1:
            kept = {name: value for name, value in kwargs.items() if "past" not in name and "cache" not in name}
        else:
            args = tuple(map(_last_token, args))
            kept = {name: _short(name, value) for name, value in kwargs.items() if not _is_of_cache(name)}
            kept = {name: value for name, value in kept.items() if isinstance(value, (*_PLAIN, Tensor, tuple))}
        if "use_cache" in kwargs:
            kept["use_cache"] = False
        cache = _encoder_cache(kwargs)
        if cache is not None:
            kept["past_key_values"] = cache = copy.deepcopy(cache)
            cache.batch_select_indices(torch.zeros(1, dtype=torch.long, device=_device_of(cache)))
        return args, kept


def _is_token(name: str) -> bool:
    return name in _TOKENS or _is_of_cache(name)


def _encoder_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a decoder if it has an encoder's keys and values, else None."""
    cache = kwargs.get("past_key_values")
    return cache if any(getattr(cache, "is_updated", {}).values()) else None


def _device_of(cache: Any) -> torch.device:
    return next(tensors_in(cache)).device


def _is_of_cache(name: str) -> bool:
    return any(word in name for word in _OF_CACHE)


def _short(name: str, value: Any) -> Any:
    """Return one row of an argument: its last token, or an encoder's output for one token."""
    if name == "encoder_outputs" and value is not None:
        return (value[0][:1, :1],)
    return _last_token(value) if name in _TOKENS else value


def _last_token(value: Any) -> Any:
    return value[:1, -1:] if isinstance(value, Tensor) and value.dim() > 1 else value
