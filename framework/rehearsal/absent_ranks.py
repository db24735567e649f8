"""A process group whose other ranks are not there: collectives return at once, and change nothing."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core.patches import patch
from ..core.torch_groups import Reducer, assign_buckets, register_hook
from ..core.torch_internals import FakeTensorConverter, without_modes


@contextlib.contextmanager
def absent_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a group without the others. This process must not be in a group."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    with ExitStack() as patches:
        patches.callback(_forget_meshes)
        patches.callback(dist.destroy_process_group)
        _forget_meshes()
        _adapt_torch(patches)
        yield


def _forget_meshes() -> None:
    """Drop what torch has kept for meshes: those of another rehearsal are equal, and their groups do not exist."""
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


def _adapt_torch(patches: ExitStack) -> None:
    """Replace what torch computes from the values of tensors, which have none."""
    build = DeviceMesh.__init__

    def mesh(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        # The coordinates of this rank, which are read from a tensor of ranks.
        with without_modes():
            build(self, *args, **kwargs)

    patch(patches, DeviceMesh, "__init__", mesh)
    patch(patches, dist, "Reducer", _Reducer)
    # References by which the same tensor would be found again; with them, `Module.to` refuses to convert parameters.
    patch(patches, FakeTensorConverter, "set_tensor_memo", lambda *_: None)


def _reduced(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer(), group=group)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Reducer(Reducer):
    """The reducer of ``DistributedDataParallel`` with its final buckets from the start.

    It would agree on them with the other ranks, by a tensor of indices.
    """

    def __init__(self, parameters: Any, indices: Any, limits: Any, *others: Any) -> None:
        group, is_sparse, most, finds_unused, *_ = others
        if not finds_unused:
            # As it does itself after the first backward pass: a small first bucket starts to reduce early.
            first, rebuilt = others[6], others[9]
            indices, limits = assign_buckets(parameters, rebuilt or [first, most], is_sparse)
        super().__init__(parameters, indices, limits, *others)
        self._group, self._is_hooked = group, False

    def prepare_for_forward(self) -> None:
        if not self._is_hooked:
            self._is_hooked = True
            # The futures of this group have no values. A hook of the user's own is kept.
            with contextlib.suppress(RuntimeError):
                register_hook(self, self._group, _reduced)
        super().prepare_for_forward()

    def _rebuild_buckets(self) -> bool:
        return False
