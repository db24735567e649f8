"""``generate`` of models of transformers, through the strategy.

``generate`` calls the model once per token, and before that an encoder if there is one, so that the number of passes
depends on the prompts of a rank. A strategy that gathers weights in forward passes needs the same passes on all ranks,
in the same order, so ``generate`` is replaced by one that keeps ranks in lockstep. Before each outermost call of a part
of the module, ranks exchange the calls that they are about to make. The call of the lowest rank is the turn: ranks
about to make the same one make it, all others run a filler, a short call of the same part whose output is dropped. A
rank that has finished runs fillers until all ranks have.

    rank 0   encoder   decoder   decoder   decoder  (finished)
    rank 1   encoder   decoder   filler    filler   (finished after its first token)
    rank 2   filler    filler    filler    filler   (has no prompts)

transformers has an argument for this, ``synced_gpus``; it has no place for a rank without prompts, and a rank that has
finished continues past the longest position that the model supports.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from ..core.errors import LoopError
from ..distributed.seed import capture, restore
from ..distributed.world import World
from .blocks import repeated_blocks, replace_method
from .strategy import Strategy
from .zero_backward import tensors_in

T = TypeVar("T")
Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
_FINISHED, _FAILED = 0, -1


class FillerCalls:
    """The calls by which a rank takes part in the passes of others. This base class repeats them as they are."""

    variants = 1
    """The number of different sequences of submodules that calls of one part may run."""

    def variant(self, call: Call) -> int:
        """Return which of these a call runs."""
        return 0

    def filler(self, call: Call) -> Call:
        """Return a short call that runs the same submodules. It may change what it is given only if that is a copy."""
        return call


class Lockstep:
    """Runs functions that call parts of a module, with the same passes on all ranks if these contain collectives.

    Args:
        parts: the parts of a set-up module that the functions call, and any that these call.
        strategy: the strategy of the module.
        context: the context of forward passes; None if they need none.
        calls: returns fillers.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        strategy: Strategy,
        context: AbstractContextManager[Any] | None,
        calls: FillerCalls,
    ) -> None:
        self._parts = parts
        self._world = strategy.world
        self._takes_turns = strategy.traits.forward_has_collectives and strategy.world.size > 1
        self._context = context or nullcontext()
        self._filling = strategy.filling
        self._calls = calls
        self._is_running = False
        # Routed as a whole: what the strategy gathers around a step is then gathered once, and by all ranks.
        self._routed = strategy.route(self._run, training=False)

    def __call__(self, function: Callable[[], T]) -> T:
        """Run a function through the strategy, without gradients, and return its result.

        Collective if forward passes are. Within a function that runs already, it is called directly.

        Raises:
            LoopError: the function raised on another rank, between two passes.
        """
        if self._is_running:
            return function()
        self._is_running = True
        try:
            with torch.no_grad():
                return cast(T, self._routed(function))
        finally:
            self._is_running = False

    def _run(self, function: Callable[[], Any]) -> Any:
        turns = (
            _Turns(self._parts, self._world, self._calls, self._filling).taken() if self._takes_turns else nullcontext()
        )
        with self._context, turns:
            return function()


class _Turns:
    """The turns of one function on all ranks."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        world: World,
        calls: FillerCalls,
        filling: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._parts = parts
        self._numbers = {part: number for number, part in enumerate(parts)}
        self._world = world
        self._calls = calls
        self._filling = filling
        self._fillers: dict[int, Call] = {}
        """For each turn so far, a call by which this rank fills it."""
        self._outermost: nn.Module | None = None
        """The part whose pass is in progress, in which it calls others. It stays after an error in the pass."""
        self._ended = False

    @contextmanager
    def taken(self) -> Generator[None, None, None]:
        """Take turns in the calls of parts inside, and fill those of other ranks at the end. Collective."""
        handles = [part.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True) for part in self._parts]
        handles += [part.register_forward_hook(self._after) for part in self._parts]
        try:
            yield
            self._fill_until(_FINISHED)
            self._ended = True
        except Exception:
            # Within a pass the other ranks wait in a collective of the pass, and do not reach the exchange.
            if self._outermost is None and not self._ended:
                self._post(_FAILED)
            raise
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Wait for the turn of an outermost call. Collective."""
        if self._outermost is not None:
            return
        call = args, kwargs
        # Zero is the number of a rank that has finished.
        own = 1 + self._calls.variants * self._numbers[part] + self._calls.variant(call)
        self._fill_until(own, call)
        self._outermost = part

    def _after(self, part: nn.Module, args: Any, output: Any) -> None:
        if part is self._outermost:
            self._outermost = None

    def _fill_until(self, own: int, call: Call | None = None) -> None:
        """Run fillers until the turn of this rank's own call. Collective."""
        turn = self._turn(own, call)
        if turn == own:
            return
        # Layers such as dropout draw from the generators.
        random = capture()
        while turn != own:
            self._fill(turn)
            turn = self._turn(own, call)
        restore(random)

    def _turn(self, own: int, call: Call | None = None) -> int:
        """Return the next call of all ranks, or that all have finished. Collective.

        Raises:
            LoopError: a rank has failed.
        """
        asked = self._post(own)
        if _FAILED in asked:
            self._ended = True
            raise LoopError(
                f"rank {asked.index(_FAILED)} raised an error between two forward passes, in which all ranks take part "
                "under a strategy that shards weights: see the error of that rank."
            )
        turn = next((number for number in asked if number != _FINISHED), _FINISHED)
        if turn != _FINISHED and turn not in self._fillers:
            self._fillers[turn] = self._shared(turn, asked, call)
        return turn

    def _post(self, own: int) -> list[int]:
        """Return the numbers of all ranks. Collective."""
        numbers = [0.0] * self._world.size
        numbers[self._world.rank] = own
        return [int(number) for number in self._world.control_reduce(numbers).wait()]

    def _shared(self, turn: int, asked: Sequence[int], call: Call | None) -> Call:
        """Return the filler of a turn that is taken for the first time, made from a call of that turn. Collective."""
        source = asked.index(turn)
        makes = call is not None and (self._world.rank == source or asked.count(turn) == self._world.size)
        filler = _copy_on(self._calls.filler(call), torch.device("cpu")) if makes and call is not None else None
        if asked.count(turn) < self._world.size:
            filler = self._world.broadcast_object(filler, source)
        return _copy_on(cast(Call, filler), self._world.device)

    def _fill(self, turn: int) -> None:
        """Run a filler. Collective."""
        # A copy, as a pass may change what it is given, such as a cache.
        args, kwargs = _copy_on(self._fillers[turn], self._world.device)
        self._outermost = part = self._parts[(turn - 1) // self._calls.variants]
        with self._filling():
            part(*args, **kwargs)


def _copy_on(call: Call, device: torch.device) -> Call:
    """Return a copy of a call with the tensors in it, also those in attributes of objects, on a device."""
    moved = {id(tensor): tensor.to(device, copy=True) for tensor in tensors_in(call)}
    return copy.deepcopy(call, moved)


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
