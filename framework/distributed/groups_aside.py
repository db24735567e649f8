"""Being in none of torch's process groups for a while, so that another one can be made and dropped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from ..core.errors import ConfigurationError
from ..core.patches import patch
from .rendezvous import is_initialized

# What torch knows of its groups, by the names of its module's attributes.
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
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
            _set_aside(patches)
        _aside.append(None)
        patches.callback(_aside.pop)
        yield


def _set_aside(patches: ExitStack) -> None:
    # Private, as torch keeps one set of groups for each process. Its own tests of ranks in threads replace the same.
    module: Any = dist.distributed_c10d
    native = module.torch._C._distributed_c10d
    names, group = dict(module._pg_names), module.GroupMember.WORLD
    rank = group.rank() if isinstance(group, dist.ProcessGroup) else -1

    def register() -> None:
        native._unregister_all_process_groups()
        for each, name in names.items():
            native._register_process_group(name, each)
        native._set_global_rank(rank)

    patches.callback(register)
    native._unregister_all_process_groups()
    for table in _TABLES:
        patch(patches, module, table, {})
    patch(patches, module, "_group_count", 0)
    patch(patches, module, "_default_pg_init_method", None)
    patch(patches, module, "_world", module._World())
    # Each group that is made adds one that names the rank.
    patch(patches, sys, "excepthook", sys.excepthook)
