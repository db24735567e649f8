"""The model of a ``TransformersModule``: its configuration, its class, and the kind of its labels.

transformers is imported when one of these functions is called first.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import ConfigurationError, unknown
from ..pretrained.transformers_models import stored_generation_config

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "image-classification": "AutoModelForImageClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
}
"""The auto class of transformers for each task."""
GENERATION = "generation_config"
"""The name of a model's ``GenerationConfig``, in the model and among the values of its configuration."""


def transformers_library() -> Any:
    """Return the package transformers.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigurationError("phalanx.hf needs transformers: pip install 'transformers>=5'.") from None
    return transformers


def model_class(task: str | type) -> Any:
    """Return the class that builds models for a task: a class of transformers itself, or an auto class.

    Raises:
        ConfigurationError: ``task`` is neither the name of a task nor a class that builds models.
        UnknownNameError: no task has this name.
    """
    if isinstance(task, str):
        if task not in TASKS:
            raise unknown("task", task, TASKS)
        return getattr(transformers_library(), TASKS[task])
    if not hasattr(task, "from_pretrained"):
        raise ConfigurationError(
            f"task={task!r} is not a class of models: give a class of transformers, or one of {', '.join(TASKS)}."
        )
    return task


def refuse_adapters(kind: type) -> None:
    """Refuse to build a model with adapters, whose settings are not part of its configuration.

    Raises:
        ConfigurationError: the class is one of peft.
    """
    if kind.__module__.partition(".")[0] == "peft":
        raise ConfigurationError(
            f"TransformersModule cannot build a {kind.__name__} from a configuration, as in a checkpoint: build it "
            "with peft.get_peft_model, and give it, as in load_from_checkpoint(path, model=...)."
        )


def config_of(model: Any) -> Any:
    """Return the configuration of a model: one in the folder of this path, one of this dict, or itself.

    Raises:
        ConfigurationError: there is no such folder, the dict has no ``model_type``, or the value has another type.
    """
    auto = transformers_library().AutoConfig
    if isinstance(model, str | Path):
        if not Path(model).is_dir():
            raise ConfigurationError(
                f"model={str(model)!r} is not a folder: download the model first, for example with "
                "huggingface_hub.snapshot_download, and give the folder that it returns."
            )
        return auto.from_pretrained(model)
    if isinstance(model, Mapping):
        values = {name: value for name, value in model.items() if name != GENERATION}
        if "model_type" not in values:
            raise ConfigurationError("model={...} has no model_type: give the values of a config.json of transformers.")
        return auto.for_model(values.pop("model_type"), **values)
    if not hasattr(model, "to_json_string"):
        raise ConfigurationError(
            f"model={type(model).__name__} is not a model of transformers: give one, its configuration, or a folder."
        )
    return model


def config_values(config: Any, generation: Any = None) -> dict[str, Any]:
    """Return a configuration as JSON values, of which ``config_of`` and ``generation_of`` make ones like it.

    Args:
        config: the configuration.
        generation: the ``GenerationConfig`` of the model; None for the one of its configuration.
    """
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    if generation is not None:
        values[GENERATION] = json.loads(generation.to_json_string(use_diff=True))
    return {**values, "model_type": config.model_type}


def generation_of(model: Any, config: Any) -> Any:
    """Return the ``GenerationConfig`` of a model, of a folder, or of the dict of ``config_values``.

    None if it is the one that a model of this configuration starts with.

    Raises:
        CheckpointError: that of a folder cannot be read.
    """
    kind = transformers_library().GenerationConfig
    if isinstance(model, Mapping):
        found = kind.from_dict(model[GENERATION]) if GENERATION in model else None
        if found is not None:
            # As in from_pretrained: transformers writes one with contradictory values only if it was not changed.
            found._original_object_hash = hash(found)
        return found
    stored = isinstance(model, str | Path)
    found = stored_generation_config(model) if stored else getattr(model, GENERATION, None)
    return None if found is None or found == kind.from_model_config(config) else found


def build_model(kind: Any, config: Any, generation: Any = None) -> nn.Module:
    """Return a model with new weights, in torch's default dtype.

    Args:
        kind: an auto class or the model's own class.
        config: the configuration.
        generation: the ``GenerationConfig``; None for the one of the configuration.
    """
    model: Any = kind(config) if issubclass(kind, nn.Module) else kind.from_config(config, dtype=_dtype())
    if generation is not None and model.can_generate():
        model.generation_config = copy.deepcopy(generation)
    return model  # type: ignore[no-any-return]


def _dtype() -> torch.dtype:
    return torch.get_default_dtype()


def predicts_next_token(model: Any) -> bool:
    """Whether the loss of a model compares its output for each token with the label of the next one."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def predicts_tokens(model: Any) -> bool:
    """Whether a model predicts tokens, so that the exponential of its loss is a perplexity."""
    name = type(model).__name__
    return bool(model.can_generate()) or name.endswith("ForMaskedLM") or name.endswith("ForPreTraining")
