"""The calls of a model's blocks within a pass of the user's step.

The user's step runs on every stage, from its beginning. Its calls of blocks do this:

- A block of an earlier stage computes nothing, and returns hidden states without values. The last of them returns the
  hidden states that this rank has received.
- A block of this stage computes. The output of the last one is sent to the next stage.
- A block of a later stage ends the pass, by an exception. In an evaluation it computes nothing, and the step runs to
  its end with the output of the last block, which the rank with the last stage broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...framework.core.errors import LoopError
from ...framework.core.wording import counted
from ...framework.parallel.blocks import ReplacedForward, replace_method
from .absent import BlockMarks, absent_like
from .blocks import Stages


class PassEnded(BaseException):
    """Ends the user's step on a rank whose stages have computed.

    It does not derive from ``Exception``, because the step may catch all exceptions.
    """


class StagePass:
    """One pass of the user's step on the stages of this rank.

    Args:
        stages: the division of the model.
        own: the stages that compute in this pass, each with the hidden states that it gets from the stage before.
        deliver: takes the output of a stage in ``own`` that is computed on, by the number of the stage.
        begin: called with the arguments of the first block before it runs.
        end: lets the step go on after the last block on every rank: given the output, or None on a rank that has not
            computed it, and a tensor of its shape, it returns the output. Without it the pass ends after ``own``.
    """

    def __init__(
        self,
        stages: Stages,
        own: Mapping[int, Callable[[Tensor], Tensor]],
        deliver: Callable[[int, Tensor], None],
        begin: Callable[[Tensor, tuple[Any, ...], dict[str, Any]], None],
        end: Callable[[Tensor | None, Tensor], Tensor] | None = None,
    ) -> None:
        self._stages = stages
        self._own = own
        self._deliver = deliver
        self._begin = begin
        self._end = end
        self._next = 0
        self.reached = False
        """Whether the step has called the blocks."""
        self.marks = BlockMarks()
        self.last: Tensor | None = None
        """The output of the last block, on the rank that computes it."""

    def call(self, number: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a block, as far as this rank has one.

        Raises:
            PassEnded: the stages of this rank have computed.
            LoopError: the step calls the blocks in another order, or twice.
        """
        stages, last = self._stages, len(self._stages.blocks) - 1
        if number != self._next:
            raise _out_of_order(number, self._next, len(stages.blocks))
        hidden = hidden_of(args, kwargs)
        if number == 0:
            self.reached = True
            self._begin(hidden, args, kwargs)
        self._next += 1
        stage = stages.stage_of(number)
        following = stages.stage_of(number + 1) if number < last else None
        if stage in self._own:
            output = plain(*args, **kwargs)
            check_output(output, hidden)
            if number == last:
                self.last = output
                return output if self._end is None else self._ended(output, hidden)
            if following is None or following == stage or following in self._own:
                return output
            self._deliver(stage, output)
            return absent_like(output)
        self.marks.leave(stages.blocks[number], args, kwargs)
        if stage > max(self._own):
            if self._end is None:
                raise PassEnded
            return absent_like(hidden) if number < last else self._ended(None, hidden)
        if following is not None and following in self._own:
            return self._own[following](hidden)
        return absent_like(hidden)

    def _ended(self, output: Tensor | None, hidden: Tensor) -> Tensor:
        assert self._end is not None
        # All ranks have the output, so the step may call the model again, as generation does.
        self._next = 0
        return self._end(output, hidden)


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block: its first argument.

    Raises:
        LoopError: that is not a tensor.
    """
    first = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(first, Tensor):
        raise LoopError(
            f"the first argument of a block is {type(first).__name__}, and a pipeline passes a tensor of hidden states "
            "from block to block: let the blocks take it first, or use another strategy."
        )
    return first


def check_output(output: Any, hidden: Tensor) -> None:
    """Check the output of a block.

    Raises:
        LoopError: it is not a tensor of the shape of the hidden states that the block was given.
    """
    if not isinstance(output, Tensor) or output.shape != hidden.shape:
        what = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise LoopError(
            f"a block returned {what} for hidden states of shape {list(hidden.shape)}, and stages of a pipeline "
            "exchange one tensor of the same shape: let the blocks return only that, and choose them by "
            "configure_pipeline if others were meant."
        )


class BlockCalls:
    """Replaces ``forward`` of the blocks while a module is set up.

    Args:
        stages: the division of the model.
        held: the numbers of the blocks that this rank holds.
    """

    def __init__(self, stages: Stages, held: set[int]) -> None:
        self._held = held
        self._current: StagePass | None = None
        self.blocks, self.marks = stages.blocks, BlockMarks()
        self.plain: list[Callable[..., Any]] = [block.forward for block in stages.blocks]
        # Code that is compiled around the blocks stops before them: which rank computes one is decided in each call.
        call = torch.compiler.disable(self._call)
        self._undos = [
            replace_method(block, "forward", ReplacedForward(block, partial(call, number)))
            for number, block in enumerate(stages.blocks)
        ]

    def _call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        plain = self.plain[number]
        if self._current is not None:
            return self._current.call(number, plain, args, kwargs)
        # In a backward pass, which computes activations again.
        if number in self._held:
            return plain(*args, **kwargs)
        raise LoopError(
            f"block {number} of the model was called outside of a step, and another rank of the pipeline holds it: "
            "call the model in training_step, validation_step, test_step or predict_step only, and in a Fabric in the "
            "step of forward_backward or under torch.no_grad()."
        )

    def during(self, current: StagePass, function: Callable[[], Any]) -> tuple[bool, Any]:
        """Run a pass of the user's step; return whether it ended by itself, and its output."""
        before, self._current, current.marks = self._current, current, self.marks
        try:
            return True, function()
        except PassEnded:
            return False, None
        finally:
            self._current = before

    def remove(self) -> None:
        """Restore ``forward`` of the blocks."""
        while self._undos:
            self._undos.pop()()


def _out_of_order(number: int, expected: int, count: int) -> LoopError:
    if expected == count:
        return LoopError(
            "the step calls the blocks of the model a second time, and a pipeline passes each micro-batch through them "
            "once: join both inputs into one batch, or use strategy='ddp' or 'fsdp'."
        )
    return LoopError(
        f"the step calls block {number} of {counted(count, 'block')} where block {expected} was to follow: a pipeline "
        "calls each block once, in order. Return them in the order of their calls from configure_pipeline."
    )


def sendable(hidden: Tensor) -> Tensor:
    """Return contiguous hidden states, which require a gradient also where no parameter before them is trained."""
    if hidden.requires_grad or not torch.is_grad_enabled():
        return hidden.contiguous()
    return hidden.detach().contiguous().requires_grad_()
