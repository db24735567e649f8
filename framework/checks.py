"""What is looked at before any process starts: the module, its hooks, the loaders. One sentence for each mistake."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from torch import nn

from .errors import ConfigurationError
from .module import TrainModule
from .steps import is_overridden

_HOOKS = sorted(
    name
    for name, value in vars(TrainModule).items()
    if callable(value) and not name.startswith("_") and name not in ("log", "print", "freeze", "unfreeze")
)
# Names of older frameworks that would silently never be called.
_FORMER = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "train_step": "training_step",
    "val_step": "validation_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
}
_STEPS = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
}


def check_module(module: Any, stage: str) -> None:
    """Refuse what cannot be trained or evaluated.

    Raises:
        ConfigurationError: it is no TrainModule, lacks a step, or has a hook whose name is misspelled.
    """
    if not isinstance(module, TrainModule):
        what = module.__name__ + ", a class" if isinstance(module, type) else f"a {type(module).__name__}"
        hint = "make an object of it" if isinstance(module, type) else (
            "subclass phalanx.TrainModule instead of nn.Module" if isinstance(module, nn.Module) else "hand over the model"
        )  # fmt: skip
        raise ConfigurationError(f"Trainer.{stage} got {what}; it takes a TrainModule: {hint}.")
    if "_run" not in module.__dict__:
        raise ConfigurationError(
            f"{type(module).__name__}.__init__ did not call super().__init__(): do so before anything else."
        )
    _check_hook_names(module)
    needed = _STEPS.get(stage)
    if needed is not None and not is_overridden(needed, module):
        raise ConfigurationError(f"{type(module).__name__} has no {needed}, which Trainer.{stage} calls: define it.")
    if stage == "fit" and not is_overridden("configure_optimizers", module):
        raise ConfigurationError(
            f"{type(module).__name__} has no configure_optimizers, so nothing would be trained: define it."
        )


def _check_hook_names(module: TrainModule) -> None:
    """Find methods that are called like a hook, but not quite."""
    inherited = dir(TrainModule)
    own = [
        name
        for cls in type(module).__mro__
        if cls.__module__.partition(".")[0] != "phalanx" and cls not in (nn.Module, object)
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_") and name not in inherited
    ]
    for name in own:
        meant = _FORMER.get(name)
        if meant is None:
            close = get_close_matches(name, _HOOKS, n=1, cutoff=0.88)
            meant = close[0] if close else None
        if meant is not None and not is_overridden(meant, module):
            raise ConfigurationError(
                f"{type(module).__name__}.{name} is called by nobody. Did you mean {meant!r}? "
                "If it is a helper of yours, give it a name less like a hook's."
            )


def check_clipping_choice(module: TrainModule, clipping: tuple[float | None, str], clips_by_value: bool) -> None:
    """Refuse clipping that the module or the strategy cannot do.

    Raises:
        ConfigurationError: manual optimization with ``gradient_clip_val``, or clipping by value of split gradients.
    """
    value, algorithm = clipping
    if value is None:
        return
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"gradient_clip_val={value} with automatic_optimization = False: call self.clip_gradients(optimizer, "
            f"gradient_clip_val={value}) in training_step before the step, and leave it out of the Trainer."
        )
    if algorithm == "value" and not clips_by_value:
        raise ConfigurationError(
            "gradient_clip_algorithm='value' needs whole gradients, and this strategy splits them: use 'norm'."
        )
