"""A module's part of a checkpoint: comparing names and shapes, and its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .checkpoint.codec import encode_inline
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
