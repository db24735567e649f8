"""Private names of torch for which there is no public one. Other modules use them by the names of this one.

- ``torch.utils._pytree``: nested collections, with the classes that libraries have registered, such as the outputs of
  transformers' models. ``torch.utils`` has no public module for them, and ``torch.fx.map_arg`` knows no such classes.
- ``TorchDispatchMode`` and ``FakeTensorMode``: described in torch's documentation, under private modules only.
- ``_version``: ``torch.autograd.graph`` can increment the version of a tensor, but not read it.
- The attributes that ``torch.compile``, activation checkpointing and FSDP1 put into the names of tensors.

``without_subclasses`` is public, in place of ``torch._C.DisableTorchFunctionSubclass``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorConverter as FakeTensorConverter,
    FakeTensorMode as FakeTensorMode,
    unset_fake_temporarily as unset_fake_temporarily,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes as without_modes,
)
from torch.utils._pytree import (
    TreeSpec as TreeSpec,
    keystr as keystr,
    tree_flatten as tree_flatten,
    tree_flatten_with_path as tree_flatten_with_path,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)
from torch.utils.module_tracker import ModuleTracker

__all__ = ["is_in_backward", "storage_key", "version_of", "without_modes", "without_subclasses", "without_wrappers"]
_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
# It is not entered, so it tracks no module.
_TRACKER = ModuleTracker()


def version_of(tensor: Tensor) -> int:
    """Return the number of changes of a tensor in place."""
    number: int = tensor._version
    return number


def without_wrappers(name: str) -> str:
    """Return the name of a tensor without the attributes of torch's wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def storage_key(held: Tensor | torch.UntypedStorage) -> int:
    """Return the number of a storage, which all its tensors share, also those without data."""
    # torch keeps the object of a storage for as long as the storage lives.
    return id(held.untyped_storage() if isinstance(held, Tensor) else held)


def without_subclasses(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in which no operation asks the classes of its tensors for ``__torch_function__``."""
    return Tensor.__torch_function__(function, (), args, kwargs)  # type: ignore[no-untyped-call]


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    is_running: bool = _TRACKER.is_bw
    return is_running
