"""The functions of ``accelerate.utils`` that work without an Accelerator: exchange between ranks, and small helpers."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from packaging.version import Version
from torch import Tensor, nn

from ...framework.core.arguments import names_arguments
from ...framework.core.errors import unknown
from ...framework.distributed.gather import map_leaves
from ...framework.distributed.world import placement
from ...framework.fabric.collectives import to_device
from ...framework.fabric.fabric import Fabric
from ...framework.fabric.module import unwrap
from ...framework.parallel.compilation import compilation_of
from ...framework.system.environment import variables_set
from .arguments import default_devices
from .saved_states import write_object

T = TypeVar("T")

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def gather(tensor: Any) -> Any:
    """Return the tensors of all ranks, concatenated along the first dim. Collective."""
    return _ranks().gather(tensor)


def gather_object(object: Any) -> list[Any]:
    """Return the items of all ranks' lists in one list. Collective."""
    return _ranks().gather_object(object)


@names_arguments
def broadcast(tensor: T, from_process: int = 0) -> T:
    """Return the tensors of one rank. Collective."""
    return _ranks().broadcast(tensor, from_process)


@names_arguments
def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list by those of one rank, and return it. Collective."""
    object_list[:] = _ranks().broadcast(object_list, from_process)
    return object_list


@names_arguments
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return tensors reduced over all ranks, times ``scale``. Collective."""
    return _ranks().reduce(tensor, reduction, scale)


@names_arguments
def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return tensors padded to the largest size on any rank. Collective."""
    return _ranks().pad_across_processes(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Wait until all ranks have called this. Collective."""
    _ranks().barrier()


@names_arguments
def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate tensors, or the tensors in equal lists, tuples or dicts, along a dim."""
    first = data[0]
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([each[key] for each in data], dim) for key in first})  # type: ignore[call-arg]
    if isinstance(first, (tuple, list)):
        parts = [concatenate([each[index] for each in data], dim) for index in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return torch.cat(data, dim=dim)


@names_arguments
def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move a tensor, a module or a collection of tensors to a device.

    Args:
        tensor: what is moved.
        device: the device.
        non_blocking: accepted; copies from pinned memory never block.
        skip_keys: the keys of a dict, or a key, whose values stay where they are.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
    moved = to_device(tensor, torch.device(device))
    if skipped and isinstance(tensor, Mapping):
        moved = type(moved)({key: tensor[key] if key in skipped else value for key, value in moved.items()})
    return moved


def find_batch_size(data: Any) -> int | None:
    """Return the first dim of the first tensor in a collection, None if there is none."""
    found: list[int] = []
    map_leaves(lambda leaf: found.append(len(leaf)) if isinstance(leaf, Tensor) and leaf.dim() else None, data)
    return found[0] if found else None


def convert_to_fp32(tensor: Any) -> Any:
    """Return a collection with its fp16 and bf16 tensors in fp32."""
    half = (torch.float16, torch.bfloat16)
    return map_leaves(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in half else leaf, tensor)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the user's own module."""
    return unwrap(model) if isinstance(model, nn.Module) else model


@names_arguments
def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object with ``torch.save``, or tensors as safetensors, on rank 0 or on one rank of each node."""
    place = placement()
    if (place.local_rank if save_on_each_node else place.rank) == 0:
        write_object(obj, f, safe_serialization)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return the progress bar of the package ``tqdm``, which only the first rank of each node shows."""
    bar = import_module("tqdm.auto").tqdm
    hidden = main_process_only and placement().local_rank != 0
    return bar(*args, **{**kwargs, "disable": hidden or kwargs.get("disable", False)})


def patch_environment(**variables: Any) -> AbstractContextManager[None]:
    """Set environment variables, whose names are written in capitals, within a context."""
    return variables_set({name.upper(): str(value) for name, value in variables.items()})


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed package with another version."""
    if operation not in _COMPARISONS:
        raise unknown("operation", operation, _COMPARISONS)
    given = library_or_version
    own = Version(version(given)) if isinstance(given, str) else given
    return _COMPARISONS[operation](own, Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch with another version."""
    return compare_versions(Version(torch.__version__), operation, version)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made a module."""
    return compilation_of(module)[0] is not module


def is_torch_tensor(tensor: Any) -> bool:
    """Whether a value is a tensor."""
    return isinstance(tensor, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether a value is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def listify(data: Any) -> Any:
    """Return a collection with lists and numbers in place of its tensors."""
    return map_leaves(lambda leaf: leaf.detach().cpu().tolist() if isinstance(leaf, Tensor) else leaf, data)


def str_to_bool(value: str) -> int:
    """Return 1 for ``y``, ``yes``, ``t``, ``true``, ``on`` and ``1``, and 0 for their opposites.

    Raises:
        UnknownNameError: the value is none of them.
    """
    yes: Iterable[str] = ("y", "yes", "t", "true", "on", "1")
    no: Iterable[str] = ("n", "no", "f", "false", "off", "0")
    if value.lower() not in (*yes, *no):
        raise unknown("value", value, (*yes, *no))
    return int(value.lower() in yes)


def _ranks() -> Fabric:
    return _fabric(placement().size)


@cache
def _fabric(size: int) -> Fabric:
    return Fabric(devices=default_devices())
