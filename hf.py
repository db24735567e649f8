"""``phalanx.hf``: models of Hugging Face's libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.huggingface.adapter_export import save_adapter as save_adapter
    from .framework.huggingface.four_bit import quantize_4bit as quantize_4bit
    from .framework.huggingface.row_sampling import RowSampling as RowSampling
    from .framework.huggingface.transformers_module import TransformersModule as TransformersModule

_HOMES = {
    ".framework.huggingface.adapter_export": "save_adapter",
    ".framework.huggingface.four_bit": "quantize_4bit",
    ".framework.huggingface.row_sampling": "RowSampling",
    ".framework.huggingface.transformers_module": "TransformersModule",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
