"""One update through DeepSpeed's engine: norm, scaling and clipping of the gradients, the step, and dropping them.

The engine scales and clips all gradients in its step, and computes their norm there. A norm requested before the step
is computed in the same way and cached, so that the step does not compute it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError, LoopError
from ...framework.core.patches import patch
from ...framework.distributed.world import Pending
from ...framework.parallel.gradient_operations import GradientOperations, no_clipping_by_value
from ...framework.parallel.step_flags import RunOrder
from ...framework.parallel.strategy import Recovery, Repeat
from ...framework.parallel.use_over_ranks import UseOverRanks
from .access import LentGradients, engine_runs
from .flat_groups import full_shape
from .optimizer import Following
from .setup import COUNTS
from .stages import stage_of
from .state import EngineState


class EngineUpdate(GradientOperations):
    """The gradients of an engine between the last backward pass of a window and the next window, and their update.

    Args:
        engine: DeepSpeed's engine.
        following: the user's optimizer, for the engine.
        strategy: the name of the strategy, for errors.
    """

    clips_by_value = False

    def __init__(self, engine: Any, following: Following, state: EngineState, strategy: str) -> None:
        self.engine = engine
        self.zero = engine.optimizer
        self.follow = following
        self.state = state
        self._strategy = strategy
        self.lent = LentGradients(self._visible, lambda: self.holds_gradients, self._drop_one)
        """The gradients that ``parameter.grad`` has given to the user."""
        self.holds_gradients = False
        """Whether a backward pass has begun since the last update."""
        # Whether no gradient has arrived since the last update: autograd.grad begins a pass, too.
        self._is_empty = True
        self.ends_window = True
        """Whether the next backward pass, or the last one, ends its window."""
        # The norm including the loss scale, where it was computed, and on the host, where it was read.
        self._raw: Tensor | None = None
        self._host: Tensor | None = None
        # The last norm of all gradients that a caller got.
        self._given_norm: Tensor | None = None
        self._first = True
        self._stage = stage_of(self)
        self._trained = [piece.parameter for group in state.groups.groups for piece in group]
        self._use = UseOverRanks(state.world, len(self._trained))
        self._running = False
        self._running_outside = False
        self._reduced = False
        # Whether an update has used gradients that user code has not dropped, and the parameters that it has dropped.
        self._used_up = False
        self._dropped: set[int] = set()
        self._orders: list[Pending] = []
        self._prologue = self.zero.backward_prologue
        self.zero.backward_prologue = self._begin_outside
        self.zero.register_grad_acc_post_hook(self._end_outside)

    def sync(self, enabled: bool) -> None:
        """Set whether the next backward pass ends its window. Only then does the engine complete its reductions."""
        if enabled is not self.ends_window:
            self.ends_window = enabled
            self.engine.set_gradient_accumulation_boundary(enabled)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add the gradients of a loss, which the engine scales in fp16 and reduces. Collective."""
        with engine_runs:
            unused = frozenset() if self._use.counts_pass() else self._stage.unused()
            self._begin()
            self._running = True
            try:
                with kept_counts(self.engine.module) if options.get("retain_graph") else nullcontext():
                    self.engine.backward(loss, scale_wrt_gas=False, **options)
            finally:
                self._running = self._is_empty = False
            if unused:
                for parameter in self._trained:
                    if id(parameter) in unused:
                        self._stage.mark(parameter, False)
            self._end()

    def reduce(self) -> None:
        """End the window if no backward pass has. Collective."""
        if not self._reduced:
            self._check_dropped()
            with engine_runs:
                self._close()

    def _check_dropped(self) -> None:
        """Refuse an update with gradients that the last one has used, which torch's optimizers would apply again."""
        if self._used_up and len(self._dropped) < len(self.state.groups.trained):
            raise LoopError(
                "an update was requested while the gradients of the last one had not been dropped, and DeepSpeed's "
                "engine has used them up, so it can neither apply them again nor add to them: call "
                "optimizer.zero_grad() after each update."
            )

    def _begin(self) -> None:
        self._take_back()
        # Before the pass, which may fail after it has added some gradients.
        self.holds_gradients = True
        # The engine counts backward passes by forward passes: without this, the second pass through one forward pass,
        # or after two, would replace the gradients of the first.
        self.zero.clear_backward_seen_flag()
        # A pass that has failed was never left.
        self.zero.exit_backward()
        self._running_outside = False
        self._forget_norm()
        if self._reduced:
            self._reduced = False
            self._stage.reopen()
        self._stage.begin_pass()
        self._send_order()
        self._prologue()

    def _send_order(self) -> None:
        """Begin to compare the order of layers over the ranks, unless the flags of the step do. Collective."""
        world, gathering = self.state.world, self.state.gathering
        if gathering is None or world.size == 1 or not self.ends_window or gathering.order.is_sent:
            return
        self._orders.append(world.control_reduce(gathering.order.take()))

    def _check_order(self) -> None:
        """Check that the ranks have run the same layers, before their update. Collective."""
        if self.state.gathering is not None:
            self.state.gathering.order.is_sent = False
        while self._orders:
            mark, squared = self._orders.pop(0).wait()
            RunOrder.check(self.state.world, mark, squared)

    def _end(self) -> None:
        # Parameters unused in a micro-batch have stale or missing gradients, which the update would apply.
        if self._first:
            self._first = False
            self._stage.clear_unused()
        if self.ends_window:
            self._stage.complete()
            self._reduced = True

    def _begin_outside(self) -> None:
        """Note a backward pass that was not started here: of another module's loss, which depends on this module."""
        # Called once for each forward pass. The second of two could clear gradients that the first has added.
        if self._running or self._running_outside:
            # The engine enters a pass next, once for each forward pass, and leaves it once.
            self.zero.exit_backward()
        else:
            self._begin()
            self._running_outside = True

    def arrives(self) -> None:
        """Note that a gradient arrives, which may be the first sign of a pass that user code has started itself."""
        self._is_empty = False
        if not (self._running or self._running_outside):
            # What the engine does where a pass begins at the output of a forward pass.
            for name in (*self.engine.engine_timers.backward_timers, *self.engine.engine_timers.backward_inner_timers):
                self.engine.timers(name).start()
            self._begin_outside()
            self.zero.enter_backward()
            self.zero.queue_post_backward_callback()
            self.zero.set_gradient_accumulation_boundary(self.engine.is_gradient_accumulation_boundary())

    def _end_outside(self) -> None:
        if self._running_outside:
            self._running_outside = False
            self._is_empty = self._is_empty and len(self._stage.unused()) == len(self.state.groups.trained)
            self._end()

    # ---- the gradient of one parameter ----------------------------------------------------------------------------

    def full(self, parameter: Any) -> Tensor | None:
        """Return the full gradient of a parameter, gathered; None if there is none. Collective.

        It is available between a backward pass and the update. A parameter unused in the window has a gradient of zero.
        """
        if id(parameter) not in self.state.groups.trained or not self.holds_gradients:
            return None
        if parameter in self.lent:
            return self.lent.get(parameter)
        with engine_runs:
            if not self.ends_window:
                self._close()
            from deepspeed.utils import safe_get_full_grad

            gradient = safe_get_full_grad(parameter)
        return None if gradient is None else self.unscaled(gradient)

    def _visible(self, parameter: nn.Parameter) -> Tensor | None:
        if self._running or self._running_outside:
            return None
        if self._has_used_up(parameter):
            raise LoopError(
                "parameter.grad was read after an update, in which DeepSpeed's engine has used the gradients up: read "
                "it before, in a Trainer in on_before_optimizer_step and in a Fabric before optimizer.step()."
            )
        gradient = self.full(parameter)
        # A parameter that this rank has not used may have a gradient from another one.
        unused = gradient is not None and id(parameter) in self._stage.unused() and not gradient.any()
        return None if unused else gradient

    def _has_used_up(self, parameter: nn.Parameter) -> bool:
        return self._used_up and id(parameter) in self.state.groups.trained and id(parameter) not in self._dropped

    def _drop_one(self, parameter: nn.Parameter, to_zero: bool) -> None:
        if self._has_used_up(parameter):
            self._dropped.add(id(parameter))
            if to_zero:
                # It takes part in the next update, whether a pass uses it or not.
                self._stage.mark(parameter, True)

    def _replace(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if id(parameter) not in self.state.groups.trained:
            return
        self._stage.mark(parameter, gradient is not None)
        if gradient is None:
            gradient = torch.zeros(full_shape(parameter), device=self.state.world.device)
        scale = self._scale()
        self._stage.write(parameter, gradient.float() if scale == 1.0 else gradient.float() * scale)

    def _take_back(self) -> None:
        if not len(self.lent):
            return
        lent = self.lent.take()
        with engine_runs:
            if self._is_empty:
                # Without a backward pass each rank may have set one of its own, such as that of its own loss.
                lent = [(parameter, self._averaged(gradient)) for parameter, gradient in lent]
                self._is_empty = False
            if not self._reduced:
                # Gradients that were set, with none read, within a window: the engine has a place for them at its end.
                self._close()
            with torch.no_grad():
                for parameter, gradient in lent:
                    self._replace(parameter, gradient)
        self._forget_norm()

    def _averaged(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.state.world.all_reduce(gradient.detach().clone(), "mean")

    def _close(self) -> None:
        """End the window here: reduce what was added up so far. Later passes add to it. Collective."""
        self.sync(True)
        self._begin()
        self._stage.reduce()
        self._end()

    # ---- all gradients --------------------------------------------------------------------------------------------

    def total_norm(self) -> Tensor:
        """Return the norm of all gradients, a 0-d tensor; infinite if it is not finite. Collective."""
        self._take_back()
        if self._raw is None:
            self._raw = torch.as_tensor(self._stage.raw_norm(), dtype=torch.float32)
        return self._without_scale(self._raw)

    def _without_scale(self, raw: Tensor) -> Tensor:
        norm = raw / self._scale()
        # DeepSpeed writes -1 for one that is not finite.
        return torch.where((norm >= 0) & norm.isfinite(), norm, torch.full_like(norm, math.inf))

    def known_norm(self) -> Tensor | None:
        """Return the norm including the loss scale, on the host if it was read, else None if it was not computed."""
        return self._raw if self._host is None else self._host

    def _forget_norm(self) -> None:
        self._raw = self._host = None

    def norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of these parameters; infinite if not finite. Collective.

        Raises:
            ConfigurationError: ``norm_type`` is not 2 for all parameters; the engine computes only the L2 norm.
        """
        chosen = self._of_engine(parameters)
        if len(chosen) < len(self._trained):
            gradients = [gradient for each in chosen if (gradient := self.lent.get(each)) is not None]
            norm = torch.nn.utils.get_total_norm(gradients, norm_type) if gradients else torch.zeros(())
            return norm.to(self.engine.device)
        if norm_type != 2.0:
            raise ConfigurationError(
                f"norm_type={norm_type} is not possible under strategy={self._strategy!r}, whose engine computes the "
                "L2 norm: use 2.0, or strategy='ddp'."
            )
        self._given_norm = self.total_norm()
        return self._given_norm

    def _of_engine(self, parameters: Iterable[Any]) -> Sequence[Any]:
        return list({id(each): each for each in parameters if id(each) in self.state.groups.trained}.values())

    def are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the norm of all gradients is finite. The next step does not read it from the device again.
        Collective."""
        self.total_norm()
        assert self._raw is not None
        self._host = self._raw.cpu()
        return math.isfinite(self._without_scale(self._host).item())

    def scale(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply all gradients, whatever ``parameters`` are: in stage 1 in bf16 at once, else in the next step."""
        self._take_back()
        self._stage.scale(factor)

    def scale_norm(self, factor: float | Tensor) -> None:
        """Record that the gradients themselves were multiplied, and scale the cached norm with them."""
        if self._raw is not None:
            self._raw = self._raw * factor
        if self._host is not None:
            self._host = self._host * factor

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Clip the gradients of these parameters; of all of them by their own norm in the engine's next step.

        In stage 1 in bf16, and for some of the parameters, the gradients are clipped at once.
        """
        chosen = self._of_engine(parameters)
        if len(chosen) == len(self._trained) and norm is self._given_norm:
            self._take_back()
            self._stage.clip(max_norm)
            return
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # The engine leaves out an update whose gradients are not finite.
        factor = torch.where(norm.isfinite(), factor, torch.ones_like(factor))
        if len(chosen) == len(self._trained):
            self.scale(chosen, factor.item())
            return
        for parameter in chosen:
            if (gradient := self.lent.get(parameter)) is not None:
                self.lent.set(parameter, gradient * factor.to(gradient))

    def clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Raise, as the engine clips by norm only.

        Raises:
            ConfigurationError: always.
        """
        raise no_clipping_by_value(self._strategy)

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Divide the loss scale out of a gradient."""
        scale = self._scale()
        return gradient if scale == 1.0 else gradient / scale

    def step(self) -> bool:
        """Update the weights; return whether the update was applied. Collective."""
        self._check_dropped()
        self._check_order()
        self.follow.before()
        # The user's schedulers change the groups of the user's optimizer, which the engine does not read.
        self.follow()
        self._take_back()
        self.state.synchronize()
        unused = self._stage.unused()
        self.state.leave_out(unused, self._unused_by_all(unused))
        self._stage.begin_update()
        with engine_runs:
            self.follow.check_frozen()
            self.engine.step()
        if self.state.lent is not None:
            self.state.lent.forget()
        self._begin_window()
        self._used_up = True
        self._dropped = set(unused)
        self.follow.after()
        # False if the gradients have overflowed under the engine's own loss scale.
        applied: bool = self.engine.was_step_applied()
        return applied

    def _unused_by_all(self, unused: Set[int]) -> Set[int] | None:
        missing = [number for number, one in enumerate(self._trained) if id(one) in unused] if unused else []
        found = self._use.unused(missing)
        return None if found is None else {id(self._trained[number]) for number in found}

    def drop(self) -> None:
        """Drop gradients that no update has used."""
        self.lent.forget()
        self._used_up = False
        if self.holds_gradients:
            with engine_runs:
                self._stage.drop()
            self._begin_window()

    def _begin_window(self) -> None:
        self._stage.begin_window()
        self._forget_norm()
        self.holds_gradients = self._reduced = False
        self._first = self._is_empty = True

    def _scale(self) -> float:
        return float(getattr(self.zero, "loss_scale", 1.0))


@contextmanager
def kept_counts(module: nn.Module) -> Iterator[None]:
    """Restore the counts by which stage 3 gathers parameters in a backward pass, for another pass through the graph."""
    counts = [(part, {name: vars(part)[name] for name in COUNTS if name in vars(part)}) for part in module.modules()]
    yield
    for part, found in counts:
        for name, count in found.items():
            setattr(part, name, count)


# ---- windows that are repeated when a rank runs out of memory -------------------------------------------------------


class LateUpdate(EngineUpdate):
    """Keeps gradients on each rank until ``reduce``: backward passes contain no collective.

    Every rank adds up the full gradients of a window, and DeepSpeed reduces them once all ranks have agreed to update.
    So stage 2 stores full gradients until then, as stage 1 does.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.engine.enable_backward_allreduce = False
        self._stage.keep_gradients()
        super().sync(False)

    def sync(self, enabled: bool) -> None:
        """Do nothing: windows end in ``reduce``."""

    def reduce(self) -> None:
        """Average the gradients of the window over all ranks. Collective."""
        self.holds_gradients = True
        super().sync(True)
        with engine_runs:
            self._stage.reduce()

    def _close(self) -> None:
        raise ConfigurationError(
            "parameter.grad was read before the last backward pass of a window that can be repeated when memory is "
            "short, where each rank has gradients of its own: read it in on_before_optimizer_step, or leave "
            "recovery from shortage of memory out."
        )

    def _begin_window(self) -> None:
        super()._begin_window()
        super().sync(False)


class EngineRecovery(Recovery):
    """Repeats the step of the engine's optimizer, before and after which the engine communicates."""

    def __init__(self, update: LateUpdate) -> None:
        self._update = update

    def update(self, optimizer: Optimizer, step: Callable[[], bool], repeat: Repeat) -> bool:
        """Apply an update; repeat the hooks and the step of the engine's optimizer if memory is short. Collective."""
        inner, follow = self._update.zero.optimizer, self._update.follow
        step_once = inner.step

        def step_or_repeat(*args: Any, **options: Any) -> Any:
            return repeat(inner, partial(step_once, *args, **options))

        with ExitStack() as patches:
            patch(patches, inner, "step", step_or_repeat)
            patch(patches, follow, "before", partial(repeat, inner, follow.before))
            return step()
