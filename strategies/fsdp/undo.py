"""Removal of ``fully_shard`` and its hooks from a model, which torch does not offer.

Changes are found by comparing each module's class and hook tables before and after. These private names of torch are
used:

- ``_module_state_mapping``, which records every sharded module and refuses to shard it again;
- ``STATE_KEY`` and ``REGISTRY_KEY``, the names of attributes for the same purpose;
- the two attributes that compiled code reads;
- the attribute by which tensor parallelism refuses a layer that was split before;
- the names of a module's hook tables.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

from .ordinary import no_pickle

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_COPYING = ("__deepcopy__", "__reduce_ex__")
_ADDED_ATTRIBUTES = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied")


class Footprint:
    """Changes to the modules of a model between ``__init__`` and ``close``."""

    def __init__(self, root: nn.Module) -> None:
        self._before = [(part, type(part), _hooks_of(part)) for part in root.modules()]
        self._added: list[tuple[dict[Any, Any], Any]] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    def close(self) -> None:
        """Record the changes since ``__init__``."""
        for part, kind, hooks in self._before:
            if type(part) is not kind:
                self._classes.append((part, kind))
            for name, known in hooks.items():
                table = part.__dict__[name]
                self._added += [(table, key) for key in table if key not in known]
        self._parts = [part for part, _, _ in self._before]
        self._before = []

    def allow_copies(self) -> None:
        """Let ``copy.deepcopy`` copy sharded modules, which torch refuses; the copies are not sharded modules.

        Pickles are refused.
        """
        added = {(id(table), key) for table, key in self._added}
        for part, kind in self._classes:

            def copied(memo: dict[int, Any], part: nn.Module = part, kind: type[nn.Module] = kind) -> nn.Module:
                memo[id(part)] = twin = kind.__new__(kind)
                for name, value in vars(part).items():
                    if name in _HOOKS:
                        value = type(value)((key, hook) for key, hook in value.items() if (id(value), key) not in added)
                    if name not in (*_ADDED_ATTRIBUTES, STATE_KEY, REGISTRY_KEY, *_COPYING):
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
        for part in self._parts:
            _composable_state._module_state_mapping.pop(part, None)
            for name in _ADDED_ATTRIBUTES:
                if name in vars(part):
                    delattr(part, name)
            _forget(part, STATE_KEY)
            _forget(part, REGISTRY_KEY)
        self._added, self._classes, self._parts = [], [], []


def _hooks_of(part: nn.Module) -> dict[str, set[Any]]:
    return {name: set(part.__dict__[name]) for name in _HOOKS if name in part.__dict__}


def _forget(part: nn.Module, key: str) -> None:
    """Remove the entry of ``fully_shard`` from a table of composable interfaces, and the table if it is then empty."""
    table = part.__dict__.get(key)
    if table is None:
        return
    for entry in list(table):
        if getattr(entry, "__name__", entry) == "fully_shard":
            del table[entry]
    if not table:
        delattr(part, key)
