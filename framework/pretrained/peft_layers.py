"""Whether a model has adapters of peft, which is imported only where one of its models exists already."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def has_adapters(root: nn.Module, model: nn.Module) -> bool:
    """Whether peft changes what a model computes.

    Args:
        root: a module that contains the model. Adapters that add inputs have no layers in the model, but are in the
            ``peft.PeftModel`` around it.
        model: the model.
    """
    library, layers = sys.modules.get("peft.peft_model"), _layer_classes()
    if library is not None:
        # Around a merged model there may still be one whose layers are gone.
        around = (part for part in root.modules() if isinstance(part, library.PeftModel) and _adds_inputs(part))
        if any(inner is model for part in around for inner in part.modules()):
            return True
    return any(isinstance(part, layers) for part in model.modules())


def _adds_inputs(model: Any) -> bool:
    return any(one.is_prompt_learning or one.is_adaption_prompt for one in model.peft_config.values())


def _layer_classes() -> tuple[type, ...]:
    homes = {"peft.tuners.tuners_utils": "BaseTunerLayer", "peft.utils.other": "AuxiliaryTrainingWrapper"}
    return tuple(getattr(sys.modules[home], name) for home, name in homes.items() if home in sys.modules)
