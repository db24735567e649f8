"""Being in none of torch's process groups for a while, so that another one can be made and dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack

import torch.distributed as dist

from ..core.errors import ConfigurationError
from ..core.torch_groups import set_groups_aside
from .rendezvous import is_initialized

_aside: list[None] = []


def is_rehearsed() -> bool:
    """Whether this process plays one of several ranks that are not there, in torch's "fake" group."""
    return is_initialized() and dist.get_backend() == "fake"


def refuse_aside() -> None:
    """Refuse a collective with the ranks of a group that is set aside.

    Raises:
        ConfigurationError: the other ranks are elsewhere, so this one would wait for them, or mix up their collectives.
    """
    if _aside:
        raise ConfigurationError("A step that is rehearsed cannot communicate with ranks that are there.")


@contextlib.contextmanager
def groups_aside() -> Iterator[None]:
    """Context in which this process is in no process group, and may join others, which it has to leave.

    On exit it is in its groups again, which have not noticed. Other ranks take no part.
    """
    with ExitStack() as patches:
        if dist.is_available():
            set_groups_aside(patches)
        _aside.append(None)
        patches.callback(_aside.pop)
        yield
