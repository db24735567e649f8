"""A base of transformers with an adapter added to its weights, from weights that are given by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError
from ..parallel.parameter_names import tied_names


def merged_model(model: Any, adapter: str, weights: dict[str, Tensor]) -> Any:
    """Return the base of a peft model, in which one adapter is merged.

    The model itself is not changed, and may be sharded: a second one is built on the meta device and gets the weights.

    Args:
        model: the peft model.
        adapter: the name of the adapter to merge.
        weights: the full tensors of the model's state by canonical name, on the CPU; they are taken out.

    Raises:
        ConfigurationError: the base is not a model of transformers, a layer with an adapter is tied to another layer,
            or peft cannot merge adapters of this kind.
    """
    from peft import get_peft_model

    _refuse_tied_layers(model)
    base = model.get_base_model()
    if not hasattr(base, "config") or not hasattr(type(base), "_from_config"):
        raise ConfigurationError(
            f"merge=True builds the base again from its config, and {type(base).__name__} is not a model of "
            "transformers: merge it in its own code, from the weights of trainer.export."
        )
    with torch.device("meta"):
        fresh = type(base)._from_config(base.config)
        # With every adapter: the layers of each have names of their own.
        (first, config), *others = model.peft_config.items()
        rebuilt = get_peft_model(fresh, config, adapter_name=first, low_cpu_mem_usage=True)
        for name, other in others:
            rebuilt.add_adapter(name, other, low_cpu_mem_usage=True)
    # Merging changes weights in place, and those of a model on the CPU may be the ones given.
    own = {name: weights.pop(name).clone() for name in rebuilt.state_dict()}
    rebuilt.load_state_dict(own, strict=True, assign=True)
    # Each tied name got a tensor of its own.
    rebuilt.get_base_model().tie_weights()
    if not hasattr(rebuilt, "merge_and_unload"):
        raise ConfigurationError(
            f"merge=True: peft cannot merge adapters of {type(model.peft_config[adapter]).__name__} into a base."
        )
    try:
        merged = rebuilt.merge_and_unload(adapter_names=[adapter])
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"merge=True: peft cannot merge the adapter {adapter!r}: {error}") from error
    if getattr(base, "generation_config", None) is not None:
        merged.generation_config = base.generation_config
    return merged


def _refuse_tied_layers(model: Any) -> None:
    tied = tied_names(model)
    uses = Counter(tied.values())
    shared = next((name for name in tied if name.endswith(".base_layer.weight") and uses[tied[name]] > 1), None)
    if shared is not None:
        raise ConfigurationError(
            f"merge=True: {shared} is tied to another layer, which would be changed as well: write the adapter without "
            "merge=True."
        )
