"""``GradientWindow``: the micro-batches of one optimizer step in a user's own loop, and the exact mean over them.

Micro-batch i of rank r has the loss l_ri and the weight w_ri. Each loss is multiplied by its weight, strategies average
gradients over ranks, and at the window's end the result is divided by the mean over ranks of the window's weights. That
is the gradient of the weighted mean over all micro-batches of all ranks, for any number of them. The division is last
because a loop that calls ``backward`` batch by batch cannot know the total before; one small reduction computes it,
which is launched before the last backward and read after it. Where all micro-batches of a window are known when it
begins, it is read first, and each loss is multiplied by its weight divided by the mean.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError
from ..distributed.control import Triggers
from ..distributed.world import World


class GradientWindow:
    """Counts micro-batches and adds up their weights for one set of modules.

    Attributes:
        sync: Whether the current micro-batch ends its window.
        inside: Whether a micro-batch is in progress.
        steps: The number of windows that have ended, each counted when the next one begins.

    Args:
        world: the ranks.
        schedule: micro-batches per window.
        scaled: whether a loss scaler multiplies the losses.
    """

    def __init__(self, world: World, schedule: AccumulationSchedule, scaled: bool) -> None:
        self.sync = True
        self.inside = False
        self.steps = 0
        self._schedule = schedule
        self._size = world.size
        self._control = Triggers(world)
        if world.size > 1:
            # The control group is created here, by all ranks at the same point: a rank that calls no backward would
            # create it later than the others.
            _ = world.control
        self._scaled = scaled
        # Powers of two that weights are divided by: in the next window to be reduced, and in the finished window.
        self._weight_divisor = self._window_divisor = 1.0
        self._begin()

    def _begin(self) -> None:
        self._count = 0
        self._total = 0.0
        self._weight: float | None = None
        self._backwards = 0
        self._launched = False
        self._mean: float | None = None
        self._taken: set[Hashable] = set()
        self._is_used = False
        """Whether an optimizer has used the gradients of this window, or dropped them after its end."""
        self._closed = False
        self._is_whole = False
        self._is_even = True
        self._adds = False
        """Whether no optimizer has used or dropped the gradients of a window before, to which this one adds."""

    def set_schedule(self, schedule: AccumulationSchedule) -> None:
        """Set the number of micro-batches per window, from the next micro-batch on."""
        self._schedule = schedule

    # ---- the context ----------------------------------------------------------------------------------------------

    def enter(self, epoch: int, end_of_data: bool) -> None:
        """Begin a micro-batch. It ends the window if the window is full, or at the end of the data."""
        self._renew()
        self.inside = True
        self._count += 1
        self._weight = None
        self.sync = end_of_data or self._count >= self._schedule(epoch, self.steps)

    def _renew(self) -> None:
        """Begin another window if this one has ended."""
        if self._closed:
            if self._launched and self._mean is None:
                # No optimizer stepped, but the reduction was launched: all ranks must read it before the next one.
                self._read()
            adds = not self._is_used and (self._adds or bool(self._mean))
            self.steps += 1
            self._begin()
            self._adds = adds

    def enter_whole(self, weights: Sequence[float]) -> bool:
        """Begin a window of which all micro-batches are known, by their weights. Collective.

        Returns:
            Whether all ranks have the same number of micro-batches.

        Raises:
            ConfigurationError: a weight is invalid, or a window of ``enter`` has not ended.
            DesyncError: on all ranks; they are at different windows.
        """
        for weight in weights:
            check_weight(weight)
        if self._count and not self._closed:
            raise ConfigurationError(
                "forward_backward was called before a window of accumulate has ended, whose gradients are not reduced: "
                "finish it, or pass all of its micro-batches to forward_backward."
            )
        if self._closed and self._backwards and not self._is_used:
            raise ConfigurationError(
                "forward_backward was called after a window of accumulate whose gradients were not used: call "
                "optimizer.step() or zero_grad() first, or pass all of its micro-batches to forward_backward."
            )
        self._renew()
        self._is_whole, self._count, self._total = True, len(weights), math.fsum(weights)
        self._read()
        self.continue_whole(True)
        return self._is_even

    def continue_whole(self, is_last: bool) -> None:
        """Begin a micro-batch of a window that is known as a whole; gradients are reduced in the last one."""
        self.inside, self.sync = True, is_last

    @property
    def mean_weight(self) -> float:
        """The weight, averaged over ranks, of a window that is known as a whole."""
        return self._mean or 0.0

    def leave(self) -> None:
        """End a micro-batch, and a window that is known as a whole also where a step has failed."""
        self.inside = False
        self.sync = self.sync or self._is_whole
        self._closed = self.sync

    @property
    def is_whole(self) -> bool:
        """Whether all micro-batches of the window were known when it began."""
        return self._is_whole

    @property
    def coming(self) -> int:
        """The number of windows before the one that the next micro-batch is in."""
        return self.steps + self._closed

    @property
    def is_closed(self) -> bool:
        """Whether the micro-batch that ends the window has ended."""
        return self._closed

    # ---- gradients ------------------------------------------------------------------------------------------------

    def factor(self, weight: float) -> float:
        """Record the weight of this micro-batch and return the factor of its loss. Collective at the window's end.

        Raises:
            ConfigurationError: the weight is invalid, or differs from an earlier one for the same micro-batch.
        """
        check_weight(weight)
        if self._weight is None:
            self._weight = weight
            self._total += weight
        elif weight != self._weight:
            raise ConfigurationError(
                f"backward was given the weights {self._weight:g} and {weight:g} for one micro-batch: the weight is "
                "that of the micro-batch. Give the same one, or add the losses up and call backward once."
            )
        self._backwards += 1
        if self.sync and self._size > 1:
            self._launch()
        return weight / self._weight_divisor

    @property
    def lacks_backward(self) -> bool:
        """Whether, at the window's end, this rank called no backward in the last micro-batch."""
        return self._weight is None and not self._launched and not self._is_whole

    def take_factor(self, key: Hashable) -> float | None:
        """Return the factor that the gradients of ``key`` are still to be multiplied by. Collective.

        It is 0 if the sum of all weights is 0, and None if it was returned for ``key`` before.

        Args:
            key: identifies the optimizer.

        Raises:
            DesyncError: on all ranks; they are at different windows.
        """
        if key in self._taken:
            return None
        self._taken.add(key)
        self._is_used = True
        mean = self._read()
        if self._is_whole:
            return 0.0 if self.is_empty else 1.0
        return self._window_divisor / mean if mean else 0.0

    @property
    def is_empty(self) -> bool:
        """Whether the sum of all weights is 0, so that there is no update. Valid after ``take_factor``."""
        return self._mean == 0.0 and not (self._is_whole and self._adds)

    def retains(self, key: Hashable) -> bool:
        """Return True if ``zero_grad`` must do nothing.

        Before the window's last backward pass ``zero_grad`` keeps the accumulated gradients: many loops call it in each
        micro-batch. After that pass it discards the update.

        Args:
            key: identifies the optimizer.
        """
        self.check_step("optimizer.zero_grad()")
        if self._closed:
            self._is_used = True
            return False
        if key in self._taken or not self._backwards:
            return False
        return not (self.sync and self._weight is not None)

    def waits(self) -> bool:
        """Return whether gradients are still being accumulated, so that an optimizer does nothing."""
        self.check_step("an optimizer's step() or clipping")
        return not self.sync

    def check_step(self, verb: str) -> None:
        """Refuse what changes weights or gradients in a step of ``forward_backward``.

        Raises:
            ConfigurationError: such a step runs.
        """
        if self.inside and self._is_whole:
            raise ConfigurationError(
                f"{verb} was called in the step of forward_backward, which computes the loss of one micro-batch of "
                "several: call it after forward_backward."
            )

    def _launch(self) -> None:
        if not self._launched:
            self._launched = True
            self._control.launch(self.steps, self._total, self._count)

    def _read(self) -> float:
        if self._mean is None:
            if self._size == 1:
                self._mean = self._total
            else:
                self._launch()
                agreement = self._control.read()
                self._mean = agreement.total_weight / self._size
                self._is_even = agreement.batches is not None
            self._window_divisor = self._weight_divisor
            if self._scaled and self._mean:
                # Losses with large weights would leave fp16's range, so weights are divided by about their mean. A
                # power of two loses no digit, and the last window's mean is the same on all ranks.
                self._weight_divisor = 2.0 ** round(math.log2(self._mean))
        return self._mean

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, float]:
        """Return the number of windows and the divisor of weights."""
        return {"steps": self.coming, "unit": self._weight_divisor}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what ``state_dict`` returned. A window in progress is discarded."""
        self._begin()
        self.steps, self._weight_divisor = int(state["steps"]), float(state["unit"])


def check_weight(weight: float) -> None:
    """Check the weight of a micro-batch.

    Raises:
        ConfigurationError: it is negative or not finite.
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigurationError(
            f"weight={weight!r} must be a finite number of at least 0: how many items the micro-batch's mean loss is "
            "over."
        )
