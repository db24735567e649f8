"""``WeightAveraging`` and ``EMAWeightAveraging``: an average of the weights over the steps of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError, is_count
from ..framework.state.weight_average import Average, AverageSettings

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule
    from ..framework.core.progress import Progress

Elementwise = Callable[[Tensor, Tensor, Tensor], Tensor]
Listwise = Callable[[Any, Any, Any], Any]


class WeightAveraging(Callback):
    """Keep an average of the weights beside them, validate with it, and leave it in the module at the end of a fit.

    By default all weights that are taken count alike. Override ``should_update`` to say after which steps or epochs
    they are taken. The first time they are copied; until then there is no average, and validation uses the weights.

    The average lives beside the weights as its strategy holds them: each rank averages its own shards, in fp32 or the
    weights' dtype if that is wider, of fp32 masters where there are any. It takes 4 bytes for each trained parameter
    that a rank holds, or masters of, and as much again in the weights' dtype while a validation runs. What is frozen is
    not averaged; once unfrozen it joins at the next epoch's start. Checkpoints hold the live weights as "model" and the
    average in a section "averages".

    Args:
        device: where the average is held; default: where the weights (or their masters) are. Elsewhere every update
            copies the weights there, which waits for the device.
        use_buffers: average buffers of floating dtype too; else the module's own buffers are used.
        avg_fn: ``(average, weights, updates so far) -> new average``, elementwise: tensors may be pieces of parameters.
        multi_avg_fn: the same for lists of tensors, changing the averages in place.
        name: under which checkpoints hold the average.
        evaluate: validate with the average.
        average_at_end: leave the average in the module when ``fit`` ends; else its weights.

    Raises:
        ConfigurationError: both functions are given, or an argument is none of its kind.
    """

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
                raise ConfigurationError(f"{kind}: {function!r} was given as an averaging function: it is none.")
        self.name = name
        self.device = None if device is None else torch.device(device)
        self.use_buffers = use_buffers
        self.evaluate = evaluate
        self.average_at_end = average_at_end
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._average: Average | None = None
        self._progress: Progress

    @property
    def state_key(self) -> str:
        """The callback's class, and the name of its average."""
        return f"{type(self).__qualname__}[{self.name}]"

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to take the weights in after an optimizer step that was applied, or at the end of an epoch.

        One of the arguments is given, counted from 0.
        """
        return step_idx is not None

    def combine(self, averages: list[Tensor], weights: list[Tensor], count: int) -> None:
        """Take weights into averages, in place, that ``count`` updates have made."""
        if self._multi_avg_fn is not None:
            self._multi_avg_fn(averages, weights, torch.tensor(count))
        elif self._avg_fn is not None:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(self._avg_fn(average, weight, torch.tensor(count)))
        else:
            torch._foreach_lerp_(averages, weights, 1.0 / (count + 1))

    @property
    def updates(self) -> int:
        """How often weights were taken in so far, in the fit under way."""
        return 0 if self._average is None else self._average.count

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """Return the module's state dict with averages in it, whole and on the CPU. Collective.

        On rank 0; elsewhere it is empty.

        Raises:
            ConfigurationError: no fit is under way, or there is no average yet.
        """
        if self._average is None or not self._average.count:
            when = "outside a fit" if self._average is None else "before the first update of the average"
            raise ConfigurationError(
                f"averaged_state_dict was called {when}: call it in a hook of the fit, or take the average from a "
                "checkpoint."
            )
        return self._average.whole_state()

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # What there is to keep is the average, which checkpoints hold by themselves.
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
    """Keep an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    See ``WeightAveraging`` for what becomes of it, and for the other arguments.

    Args:
        device: where the average is held; default: where the weights (or their masters) are.
        use_buffers: average buffers of floating dtype too; else the module's own buffers are used.
        decay: how much of the average stays at an update, from 0 to 1, or a function that gives it for the number of
            updates so far.
        update_every_n_steps: update after the first optimizer step and every so many from there; 0 updates at the end
            of each epoch instead.
        update_starting_at_step: the first step after which to update, counted from 0.
        update_starting_at_epoch: the first epoch in which to update, counted from 0.
        warmup: begin with a smaller decay, ``(1 + n) / (10 + n)`` after n updates, until ``decay`` is reached.

    Raises:
        ConfigurationError: an argument breaks its rule.
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
        """Whether to update, by the arguments of the constructor."""
        if (step_idx is None) == bool(self.update_every_n_steps):
            return False
        if self._progress.epoch < (self.update_starting_at_epoch or 0):
            return False
        if step_idx is None:
            return self._progress.global_step > (self.update_starting_at_step or 0)
        return step_idx >= (self.update_starting_at_step or 0) and step_idx % self.update_every_n_steps == 0

    def decay_after(self, count: int) -> float:
        """Return how much of the average stays at the next update, after ``count`` of them."""
        decay = self.decay(count) if callable(self.decay) else self.decay
        return min(decay, (1 + count) / (10 + count)) if self.warmup else decay

    def combine(self, averages: list[Tensor], weights: list[Tensor], count: int) -> None:
        """Move averages towards weights."""
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay_after(count))
