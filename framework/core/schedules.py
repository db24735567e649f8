"""Learning-rate schedules by name: a linear warm-up from 0, and then a factor of the learning rate.

    constant        1
    linear          from 1 to 0
    cosine          from 1 to 0 by half a period of a cosine: Loshchilov and Hutter 2017, "SGDR"
    inverse_sqrt    1 over the square root of the step, scaled to 1 at the end of the warm-up: Vaswani et al. 2017,
                    "Attention Is All You Need"
    wsd             1, and from 1 to 0 by a cosine over the last steps: Hu et al. 2024, "MiniCPM"

The factors are those of the functions of transformers, such as ``get_cosine_schedule_with_warmup``.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .errors import ConfigurationError, unknown

SCHEDULES = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")
OPTIONS = ("warmup", "decay")
_ENDLESS = ("constant", "inverse_sqrt")
# Of inverse_sqrt without warm-up, as in transformers.
_TIMESCALE = 10_000


class _Factor:
    """The factor of the learning rate at a step. Its attributes are part of the scheduler's state."""

    def __init__(self, name: str, steps: int, warmup: int, decay: int) -> None:
        self.name, self.steps, self.warmup, self.decay = name, steps, warmup, decay

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        if self.name == "linear":
            return 1.0 - self._share(step, self.warmup)
        if self.name == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * self._share(step, self.warmup)))
        if self.name == "inverse_sqrt":
            timescale = self.warmup or _TIMESCALE
            return 1.0 / math.sqrt((step + timescale - self.warmup) / timescale)
        if self.name == "wsd" and step >= self.steps - self.decay:
            return 0.5 * (1.0 + math.cos(math.pi * self._share(step, self.steps - self.decay)))
        return 1.0

    def _share(self, step: int, since: int) -> float:
        """Return the share of the steps between ``since`` and the end that are done."""
        return min(1.0, (step - since) / max(1, self.steps - since))


def named_schedule(name: str, optimizer: Optimizer, steps: float, warmup: float = 0, decay: float = 0.1) -> LambdaLR:
    """Return a scheduler that steps after each optimizer step.

    Args:
        name: one of ``SCHEDULES``.
        optimizer: its learning rates are multiplied by the factors.
        steps: the optimizer steps of the fit; infinite if they are not known.
        warmup: the steps of the warm-up; below 1, their share of all steps.
        decay: of ``"wsd"``, the steps of the decay at the end; below 1, their share of all steps.

    Raises:
        UnknownNameError: there is no such schedule.
        ConfigurationError: the steps are not known, or a number is negative.
    """
    if name not in SCHEDULES:
        raise unknown("lr_scheduler", name, SCHEDULES)
    for option, value in (("warmup", warmup), ("decay", decay)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ConfigurationError(
                f"configure_optimizers: {option}={value!r} must be a number of steps, or a share of them below 1."
            )
    if math.isinf(steps) and (name not in _ENDLESS or 0 < warmup < 1):
        raise ConfigurationError(
            f"configure_optimizers: lr_scheduler={name!r} needs the number of optimizer steps, which is not known: set "
            "max_steps, or max_epochs with data that has a length."
        )

    def counted(value: float) -> int:
        return math.ceil(value * steps) if 0 < value < 1 else int(value)

    whole = 0 if math.isinf(steps) else int(steps)
    return LambdaLR(optimizer, _Factor(name, whole, counted(warmup), counted(decay) if name == "wsd" else 0))
