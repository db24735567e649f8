"""Code in which ranks run different numbers of forward passes, where forward passes contain collectives.

A strategy that gathers weights in forward passes needs the same passes on all ranks, in the same order. The generation
of text runs one pass per token, and ranks have different prompts, or none. Before each outermost call of a part of the
module, ranks exchange the calls that they are about to make. The call of the lowest rank is the turn: ranks about to
make the same one make it, all others run a filler, a short call of the same part whose output is dropped. A rank that
has finished runs fillers until all ranks have.

    rank 0   encoder   decoder   decoder   decoder  (finished)
    rank 1   encoder   decoder   filler    filler   (finished after its first token)
    rank 2   filler    filler    filler    filler   (has no prompts)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from ..core.errors import LoopError
from ..distributed.seed import capture, restore
from ..distributed.world import World
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
