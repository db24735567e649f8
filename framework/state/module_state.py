"""A module's part of a checkpoint, under canonical names: saving, comparing, loading; and its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint.codec import encode_inline
from ..checkpoint.manifest import JSON
from ..checkpoint.reader import Checkpoint
from ..checkpoint.stored_tensor import SavedTensor, StoredTensors
from ..checkpoint.write_plan import Shard
from ..core.errors import ConfigurationError
from ..parallel.parameter_names import canonical_names, canonical_table
from ..parallel.strategy import Strategy
from ..system.redaction import holds_secret
from .state_matching import ModelMatch, SavedModel, match_model, refuse

Shapes = Mapping[str, tuple[int, ...]]

LENIENT = "Load with strict=False to load only matching tensors."


def shapes_of(strategy: Strategy, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every tensor in a module's state, by canonical name."""
    canonical = canonical_names(module)
    return {canonical(name): tuple(shape) for name, shape in strategy.state.shapes(module).items()}


def model_state(strategy: Strategy, module: nn.Module) -> dict[str, Shard]:
    """Return this rank's part of a module's state, by canonical name. Collective."""
    canonical = canonical_names(module)
    return {canonical(name): shard for name, shard in strategy.state.model_state(module).items()}


def put_model(strategy: Strategy, module: nn.Module, tensors: StoredTensors) -> None:
    """Load tensors by canonical name into a module; other tensors are unchanged. Collective."""
    own = canonical_table(module)
    strategy.state.load_model_state(module, {own[name]: stored for name, stored in tensors.items()})


def stored_of(checkpoint: Checkpoint, match: ModelMatch) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint that match a module, by the module's canonical names."""
    return {name: SavedTensor(checkpoint, "model", saved) for name, saved in match.tensors.items()}


def check_model(
    module: nn.Module,
    own: Shapes,
    checkpoint: Checkpoint,
    strict: bool,
    renames: Mapping[str, str] | None = None,
    advice: str = LENIENT,
) -> ModelMatch:
    """Compare names and shapes of a module, ``own``, with a checkpoint's; return the match.

    Raises:
        CheckpointError: they differ and ``strict`` is set; the message lists the names with both shapes.
    """
    match = match_model(module, own, SavedModel.of(checkpoint, renames or {}))
    if strict:
        refuse(Path(checkpoint.path), type(module).__name__, match.problems, advice)
    return match


def encode_known(hparams: Mapping[str, Any]) -> tuple[JSON, list[str]]:
    """Encode the hyperparameters that a checkpoint can hold; return them and the names of the others.

    Secret values are not encoded.
    """
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in hparams.items():
        if holds_secret(name, value):
            unknown.append(name)
            continue
        try:
            encode_inline({name: value})
            known[name] = value
        except ConfigurationError:
            unknown.append(name)
    return encode_inline(known), unknown


def buffer_locations(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Map each buffer's canonical name to its location: the table of its module, and the key in the table."""
    canonical = canonical_names(module)
    return {
        canonical(f"{prefix}.{key}" if prefix else key): (part._buffers, key)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for key, buffer in part._buffers.items()
        if buffer is not None
    }
