"""Adapters of peft in models: whether there are any, and whether they have their initial values.

peft is imported only where one of its models exists already.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ..core.errors import ConfigurationError


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


def check_adapters_have_data(module: nn.Module, lacking: Collection[int]) -> None:
    """Refuse adapters without data, whose layers would draw initial values of their own.

    peft moves an adapter to the device of its layer. On the meta device its initial values are lost, and neither
    transformers nor ``reset_parameters`` gives them back: ``lora_B``, which is zero at the start, would be random.

    Args:
        module: a module with adapters or without.
        lacking: the ``id`` of each tensor without data.

    Raises:
        ConfigurationError: a tensor of an adapter is in ``lacking``.
    """
    for path, layer in module.named_modules():
        for kind in getattr(layer, "adapter_layer_names", ()) if isinstance(layer, _layer_classes()) else ():
            held = getattr(layer, kind, None)
            for adapter, part in held.items() if isinstance(held, nn.ModuleDict | nn.ParameterDict) else ():
                if any(id(one) in lacking for one in ([part] if isinstance(part, Tensor) else part.parameters())):
                    raise ConfigurationError(
                        f"the adapter {adapter!r} of {path} is on the meta device, where the initial values that peft "
                        "gave it are lost: build the model without torch.device('meta')."
                    )
