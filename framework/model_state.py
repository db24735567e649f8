"""A module's part of a checkpoint: comparing, rebuilding it from its hyperparameters, putting its weights in."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from .checkpoint.codec import decode, encode_inline
from .checkpoint.manifest import JSON
from .checkpoint.read import Checkpoint
from .errors import CheckpointError, ConfigurationError, did_you_mean

Shapes = Mapping[str, tuple[int, ...]]


def check_model(kind: type[nn.Module], own: Shapes, checkpoint: Checkpoint, strict: bool) -> list[str]:
    """Compare names and shapes of a module, ``own``, with a checkpoint's; return what both have.

    Raises:
        CheckpointError: they differ; the message lists the names with both sides.
    """
    saved = {name: tuple(checkpoint.shape("model", name)) for name in checkpoint.names("model")}
    problems = [f"{name}: {saved[name]} in the checkpoint, {own[name]} in the module" for name in own
                if name in saved and own[name] != saved[name]]  # fmt: skip
    if strict:
        problems += [
            f"{name}: missing in the checkpoint.{did_you_mean(name, saved)}" for name in own if name not in saved
        ]
        problems += [f"{name}: unknown to the module.{did_you_mean(name, own)}" for name in saved if name not in own]
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise CheckpointError(f"{checkpoint.path} does not fit {kind.__name__}: {shown}.")
    return [name for name in own if name in saved]


def encode_known(hparams: Mapping[str, Any]) -> tuple[JSON, list[str]]:
    """Encode the hyperparameters that a checkpoint can hold; return them and the names of the others."""
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in hparams.items():
        try:
            encode_inline({name: value})
            known[name] = value
        except ConfigurationError:
            unknown.append(name)
    return encode_inline(known), unknown


def rebuild_module(cls: type[Any], checkpoint: Checkpoint, strict: bool, overrides: Mapping[str, Any]) -> Any:
    """Build ``cls`` with a checkpoint's hyperparameters and put its weights in."""
    arguments = {**accepted(cls, decode(checkpoint.document["hparams"])), **overrides}
    missing = [name for name in checkpoint.document.get("unsaved_hparams", []) if name not in arguments]
    if missing:
        raise CheckpointError(
            f"{cls.__name__} was built with {', '.join(missing)}, which {checkpoint.path} could not hold: "
            f"pass load_from_checkpoint(..., {missing[0]}=...)."
        )
    try:
        module = cls(**arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{cls.__name__} cannot be built from {checkpoint.path}: {error}. Pass the missing arguments to "
            "load_from_checkpoint, or call save_hyperparameters() in __init__ before saving."
        ) from None
    module.configure_model()
    own = module.state_dict(keep_vars=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    for name in check_model(cls, shapes, checkpoint, strict):
        own[name].data.copy_(checkpoint.read("model", name))
    return module


def accepted(cls: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the constructor of ``cls`` takes."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}
