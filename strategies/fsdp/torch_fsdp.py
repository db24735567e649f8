"""Steps around ``fully_shard`` that torch does not offer: preparation of a model, and removal from a model.

These names of torch are private, as no public one does the same:

- ``_lazy_init`` of a state runs otherwise in the first forward pass only, which would gather the model in set-up;
- ``_module_state_mapping`` records every sharded module, and refuses to shard one again;
- ``_distribute_module_applied`` is the attribute by which tensor parallelism refuses a layer that was split before;
- the records of parameters in a group have no underscore, but no documentation either. Tests cover them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from math import prod
from typing import Any

from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule, fully_shard

from ...framework.core.torch_versions import fsdp_groups
from ...framework.parallel.strategy import StepAdapter
from .full_semantics import no_pickle
from .local_shards import local_of

_HOOK_TABLES = [name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict)]
_COPYING = ("__deepcopy__", "__reduce_ex__")
_SPLIT = "_distribute_module_applied"


def state_of(part: Any) -> Any:
    """Return torch's state of a sharded module."""
    return fully_shard.state(part)  # type: ignore[attr-defined]


def groups_of(part: Any) -> list[Any]:
    """Return torch's parameter groups of a sharded module; empty if it has no parameters."""
    return fsdp_groups(state_of(part))


def initialize(root: Any) -> list[FSDPModule]:
    """Let torch find the outermost module and create its streams; return the sharded modules.

    torch would do this in the first forward pass. Done here, its errors appear in set-up.
    """
    state_of(root)._lazy_init()
    return [part for part in root.modules() if isinstance(part, FSDPModule)]


def prepare_gathering(parts: Iterable[FSDPModule]) -> None:
    """Create the unsharded parameters of all units, without memory for their values. Collective.

    torch creates them in the first gather. They would be missing for a unit that no step runs, and an evaluation would
    create them as inference tensors, which training cannot use. A gather takes the memory of a unit twice; here at most
    one parameter at a time has memory, which nothing is written to.
    """
    for part in parts:
        records = [(record, group.device) for group in groups_of(part) for record in group.fsdp_params]
        if any(hasattr(local_of(record.sharded_param), "fsdp_post_all_gather") for record, _ in records):
            # A tensor subclass builds them from values that are gathered.
            part.unshard()
            part.reshard()
            continue
        for record, device in records:
            dtype = record.param_dtype or record.sharded_param.dtype
            # Replicated parameters have a mesh without a dim of shards.
            ranks = getattr(record.mesh_info, "shard_mesh_size", 1)
            record.init_all_gather_outputs([prod(record.padded_sharded_param_size)], [dtype], ranks, device)
            record.init_unsharded_param()
            record.free_unsharded_param()


class Footprint:
    """Changes of ``fully_shard`` and tensor parallelism to the modules of a model, from ``__init__`` to ``close``.

    They are found by comparing each module's class, attributes and hook tables before and after.

    Args:
        root: the model; with ``fully_shard``, the adapter around it. All attributes that the adapter gets are marks of
            torch, which it gives to other modules too.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before = [(part, type(part), _tables_of(part), set(vars(part))) for part in root.modules()]
        self._added: list[tuple[dict[Any, Any], Any]] = []
        self._marks: list[tuple[nn.Module, str]] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    def close(self) -> None:
        """Record the changes since ``__init__``."""
        marks = {_SPLIT}
        if isinstance(self._root, StepAdapter):
            marks |= set(vars(self._root)) - self._before[0][3]
        for part, kind, tables, attributes in self._before:
            if type(part) is not kind:
                self._classes.append((part, kind))
            self._marks += [(part, name) for name in marks if name in vars(part) and name not in attributes]
            for name, known in tables.items():
                table = vars(part)[name]
                self._added += [(table, key) for key in table if key not in known]
        self._parts = [part for part, *_ in self._before]
        self._before = []

    def allow_copies(self) -> None:
        """Let ``copy.deepcopy`` copy sharded modules, which torch refuses; the copies are not sharded modules.

        Pickles are refused.
        """
        added = {(id(table), key) for table, key in self._added}
        left_out = {*_COPYING, *(name for _, name in self._marks)}
        for part, kind in self._classes:

            def copied(memo: dict[int, Any], part: nn.Module = part, kind: type[nn.Module] = kind) -> nn.Module:
                memo[id(part)] = twin = kind.__new__(kind)
                for name, value in vars(part).items():
                    if name in _HOOK_TABLES:
                        value = type(value)((key, hook) for key, hook in value.items() if (id(value), key) not in added)
                    if name not in left_out:
                        object.__setattr__(twin, name, copy.deepcopy(value, memo))
                return twin

            def reduced(protocol: Any, kind: type[nn.Module] = kind) -> Any:
                raise no_pickle(f"a {kind.__name__}")

            object.__setattr__(part, "__deepcopy__", copied)
            object.__setattr__(part, "__reduce_ex__", reduced)

    def undo(self) -> None:
        """Revert the recorded changes."""
        for table, key in self._added:
            table.pop(key, None)
        for part, kind in self._classes:
            for name in _COPYING:
                # No ordinary way: the attribute may be missing.
                vars(part).pop(name, None)
            # No ordinary way: `fully_shard` has replaced the class of the user's module, which stays the same object.
            part.__class__ = kind
        for part, name in self._marks:
            # No ordinary way: the attribute may be missing.
            vars(part).pop(name, None)
        for part in self._parts:
            _composable_state._module_state_mapping.pop(part, None)
        self._added, self._marks, self._classes, self._parts = [], [], [], []


def _tables_of(part: nn.Module) -> dict[str, set[Any]]:
    """Return the keys of a module's hook tables, and of the tables of other composable functions of torch."""
    held = vars(part).items()
    return {
        name: set(value)
        for name, value in held
        if name in _HOOK_TABLES or (name.startswith("__") and isinstance(value, dict))
    }
