"""``WindowTraining``: the part of a Fabric that trains on accumulation windows which the user's loop passes as a whole.

Most strategies run the micro-batches one after another. One with ``Strategy.window_passes``, such as a pipeline, runs
them together. The weights of all micro-batches are known at the start, where the ranks add them up in one small
reduction; it also shows whether they have the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError, DesyncError, is_count
from ..core.wording import counted
from ..parallel.fresh_batches import fresh
from ..parallel.sync_batch_norm import is_collective
from ..window.passes import Passes, ZeroFiller
from .collectives import Ranks, broadcast
from .engine import Engine
from .gradient_window import GradientWindow
from .prepared import Prepared
from .training import Training
from .window_rules import check_micro_batches, check_part, loss_of, weights_in

Step = Callable[[Any], Any]


class WindowTraining:
    """Runs the forward and backward passes of whole accumulation windows."""

    def __init__(self, ranks: Ranks, prepared: Prepared, training: Training) -> None:
        self._ranks = ranks
        self._prepared = prepared
        self._training = training

    def windows(self, loader: Iterable[Any], size: int | None) -> Generator[list[Any], None, None]:
        """Yield the micro-batches of a loader in lists; see ``Fabric.windows``."""
        if size is not None and not is_count(size, 1):
            raise ConfigurationError(
                f"windows(size={size!r}): the number of micro-batches in a window is a whole number of at least 1."
            )
        return self._windows(loader, size)

    def _windows(self, loader: Iterable[Any], size: int | None) -> Generator[list[Any], None, None]:
        reading, window, count, wanted = self._prepared.reading, list[Any](), 0, 0
        before = len(reading.loaders)
        for batch in loader:
            if not count:
                wanted = self._training.coming_size if size is None else size
            count += 1
            if not any(one.filler for one in reading.loaders[before:]):
                window.append(batch)
            del batch
            if count == wanted:
                yield window
                window, count = [], 0
        if count:
            yield window

    def forward_backward(
        self,
        step: Step,
        micro_batches: Iterable[Any],
        weights: Iterable[float | Tensor] | None,
        model: nn.Module | None,
    ) -> Tensor:
        """Compute the gradients of a window; ``Fabric.forward_backward`` has the arguments. Collective."""
        prepared, training = self._prepared, self._training
        if training.current is not None and training.current.inside:
            raise ConfigurationError(
                "forward_backward was called inside accumulate or another step of forward_backward: call it outside, "
                "with all micro-batches of the window."
            )
        batches = check_micro_batches(step, micro_batches)
        shares = self._shares(len(batches), weights)
        engines, window = training.together([] if model is None else [model], "forward_backward")
        engine = prepared.engine_for_backward(model)
        is_even = window.enter_whole(shares)
        with training.micro_batch(engines, window):
            if prepared.strategy.window_passes is not None:
                if not is_even:
                    self._counts(len(batches))
                return self._run_together(self._only(engine), window, step, batches, shares)
            return self._run_in_turn(engines, engine, window, step, batches, shares, is_even)

    def _shares(self, count: int, weights: Iterable[float | Tensor] | None) -> list[float]:
        if self._training.parts > 1 and weights is None:
            check_part(self._training.parts, self._prepared.strategy.part, None, "forward_backward(weights=...)")
        shares = [1.0] * count if weights is None else weights_in(weights)
        if len(shares) != count:
            raise ConfigurationError(
                f"forward_backward was given {counted(count, 'micro-batch')} and {counted(len(shares), 'weight')}: "
                "give one for each."
            )
        return shares

    # ---- micro-batches in turn ------------------------------------------------------------------------------------

    def _run_in_turn(
        self,
        engines: list[Engine],
        engine: Engine | None,
        window: GradientWindow,
        step: Step,
        batches: list[Any],
        shares: list[float],
        is_even: bool,
    ) -> Tensor:
        count = len(batches)
        strategy = self._prepared.strategy if engine is None else engine.strategy
        if not is_even:
            batches = self._filled(engines, engine, batches)

        def begin_pass(is_last: bool) -> None:
            window.continue_whole(is_last)
            for each in engines:
                each.begin_micro_batch(window)

        passes = Passes(strategy, self._prepared.scaler, sync=begin_pass)
        passes.filler, passes.mean_weight = ZeroFiller(), window.mean_weight
        turns = _InTurn(passes, lambda batch: self._checked(step(fresh(batch))), batches, shares)
        passes.run(len(batches), turns)
        if not batches and not is_even:
            # The other ranks reduce gradients in their last backward passes.
            self._only(engine).strategy.zero_backward()
        losses = turns.losses[:count]
        return torch.stack(losses) if losses else torch.zeros(0, device=self._ranks.world.device)

    def _checked(self, output: Any) -> Tensor:
        loss, training = loss_of(output), self._training
        if training.parts > 1:
            check_part(training.parts, self._prepared.strategy.part, 1.0, "weights=")
        return loss

    def _filled(self, engines: Sequence[Engine], engine: Engine | None, batches: list[Any]) -> list[Any]:
        """Return as many micro-batches as the rank with the most has, where passes contain collectives. Collective."""
        counts, own, traits = self._counts(len(batches)), len(batches), self._prepared.strategy.traits
        together = traits.forward_has_collectives or traits.backward_has_collectives
        if not together and not any(is_collective(part) for each in engines for part in each.module.modules()):
            if 0 in counts:
                # Ranks without a micro-batch join the reductions of this module.
                self._only(engine)
            return batches
        spare = batches[-1:]
        if 0 in counts:
            source = next(rank for rank, count in enumerate(counts) if count)
            sent = broadcast(self._ranks.world, spare[0] if self._ranks.world.rank == source else None, source)
            spare = spare or [sent]
        return batches + spare * (max(counts) - own)

    def _counts(self, count: int) -> list[int]:
        """Return the numbers of micro-batches of all ranks. Collective.

        Raises:
            DesyncError: on all ranks; ranks that read the same data have different ones.
        """
        world = self._ranks.world
        counts = world.all_gather_object(count)
        copies = world.size // world.data_size
        for first in range(0, world.size, copies):
            found = counts[first : first + copies]
            if len(set(found)) > 1:
                raise DesyncError(
                    f"forward_backward was given {', '.join(map(str, found))} micro-batches on ranks {first} to "
                    f"{first + copies - 1}, which work on the same data: give them the same, as loaders of "
                    "fabric.setup_dataloaders do."
                )
        return counts

    # ---- micro-batches together -----------------------------------------------------------------------------------

    def _only(self, engine: Engine | None) -> Engine:
        if engine is None:
            raise ConfigurationError(
                f"strategy={self._prepared.strategy.name!r} with several modules: call forward_backward(..., "
                "model=...) to say which one the step trains, or set up one module that holds them."
            )
        return engine

    def _run_together(
        self, engine: Engine, window: GradientWindow, step: Step, batches: list[Any], shares: list[float]
    ) -> Tensor:
        strategy, joint = engine.strategy, engine.strategy.window_passes
        assert joint is not None
        losses = torch.zeros(len(batches), device=self._ranks.world.device)

        def loss_at(position: int, output: Any) -> Tensor:
            loss = self._checked(output)
            losses[position] = loss.detach()
            return loss

        def step_at(position: int) -> Any:
            return step(fresh(batches[position]))

        strategy.trainability_changed(engine.module)
        # Before the passes, which may replace parameters while they run.
        parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        with _set_aside(parameters), engine.running_window():
            joint.begin()
            if batches:
                passes = Passes(strategy, self._prepared.scaler)
                passes.mean_weight = window.mean_weight
                passes.run_together(joint, window.steps, batches, shares, step_at, loss_at)
                losses, _ = joint.share(losses)
            strategy.reduce_gradients(parameters)
        return losses


class _InTurn:
    """The passes of a window that are run one after another: this rank's micro-batches, then fillers."""

    def __init__(
        self, passes: Passes, loss_of: Callable[[Any], Tensor], batches: Sequence[Any], weights: Sequence[float]
    ) -> None:
        self._passes = passes
        self._loss_of = loss_of
        self._batches = batches
        self._weights = weights
        self.losses: list[Tensor] = []

    def _context(self, position: int) -> AbstractContextManager[Any]:
        return nullcontext() if position < len(self._weights) else self._passes.strategy.filling()

    def forward(self, position: int) -> Tensor:
        """Compute the loss of a micro-batch."""
        with self._context(position):
            loss = self._loss_of(self._batches[position])
        self.losses.append(loss.detach().float().reshape(()))
        return loss

    def begin_backward(self) -> None:
        """Do nothing: the weights are known, and gradients are added to those that exist."""

    def backward(self, loss: Tensor | None, position: int, is_last: bool) -> None:
        """Run the backward pass of a micro-batch, that of a filler with the weight 0."""
        with self._context(position):
            self._passes.backward(loss, self._weights[position] if position < len(self._weights) else 0.0, is_last)


@contextmanager
def _set_aside(parameters: Sequence[Tensor]) -> Generator[None, None, None]:
    """Add the gradients computed inside to those from before, which were reduced already."""
    before = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
