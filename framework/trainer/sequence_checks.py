"""Checks of modules whose sequences ranks share, before any rank starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError
from ..run.overrides import is_overridden

if TYPE_CHECKING:
    from ..api.train_module import TrainModule
    from ..parallel.resources import Resources


def check_sequences(module: TrainModule, stage: str, resources: Resources) -> None:
    """Refuse a module that does not state how its batches are cut, where ranks share sequences.

    Raises:
        ConfigurationError: a hook is missing, or the stage or the kind of optimization is not possible with parts.
    """
    degree = resources.layout.cp
    if degree == 1:
        return
    given, name = f"parallel={{'cp': {degree}}}", type(module).__name__
    if stage == "predict":
        raise ConfigurationError(
            f"{given} with predict: each rank would predict a part of each sequence. Leave cp out of the degrees."
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{given} with automatic_optimization = False: losses of parts are weighted before they are "
            f"differentiated, which {name}.training_step does itself. Use automatic optimization, or leave cp out."
        )
    if not is_overridden("cut_sequences", module):
        raise ConfigurationError(
            f"{given} needs {name}.cut_sequences(batch, part), which returns the part of a batch that a rank computes: "
            "define it, such as `return part(tokens), part(targets), part.positions(tokens)`, or leave cp out."
        )
    if not is_overridden("batch_weight", module):
        raise ConfigurationError(
            f"{given} needs {name}.batch_weight(batch), the number of targets over which the loss of a part is "
            "averaged, as parts may have different numbers of them: define it, or leave cp out."
        )
