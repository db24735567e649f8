"""The rules of transformers for its models: names in files, values of tensors that no file holds, and generation.

transformers itself is imported only where one of its models exists already. The functions that it uses in
``from_pretrained`` are called here, so that the same files load in the same way.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError
from ..parallel.meta_device import replace_tensors, tensors_of
from .peft_adapters import check_adapters_have_data

_FLAG = "_is_hf_initialized"


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a ``PreTrainedModel`` of transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def transformers_models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models of transformers in a module."""
    if is_transformers_model(module):
        return [module]
    found = [model for child in module.children() for model in transformers_models(child)]
    return list(dict.fromkeys(found))


def names_in_model(model: Any, stored: Iterable[str], own: Iterable[str], path: object) -> dict[str, str]:
    """Map a model's name of each stored tensor to its name in the files.

    As in ``from_pretrained``, old names are replaced, and the prefix of the base model is added or removed. Names
    that the model does not have are included.

    Raises:
        CheckpointError: transformers computes the model's tensor from several stored ones, or two stored tensors have
            the same name in the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions: Any = get_model_conversion_mapping(model)
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    renamings = [one for one in conversions if not isinstance(one, WeightConverter)]
    known: Any = dict.fromkeys(own, True)
    found: dict[str, str] = {}
    for name in stored:
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if new not in known and name in known:
            new, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        if pattern is not None:
            raise CheckpointError(
                f"{path} stores {name!r} in a layout that transformers converts for {type(model).__name__} when it "
                "loads: convert the folder once, with from_pretrained(...) and "
                "save_pretrained(..., save_original_format=False) of transformers."
            )
        if new in found:
            raise CheckpointError(f"{path} holds {found[new]!r} and {name!r}, which are both {new!r} in the model.")
        found[new] = name
    return found


def is_unneeded(model: Any, name: str) -> bool:
    """Whether transformers ignores a stored tensor that the model does not have."""
    buffers = [buffer for buffer, _ in model.named_buffers()]
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    # Buffers that older versions saved.
    if any(buffer.endswith("rotary_emb.inv_freq") for buffer in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(buffer.endswith("position_ids") for buffer in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return any(re.search(pattern, name) for pattern in patterns)


def is_optional(model: Any, name: str) -> bool:
    """Whether transformers does not report that the files lack a tensor of the model."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())


def empty_tensors(module: nn.Module) -> set[int]:
    """Return the ``id`` of each tensor on the meta device.

    In the context ``Strategy.building``, tensors that the strategy itself builds without data do not count: they know
    their initial values.
    """
    return {id(tensor) for _, tensor in tensors_of(module) if tensor.is_meta}


@torch.no_grad()
def initialize_missing(model: Any, lacking: set[int]) -> None:
    """Give tensors of a model that was built under ``torch.device("meta")`` their initial values.

    It is called in the context ``Strategy.building``, so that a strategy that shards parameters defers the work.

    Args:
        model: a model of transformers.
        lacking: the ``id`` of each tensor; others, such as those that are loaded, stay as they are.

    Raises:
        ConfigurationError: an adapter of peft is among them, whose initial values are lost.
    """
    check_adapters_have_data(model, lacking)

    def allocated(_: str, tensor: Tensor) -> Tensor | None:
        if id(tensor) not in lacking:
            return None
        if isinstance(tensor, nn.Parameter):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        # Not torch.empty, which a strategy may defer: buffers get their data at once.
        return torch.empty_like(tensor, device="cpu")

    kept = [tensor for _, tensor in tensors_of(model) if id(tensor) not in lacking]
    if len(kept) == sum(1 for _ in tensors_of(model)):
        return
    replace_tensors(model, allocated)
    # transformers initializes the tensors and modules that lack its flag.
    for tensor in kept:
        setattr(tensor, _FLAG, True)
    for part in model.modules():
        # No ordinary way: only some modules have the flag, which is an attribute of transformers.
        part.__dict__.pop(_FLAG, None)
    model.initialize_weights()
    for tensor in kept:
        delattr(tensor, _FLAG)


# ---- the settings with which a model generates ----------------------------------------------------------------------


_GENERATION, _OLDER_GENERATION = "generation_config.json", "config.json"


def use_generation_config(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Let a model generate as one of ``from_pretrained`` does, with the settings of the folder that its weights are of.

    Without effect if the model does not generate, or if ``path`` is not a folder of transformers.

    Raises:
        CheckpointError: the settings cannot be read.
    """
    if not is_transformers_model(model):
        return
    generator: Any = model
    found = stored_generation_config(path) if generator.can_generate() else None
    if found is not None:
        generator.generation_config = found


def stored_generation_config(path: str | os.PathLike[str]) -> Any:
    """Return the ``GenerationConfig`` of a folder; None if it has none.

    Older folders have its values in ``config.json``.

    Raises:
        CheckpointError: it cannot be read.
    """
    folder = Path(path)
    file = next((name for name in (_GENERATION, _OLDER_GENERATION) if (folder / name).is_file()), None)
    if file is None:
        return None
    from transformers import GenerationConfig

    options: dict[str, Any] = {} if file == _GENERATION else {"_from_model_config": True}
    try:
        return GenerationConfig.from_pretrained(folder, config_file_name=file, local_files_only=True, **options)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / file} cannot be read: {error}") from error
