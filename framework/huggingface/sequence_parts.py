"""The parts of batches of language models of transformers, for ranks that share sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError, DataError
from ..parallel.sequence_part import SequencePart
from .model_config import predicts_next_token

_ENTRIES = ("input_ids", "labels", "attention_mask")


def causal_part(model: Any, batch: Mapping[str, Any], part: SequencePart, ignored: int) -> dict[str, Tensor]:
    """Return this rank's part of a batch: tokens, their positions, and labels that are shifted already.

    Raises:
        ConfigurationError: the model does not predict the next token.
        DataError: the batch has other entries, or padding at the start.
    """
    if not predicts_next_token(model):
        raise ConfigurationError(
            f"parallel={{'cp': {part.size}}} with {type(model).__name__}: TransformersModule cuts the sequences of "
            "models that predict the next token. Derive a class that overrides cut_sequences, or leave cp out."
        )
    others = [name for name in batch if name not in _ENTRIES]
    if others or "labels" not in batch:
        raise DataError(
            f"a batch with {', '.join(batch)}: TransformersModule cuts {', '.join(_ENTRIES)}, and needs labels. Leave "
            "other entries out, or derive a class that overrides cut_sequences."
        )
    mask = batch.get("attention_mask")
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise DataError(
            "a batch whose attention_mask begins with padding: under parallel={'cp': ...} sequences are padded at the "
            "end, where causal attention needs no mask. Set tokenizer.padding_side = 'right'."
        )
    tokens, labels = batch["input_ids"], batch["labels"]
    targets = part(torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignored)], 1))
    positions = part.positions(tokens).expand(len(tokens), -1)
    return {"input_ids": part(tokens), "position_ids": positions, "labels": targets, "shift_labels": targets}
