"""``lightning.pytorch.utilities.seed``: random generators that are put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ....framework.distributed.seed import capture, restore

__all__ = ["isolate_rng"]


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the state of all random generators of this process at the end of the block.

    Args:
        include_cuda: accepted for compatibility with Lightning; generators of devices in use are always restored.
    """
    state = capture()
    try:
        yield
    finally:
        restore(state)
