"""``PipelinePasses``: the passes of a window through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...framework.core.errors import LoopError
from ...framework.core.wording import counted
from ...framework.diagnostics.isolated_step import isolated
from ...framework.distributed.world import World
from ...framework.parallel.strategy import Window, WindowPasses
from ...framework.parallel.zero_backward import tensors_in
from ..context import ContextParallel
from ..context.sharing import attention_of
from .absent import Absent, no_value
from .blocks import Stages
from .calls import BlockCalls, PassEnded, StagePass, check_output, sendable
from .kept_state import KeptState
from .other_stages import check_hooks
from .random_numbers import SharedDraws
from .schedules import Place, bubble, build

_MOST_SCHEDULES = 4
_NO_COLLECTIVES = (
    "was called in training_step, which the stages of a pipeline run at different times: call it in "
    "on_train_batch_end, or use strategy='fsdp' or 'ddp'."
)


class HiddenStates:
    """Shape and dtype of the hidden states between stages, learned from the first own block of a rank.

    Args:
        module: the user's module.
        block: the number of a block that this rank holds.
    """

    def __init__(self, module: Any, calls: BlockCalls, block: int) -> None:
        self._module = module
        self._plain, self._block, self._marks = calls.plain[block], calls.blocks[block], calls.marks
        self._known: dict[Any, torch.dtype] = {}

    def after(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a tensor on the meta device like the output of a block, given the arguments of the first block.

        Raises:
            LoopError: blocks do not return a tensor of the shape of their first argument.
        """
        key = tuple(hidden.shape), hidden.dtype, torch.is_autocast_enabled(hidden.device.type), self._block.training
        if key not in self._known:
            learning = self._marks.learning(self._block, args, kwargs)
            with torch.no_grad(), isolated(self._module, runs_again=True), learning:
                output = self._plain(*args, **kwargs)
            check_output(output, hidden)
            self._known[key] = output.dtype
        return torch.empty(hidden.shape, dtype=self._known[key], device="meta")


class PipelinePasses(WindowPasses):
    """Runs windows by torch's schedules."""

    def __init__(self) -> None:
        self.ranks = 0
        """The number of ranks of a pipeline."""
        self.module: Any = None
        """The module that is set up, or None."""

    def connect(self, world: World, place: Place, group: dist.ProcessGroup, sequences: ContextParallel | None) -> None:
        """Use the ranks of a pipeline, which share sequences with those of others, or do not."""
        self._world, self._place, self._group = world, place, group
        self._sequences, self._attention = sequences, attention_of(sequences)
        self.computes_losses = place.stages - 1 in place.own

    def set_up(
        self,
        module: Any,
        stages: Stages,
        calls: BlockCalls,
        hidden: HiddenStates,
        gather: Callable[[], None] | None,
        check_loss: Callable[[Tensor], None] | None,
    ) -> None:
        """Run the passes of this module.

        Args:
            module: the user's module.
            stages: the division of the model.
            hidden: knows the hidden states between stages.
            gather: gathers sharded parameters before the passes of a window; None if there are none.
            check_loss: compares a loss with that of other ranks; None if no others compute it.
        """
        self._gather, self._check_loss = gather, check_loss
        self.module, self._stages, self._calls, self._hidden = module, stages, calls, hidden
        # Listed once: a window of a large model would take milliseconds to find them.
        self._may_have_hooks = self.parameters(), list(module.modules())
        self._modules = [StageModule(self, stage) for stage in self._place.own]
        self._kept = KeptState(module, stages.blocks, self._world, self._place, self._group)
        self._shapes: dict[Any, Tensor] = {}
        self._schedules: dict[Any, Callable[[], None]] = {}

    def release(self) -> None:
        """Forget the module."""
        self.module = None
        self._shapes, self._schedules, self._modules = {}, {}, []
        self._may_have_hooks = [], []

    def remark(self, sizes: Sequence[int], what: str) -> str | None:
        """Return a sentence on windows with fewer micro-batches than a pipeline has ranks, some of which wait."""
        least, ranks = min(sizes), self.ranks
        if least >= ranks:
            return None
        return (
            f"{what} makes windows of {counted(least, 'micro-batch')} for a pipeline of {ranks} "
            f"ranks, each of which waits {bubble(least, ranks):.0%} of the time. With {ranks}, all of them work at the "
            f"same time; with {4 * ranks}, they wait {bubble(4 * ranks, ranks):.0%}."
        )

    # ---- a window --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Gather the parameters of this rank's stages, if they are sharded. Collective."""
        if self._gather is not None:
            self._gather()

    def run(self, window: Window) -> None:
        check_hooks(*self._may_have_hooks)
        self._kept.begin(window.number, len(window.batches))
        # Around the backward passes too, which call attention where they recompute activations.
        with self._attention(), self._world.attendance.refusing(_NO_COLLECTIVES):
            self._run(window)

    def _run(self, window: Window) -> None:
        self._window = window
        self._draws = SharedDraws(self._world.device, window.number, len(self._place.own) > 1)
        self._error: Exception | None = None
        shapes = self._shapes_of(window)
        try:
            # Micro-batches of different shapes follow one another: torch's stages receive tensors of one shape.
            for shape, positions in groupby(range(len(window.batches)), lambda position: shapes[position]):
                self._run_group(shape, list(positions))
        except RuntimeError as error:
            # torch wraps the errors of a stage.
            if self._error is None:
                raise _no_derivative(error.__cause__ or error) from error
            raise self._error from error.__cause__.__cause__ if error.__cause__ is not None else None
        finally:
            del self._window, self._draws
            self._error = None

    def share(self, values: Tensor, message: Any = None) -> tuple[Tensor, Any]:
        """Broadcast values and a message of the rank with the last stage, and what its steps kept. Collective."""
        return self._kept.share(values, message, self.computes_losses)

    def _run_group(self, shape: tuple[Any, ...], positions: list[int]) -> None:
        key = shape, len(positions)
        schedule = self._schedules.pop(key, None)
        if schedule is None:
            hidden = torch.empty(shape[0], dtype=shape[1], device="meta", requires_grad=True)
            schedule = build(self._place, self._modules, hidden, len(positions), self._group, self._world.device)
        self._schedules[key] = schedule
        if len(self._schedules) > _MOST_SCHEDULES:
            self._schedules.pop(next(iter(self._schedules)))
        self._first, self._shape = positions[0], shape
        schedule()

    def _shapes_of(self, window: Window) -> list[tuple[Any, ...]]:
        """Return shape and dtype of the hidden states of each micro-batch, from the step up to the first block."""
        keys = [tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(batch)) for batch in window.batches]
        for position, key in enumerate(keys):
            if key not in self._shapes and (found := self._probe(window, position)) is not None:
                self._shapes[key] = found
        # For a step that returns before it calls the blocks any shape will do: its loss does not depend on them.
        other = next(iter(self._shapes.values()), torch.empty(1, device="meta"))
        return [(tuple(each.shape), each.dtype) for each in (self._shapes.get(key, other) for key in keys)]

    def _probe(self, window: Window, position: int) -> Tensor | None:
        found: list[Tensor] = []

        def begin(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # On all ranks, of which some would wait for one that is refused in a pass.
            self._kept.check_unchanged()
            found.append(self._hidden.after(hidden, args, kwargs))
            raise PassEnded

        nothing = StagePass(self._stages, {0: lambda hidden: hidden}, lambda stage, output: None, begin)
        # With gradients: the step may put a hook on a tensor, or differentiate.
        with isolated(self.module, runs_again=True):
            self._kept.begin_pass()
            self._calls.during(nothing, lambda: window.step(position))
        return found[0] if found else None

    # ---- a pass ----------------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this rank holds."""
        return [parameter for parameter in self.module.parameters() if not parameter.is_meta]

    def run_pass(self, stage: int, number: int, received: Tensor | None) -> Tensor:
        """Run a micro-batch of the group in progress on a stage; return its hidden states, or its loss."""
        try:
            return self._pass(stage, self._first + number, received)
        except Exception as error:
            self._error = error
            if isinstance(error, RuntimeError) and "not have been used in the graph" in str(error):
                self._error = _no_derivative(error)
            raise

    def _pass(self, stage: int, position: int, received: Tensor | None) -> Tensor:
        window, delivered = self._window, list[Tensor]()

        def begin(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if tuple(hidden.shape) != self._shape[0]:
                raise LoopError(
                    f"the first block got hidden states of shape {list(hidden.shape)}, and of shape "
                    f"{list(self._shape[0])} for another batch of the same shapes: in a pipeline they may depend on "
                    "the shapes of a batch only, so pad instead of leaving out what a batch does not need."
                )
            self._draws.leave()
            self._kept.enter(position, args, kwargs, stage == self._stages.count - 1)

        def receive(hidden: Tensor) -> Tensor:
            assert received is not None
            return cast(Tensor, _Contiguous.apply(received))  # type: ignore[no-untyped-call]

        current = StagePass(self._stages, {stage: receive}, lambda _, output: delivered.append(sendable(output)), begin)
        self._kept.begin_pass()
        with self._draws.micro_batch(position, stage):
            _, output = self._calls.during(current, lambda: window.step(position))
            if self._sequences is not None and not current.reached:
                raise _left_out()
            if stage == self._stages.count - 1:
                assert received is not None
                loss = window.finish(position, output)
                if isinstance(loss, Absent):
                    raise no_value()
                if loss is not None and self._check_loss is not None:
                    self._check_loss(loss)
                return self._no_loss(current, received) if loss is None else loss
        if delivered:
            return delivered[0]
        # The step has returned before it called the blocks, as it does on the other stages.
        shape, dtype = self._shape
        return torch.zeros(shape, dtype=dtype, device=self._world.device, requires_grad=True)

    def _no_loss(self, current: StagePass, received: Tensor) -> Tensor:
        """Return a loss of zero for a pass whose loss does not count."""
        # Attention brings gradients of other parts' losses back into this part: its backward pass must run.
        start = received if self._sequences is None else current.last
        return cast(Tensor, _NoLoss.apply(start))  # type: ignore[no-untyped-call]


def _no_derivative(error: BaseException) -> LoopError:
    """Return the error for a backward pass that the stages cannot run."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LoopError(
        f"a backward pass through the stages of the pipeline failed ({reason}): each stage knows the graph of its own "
        "blocks only, so that autograd.grad through several of them, create_graph=True, checkpoint(use_reentrant=True) "
        "and uses of a block's weights outside of it need strategy='ddp' or 'fsdp'."
    )


def _left_out() -> LoopError:
    """Return the error for a step that leaves the blocks to the ranks with other parts of the sequences."""
    return LoopError(
        "the step returned before it had called the blocks of the model, for a part of sequences whose other parts are "
        "on other ranks: call the model on every part, and let its weight be 0 where a loss must not count."
    )


class StageModule(nn.Module):
    """The module of a stage, as torch's schedules call it.

    Args:
        passes: runs the passes.
        stage: the number of the stage.
    """

    def __init__(self, passes: PipelinePasses, stage: int) -> None:
        super().__init__()
        self._passes = passes
        self._stage = stage

    def forward(self, given: Tensor, index: Tensor) -> Tensor:
        """Run the micro-batch of a number; ``given``: the hidden states, which the first stage has none of."""
        return self._passes.run_pass(self._stage, int(index), None if self._stage == 0 else given)

    def parameters(self, recurse: bool = True) -> Any:
        """Return the parameters that this rank holds, whose gradients a schedule may compute apart."""
        return iter(self._passes.parameters())


class _Contiguous(torch.autograd.Function):
    """Hidden states that were received, whose gradients are contiguous, as messages must be."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


class _NoLoss(torch.autograd.Function):
    """A loss of zero, with gradients of zero for hidden states even where these are not finite."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        ctx.like = received.shape, received.dtype, received.device
        return torch.zeros((), device=received.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)
