"""``lightning.pytorch.callbacks.finetuning``."""

from __future__ import annotations

from ....callbacks.finetuning import BackboneFinetuning, BaseFinetuning

__all__ = ["BackboneFinetuning", "BaseFinetuning"]
