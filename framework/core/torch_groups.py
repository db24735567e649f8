"""Private names of torch's process groups for which there is no public one. Other modules use them by this one's names.

- ``_distributed_c10d``: the table of groups by the names that collectives are called with, and the parts of
  ``DistributedDataParallel`` that choose its buckets. ``torch.distributed`` has neither.
- ``_world`` and its tables: torch keeps one set of groups for each process, which it cannot leave for a while.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from .patches import patch

if dist.is_available():
    from torch._C import _distributed_c10d
    from torch._C._distributed_c10d import (
        Reducer as Reducer,
        _compute_bucket_assignment_by_size as assign_buckets,
        _register_comm_hook as register_hook,
        _resolve_process_group as group_called,
    )

__all__ = ["Reducer", "assign_buckets", "group_called", "register_hook", "set_groups_aside"]
# What torch knows of its groups, by the names of its module's attributes.
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


def set_groups_aside(patches: ExitStack) -> None:
    """Let this process be in no process group until ``patches`` is closed."""
    # torch's own tests of ranks in threads replace the same.
    module: Any = dist.distributed_c10d
    names, group = dict(module._pg_names), dist.group.WORLD
    rank = group.rank() if group is not None else -1

    def register() -> None:
        _distributed_c10d._unregister_all_process_groups()
        for each, name in names.items():
            _distributed_c10d._register_process_group(name, each)
        _distributed_c10d._set_global_rank(rank)

    patches.callback(register)
    _distributed_c10d._unregister_all_process_groups()
    for table in _TABLES:
        patch(patches, module, table, {})
    patch(patches, module, "_group_count", 0)
    patch(patches, module, "_default_pg_init_method", None)
    patch(patches, module, "_world", module._World())
    # Each group that is made adds one that names the rank.
    patch(patches, sys, "excepthook", sys.excepthook)
