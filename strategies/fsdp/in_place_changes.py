"""Changes that the user's code makes to gathered parameters: each rank takes over those of its shards.

A gathered parameter is a copy, which is freed after its use. Changes in place are known from the version of the copy,
those through ``data`` from the use of that attribute, and those through NumPy from the memory, which stays with its
array. The gradient of a gathered parameter is that of its shards.

``_to_sharded`` of a group is private in torch's FSDP. The public ``reshard`` does not see the hooks of ``state_dict``,
which free gathered parameters too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...framework.core.errors import ConfigurationError
from ...framework.core.torch_internals import version_of
from ...framework.parallel.meta_device import owners_of
from .full_semantics import check_shape
from .local_shards import local_of
from .torch_fsdp import groups_of

_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad
_PACKAGE = __name__.partition(".strategies.")[0]
# Those that mean the gradient of the gathered parameter itself, which FSDP has not reduced.
_OF_GATHERED = ("torch.distributed.fsdp.", f"{_PACKAGE}.strategies.", f"{_PACKAGE}.framework.")


def _is_own(caller: FrameType) -> bool:
    name: str = caller.f_globals.get("__name__", "")
    return name.startswith(_OF_GATHERED)


class _Gathered(nn.Parameter):
    """A gathered parameter that notes the use of ``data``, whose changes have no version, and has the gradient of its
    shards.
    """

    note_use: Callable[[], None]
    shards: Callable[[], Any]
    """Returns the sharded parameter."""

    @property
    def data(self) -> Tensor:
        """Return the values, which the caller may change."""
        self.note_use()
        value: Tensor = _DATA.__get__(self)
        return value

    @data.setter
    def data(self, value: Tensor) -> None:
        check_shape(self, value)
        with torch.no_grad():
            self.copy_(value)

    @property
    def grad(self) -> Any:
        """Return the gradient that was not reduced yet, else the reduced one."""
        own = _GRAD.__get__(self)
        return own if own is not None or _is_own(sys._getframe(1)) else self.shards().grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if _is_own(sys._getframe(1)):
            _GRAD.__set__(self, value)
            return
        _GRAD.__set__(self, None)
        self.shards().grad = value

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__set__(self, None)
        self.shards().grad = None

    def __hash__(self) -> int:
        """Return the hash of the parameter, so that dicts and sets which hold it find its gathered copy."""
        return hash(self.shards())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied


def carry_writes(parts: Iterable[FSDPModule], root: FSDPModule, compiled: bool) -> None:
    """Make all groups take over changes of gathered parameters when they free them.

    Args:
        parts: the sharded modules, whose gathered parameters exist.
        root: the one whose parameters stay gathered in the user's own code.
        compiled: whether parts are compiled, which needs parameters of torch's own class.
    """
    owners = owners_of(cast(nn.Module, root))
    for part in parts:
        for group in groups_of(part):
            plain = [
                each for each in group.fsdp_params if not hasattr(local_of(each.sharded_param), "fsdp_pre_all_gather")
            ]
            places = [owners[id(each.sharded_param)][0] for each in plain]
            names = [f"{key} of a {type(owner).__name__}" for owner, key in places]
            _Group(group, list(zip(plain, names, strict=True)), notes_data=part is root and not compiled)


class _Group:
    """The gathered parameters of a group."""

    def __init__(self, group: Any, named: list[tuple[Any, str]], notes_data: bool) -> None:
        self._group = group
        self._named = named
        records = [record for record, _ in named]
        # An operation on a DTensor is counted by it, and one on its local tensor by that.
        self._gathered = [(record.unsharded_param, local_of(record.unsharded_param)) for record in records]
        self._versions = self._counts()
        self._uses_data = False
        if notes_data:
            for record in records:
                if type(each := record.unsharded_param) is nn.Parameter:
                    # No ordinary way: torch has made the parameter, and modules hold it.
                    each.__class__ = _Gathered
                    gathered = cast(_Gathered, each)
                    gathered.note_use, gathered.shards = self._note_use, partial(getattr, record, "sharded_param")
        group._to_sharded = partial(self._free, group._to_sharded)

        def gather_again() -> None:
            # Not the method: a copy of the parameter would copy its object.
            self._gather_again()

        for record in records:
            record.sharded_param.gather_again = gather_again

    def _gather_again(self) -> None:
        """Gather the parameters again, after a change of shards in code that also uses what is gathered. Collective."""
        if self._group.is_unsharded:
            self._group._to_sharded()
            self._group.unshard()
            self._group.wait_for_unshard()

    def _counts(self) -> list[int]:
        return [version_of(whole) + version_of(local) for whole, local in self._gathered]

    def _note_use(self) -> None:
        self._uses_data = True

    def _free(self, free: Callable[[], None]) -> None:
        before, self._versions = self._versions, self._counts()
        uses_data, self._uses_data = self._uses_data, False
        if (before != self._versions or uses_data) and self._group.is_unsharded:
            for (record, name), old, new in zip(self._named, before, self._versions, strict=True):
                if old != new or uses_data:
                    _carry(record, name, is_changed=old != new)
        try:
            free()
        except RuntimeError:
            # The memory of an array of NumPy cannot be freed, and may have been written to.
            shared = [(record, name) for record, name in self._named if not _memory(record).resizable()]
            if not shared:
                raise
            for record, name in shared:
                _carry(record, name, is_changed=False)
                _take_other_memory(record)
            free()


def _memory(record: Any) -> torch.UntypedStorage:
    return local_of(record.unsharded_param).untyped_storage()


@torch.no_grad()
def _take_other_memory(record: Any) -> None:
    """Leave the memory of a gathered parameter to those who share it."""
    old = _memory(record)
    new = torch.UntypedStorage(old.size(), device=old.device)
    for each in (*record.all_gather_outputs, local_of(record.unsharded_param)):
        if each.untyped_storage().data_ptr() == old.data_ptr():
            # The backward pass, which needs the parameter, gathers it again: it must not count as changed.
            value = torch.empty(0, dtype=each.dtype, device=each.device)
            _DATA.__set__(each, value.set_(new, each.storage_offset(), each.size(), each.stride()))


@torch.no_grad()
def _carry(record: Any, name: str, is_changed: bool) -> None:
    """Copy this rank's part of a gathered parameter to its shard."""
    dim, rank = record.fsdp_placement.dim, getattr(record.mesh_info, "shard_mesh_rank", 0)
    whole, shard = local_of(record.unsharded_param).detach(), local_of(record.sharded_param).detach()
    start = min(rank * record.padded_sharded_param_size[dim], whole.size(dim))
    part = whole.narrow(dim, start, shard.size(dim) if shard.numel() else 0).to(shard.device)
    if part.dtype == shard.dtype:
        shard.copy_(part)
    elif is_changed or bool((part != shard.to(part.dtype)).any()):
        narrow, wide = (str(each.dtype).removeprefix("torch.") for each in (part, shard))
        raise ConfigurationError(
            f"{name} was changed in place within a step, where mixed precision has it in {narrow}, too narrow for "
            f"weights: change it in a hook such as on_train_batch_end, where it is {wide}."
        )
