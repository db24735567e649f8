"""``WeightAveraging`` and ``EMAWeightAveraging``: average the weights over the steps of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError, is_count
from ..framework.core.progress import Progress
from ..framework.state.weight_averages import Average, AverageSettings

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

Elementwise = Callable[[Tensor, Tensor, Tensor], Tensor]
Listwise = Callable[[Any, Any, Any], Any]


class WeightAveraging(Callback):
    """Maintain an average of the weights, validate with it, and load it into the module at the end of a fit.

    By default, the average is the arithmetic mean of the weights after each optimizer step. Override ``should_update``
    to select the steps or epochs. The first update copies the weights. Before it there is no average, and validation
    uses the weights.

    - Sharding: each rank averages its own shards of the weights.
    - Dtype: fp32, or the dtype of the weights if that is wider. The average is computed from the fp32 master weights of
      the strategy if there are any.
    - Memory: 4 bytes for each trained parameter of which the rank holds a shard or a master copy, and during validation
      the size of the weights in their own dtype in addition.
    - Frozen parameters are not averaged. A parameter that is unfrozen is added at the start of the next epoch.
    - With a schedule-free optimizer, the weights used for training are averaged.
    - Checkpoints contain the current weights in the section "model" and the average in the section "averages".

    Args:
        device: Device of the average. Default: the device of the weights, or of their master weights. On another
            device, every update copies the weights, which synchronizes with the device of the weights.
        use_buffers: Also average floating-point buffers; otherwise the buffers of the module are used.
        avg_fn: ``(average, weights, number of updates) -> new average``. The function must be elementwise, since
            tensors may be shards of parameters.
        multi_avg_fn: The same for lists of tensors; it changes the averages in place.
        name: Name of the average in checkpoints.
        evaluate: Validate with the average.
        average_at_end: Load the average into the module when ``fit`` ends; otherwise the module has its own weights.

    Raises:
        ConfigurationError: Both functions are given, or an argument has an invalid type or value.
    """

    collective = True

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: Elementwise | None = None,
        multi_avg_fn: Listwise | None = None,
        *,
        name: str = "average",
        evaluate: bool = True,
        average_at_end: bool = True,
    ) -> None:
        given = {"use_buffers": use_buffers, "evaluate": evaluate, "average_at_end": average_at_end}
        kind = type(self).__name__
        for argument, value in given.items():
            if not isinstance(value, bool):
                raise ConfigurationError(f"{kind}({argument}={value!r}): it must be True or False.")
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError(f"{kind} was given avg_fn and multi_avg_fn: leave one of them out.")
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigurationError(f"{kind}(name={name!r}): it must be a name without '/'.")
        for function in (avg_fn, multi_avg_fn):
            if function is not None and not callable(function):
                raise ConfigurationError(f"{kind}: an averaging function must be callable, not {function!r}.")
        self.name = name
        self.device = None if device is None else torch.device(device)
        self.use_buffers = use_buffers
        self.evaluate = evaluate
        self.average_at_end = average_at_end
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._average: Average | None = None
        self._progress = Progress()

    @property
    def state_key(self) -> str:
        """The class name of the callback with the name of its average."""
        return f"{type(self).__qualname__}[{self.name}]"

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update the average after an optimizer step that was applied, or at the end of an epoch.

        Exactly one of the two arguments is given; both count from 0.
        """
        return step_idx is not None

    def combine(self, averages: list[Tensor], weights: list[Tensor], count: int) -> None:
        """Update averages of ``count`` previous updates with weights, in place."""
        if self._multi_avg_fn is not None:
            self._multi_avg_fn(averages, weights, torch.tensor(count))
        elif self._avg_fn is not None:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(self._avg_fn(average, weight, torch.tensor(count)))
        else:
            torch._foreach_lerp_(averages, weights, 1.0 / (count + 1))

    @property
    def updates(self) -> int:
        """Number of updates of the average in the current fit."""
        return 0 if self._average is None else self._average.count

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the module with averaged weights, unsharded and on the CPU. Collective.

        Returns:
            The state dict on rank 0, an empty dict on all other ranks.

        Raises:
            ConfigurationError: No fit is running, or there is no average yet.
        """
        if self._average is None or not self._average.count:
            when = "outside a fit" if self._average is None else "before the first update of the average"
            raise ConfigurationError(
                f"averaged_state_dict was called {when}: call it in a hook of the fit, or load the average from a "
                "checkpoint."
            )
        return self._average.whole_state()

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # Checkpoints save the average in a section of their own, so the callback itself has no state.
        return {}

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        self._progress = trainer.progress
        average = trainer.add_average(self._settings())
        self._average = average if stage == "fit" else None

    def _settings(self) -> AverageSettings:
        return AverageSettings(
            key=self.name,
            should_update=self.should_update,
            combine=self.combine,
            device=self.device,
            use_buffers=self.use_buffers,
            evaluates=self.evaluate,
            stays=self.average_at_end,
        )

    def teardown(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        self._average = None


class EMAWeightAveraging(WeightAveraging):
    """Maintain an exponential moving average (EMA): ``average = decay * average + (1 - decay) * weights``.

    See ``WeightAveraging`` for evaluation, checkpoints, the end of the fit, and the other arguments.

    Args:
        device: Device of the average. Default: the device of the weights, or of their master weights.
        use_buffers: Also average floating-point buffers; otherwise the buffers of the module are used.
        decay: Factor of the average at an update, from 0 to 1, or a function of the number of updates that returns it.
        update_every_n_steps: Number of optimizer steps between updates, starting after the first step. 0: update at the
            end of each epoch instead.
        update_starting_at_step: First step after which to update, counted from 0.
        update_starting_at_epoch: First epoch in which to update, counted from 0.
        warmup: Limit the decay to ``(1 + n) / (10 + n)`` after n updates, so that it increases to ``decay``.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float | Callable[[int], float] = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        *,
        warmup: bool = False,
        name: str = "ema",
        evaluate: bool = True,
        average_at_end: bool = True,
    ) -> None:
        super().__init__(device, use_buffers, name=name, evaluate=evaluate, average_at_end=average_at_end)
        if not callable(decay) and (
            isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1
        ):
            raise ConfigurationError(
                f"EMAWeightAveraging(decay={decay!r}): it must be a number from 0 to 1, or a function of the number of "
                "updates."
            )
        for argument, value in (
            ("update_every_n_steps", update_every_n_steps),
            ("update_starting_at_step", update_starting_at_step or 0),
            ("update_starting_at_epoch", update_starting_at_epoch or 0),
        ):
            if not is_count(value, 0):
                raise ConfigurationError(
                    f"EMAWeightAveraging({argument}={value!r}): it must be a whole number of at least 0."
                )
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self.warmup = warmup

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update the average, as configured by the arguments of the constructor."""
        if (step_idx is None) == bool(self.update_every_n_steps):
            return False
        if self._progress.epoch < (self.update_starting_at_epoch or 0):
            return False
        if step_idx is None:
            return self._progress.global_step > (self.update_starting_at_step or 0)
        return step_idx >= (self.update_starting_at_step or 0) and step_idx % self.update_every_n_steps == 0

    def decay_after(self, count: int) -> float:
        """Return the decay of the next update, after ``count`` updates."""
        decay = self.decay(count) if callable(self.decay) else self.decay
        return min(decay, (1 + count) / (10 + count)) if self.warmup else decay

    def combine(self, averages: list[Tensor], weights: list[Tensor], count: int) -> None:
        """Update the exponential moving averages with weights, in place."""
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay_after(count))
