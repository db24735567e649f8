"""``staged``: a process group for ranks that share one CUDA device, which NCCL refuses.

Tensors are copied to the host, gloo does the work there, and the results are copied back. Each collective is complete
when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"
# torch does not export all of it.
_c10d: Any = torch._C._distributed_c10d


def _done(tensors: Any) -> Any:
    """Return the handle of a collective that is complete."""
    flat = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    devices = sorted({tensor.device.index for tensor in flat if tensor.is_cuda})
    future: Any = torch.futures.Future(devices=[torch.device("cuda", index) for index in devices])
    future.set_result(tensors)
    return _c10d._create_work_from_future(future)


# Its annotations are those of one version, and declare methods that Python cannot override.
_ProcessGroup: Any = dist.ProcessGroup


class StagedGroup(_ProcessGroup):  # type: ignore[misc]
    """The collectives that ``ddp``, ``fsdp`` and ``hsdp`` use, under their names in torch 2.11 and later."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = _c10d.ProcessGroupGloo(store, rank, size, timeout)
        self._number, self._count, self._known_as = rank, size, ""

    def getBackendName(self) -> str:
        """Return the name that torch's messages show."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name under which torch registered the group, which it keeps in backends otherwise."""
        # torch forgets it before it asks for the last time.
        self._known_as = dist.distributed_c10d._world.pg_names.get(self, self._known_as)
        return self._known_as

    def size(self) -> int:
        """Return the number of ranks."""
        return self._count

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._number

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place."""
        options = _c10d.AllreduceOptions() if opts is None else opts
        mean = options.reduceOp == dist.ReduceOp.AVG
        for tensor in tensors:
            given = _c10d.AllreduceOptions()
            given.reduceOp = dist.ReduceOp.SUM if mean else options.reduceOp
            self._staged([tensor], partial(self._gloo.allreduce, opts=given))
            if mean:
                tensor.detach().div_(self._count)
        return _done(list(tensors))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """Overwrite tensors with those of the root."""
        self._staged(tensors, partial(self._gloo.broadcast, opts=opts))
        return _done(list(tensors))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Gather the input of each rank into one output for each."""
        hosts = [torch.empty_like(inputs[0], device="cpu") for _ in range(self._count)]
        self._gloo.allgather([hosts], [inputs[0].detach().cpu()]).wait()
        for output, host in zip(outputs[0], hosts, strict=True):
            output.detach().copy_(host)
        return _done([*outputs[0]])

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.allgather([list(output.detach().chunk(self._count))], [given])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """Gather each input into one output."""
        for output, given in zip(outputs, inputs, strict=True):
            self._allgather_base(output, given)
        return _done(list(outputs))

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        whole = given.detach().clone()
        options = _c10d.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        self.allreduce([whole], options)
        output.detach().copy_(whole.chunk(self._count)[self._number].view(output.shape))
        return _done([output])

    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        """Reduce each input, and keep this rank's part of it."""
        for output, given in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, given, opts)
        return _done(list(outputs))

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        self._gloo.barrier().wait()
        return _done([])

    def _staged(self, tensors: Sequence[Tensor], collective: Callable[[list[Tensor]], Any]) -> None:
        hosts = [tensor.detach().cpu().contiguous() for tensor in tensors]
        collective(hosts).wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.detach().copy_(host)


def register() -> str:
    """Make the group known to ``init_process_group``; return its name."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
    return NAME
