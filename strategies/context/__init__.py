"""Context parallelism: the ranks of a group share the sequences of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...framework.core.lazy_exports import on_call

if TYPE_CHECKING:
    from .attention import ContextParallel as ContextParallel

# Attention over parts of sequences imports torch's distributed tensors, which take long to load.
__getattr__ = on_call(__name__, {".attention": "ContextParallel"})
