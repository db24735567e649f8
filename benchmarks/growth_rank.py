"""The ranks that ``growth.py`` measures. Run as a module it starts them, and rank 0 prints the results of all.

There may be more ranks than cores. Elapsed time then depends on the number of cores; a rank's CPU time is comparable.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx import Fabric
from phalanx.framework.distributed.node_board import share_board
from phalanx.framework.distributed.world import World

from .gpt import GPT, batches, next_token_loss

Found = dict[str, float]
# Offset of tcpi_bytes_received in the kernel's struct tcp_info.
_RECEIVED_AT = 128
# The length of a step's control reduction.
NUMBERS = 11
TIMES = 5


@dataclass
class Traffic:
    """Number of a rank's collectives on objects, and the bytes that it received in them."""

    exchanges: int = 0
    received: int = 0


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count the collectives on objects of a ``World`` in this context, without reductions of a few numbers."""
    traffic, rank = Traffic(), dist.get_rank()
    real = {name: getattr(dist, name) for name in ("all_gather", "broadcast", "gather")}

    def note(received: int) -> None:
        traffic.exchanges += 1
        traffic.received += received

    def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        note(sum(each.nbytes for each in tensors) - tensor.nbytes)
        return real["all_gather"](tensors, tensor, **options)

    def broadcast(tensor: torch.Tensor, src: int, **options: Any) -> Any:
        note(0 if rank == src else tensor.nbytes)
        return real["broadcast"](tensor, src, **options)

    def gather(tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, **options: Any) -> Any:
        note(sum(each.nbytes for each in gather_list) - tensor.nbytes if gather_list else 0)
        return real["gather"](tensor, gather_list, **options)

    for function in (all_gather, broadcast, gather):
        setattr(dist, function.__name__, function)
    try:
        yield traffic
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def cost(world: World, function: Callable[[], object], count: int) -> tuple[float, float]:
    """Return the elapsed seconds and the CPU seconds (of all threads) of a call.

    They are medians over several rounds of ``count`` calls, because the machine may be shared.
    """
    seconds, computed = list[float](), list[float]()
    for _ in range(TIMES):
        world.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            function()
        seconds.append((time.perf_counter() - began) / count)
        computed.append((time.process_time() - used) / count)
    return statistics.median(seconds), statistics.median(computed)


def held() -> Found:
    """Return the number of this process's sockets and threads, and the bytes of its private memory."""
    places = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    sockets = sum(os.path.lexists(place) and os.readlink(place).startswith("socket:") for place in places)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return {"sockets": sockets, "threads": len(os.listdir("/proc/self/task")), "private": private * 1024.0}


def from_store() -> int:
    """Return the bytes that this process has received from the rendezvous store."""
    port, received = int(os.environ["MASTER_PORT"]), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as line:
            if line.getpeername()[1] == port:
                known = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
                received += int.from_bytes(known[_RECEIVED_AT:], sys.byteorder)
    return received


def groups(world: World, found: Found) -> None:
    """Create the process groups of a run with asynchronous saves: default, control, and one for saves."""
    found |= {f"met {name}": value for name, value in held().items()}
    dist.barrier()
    before, began, computed = from_store(), time.perf_counter(), time.process_time()
    _ = world.control
    found["control seconds"] = time.perf_counter() - began
    found["control computed"] = time.process_time() - computed
    found["control bytes"] = from_store() - before
    found |= {f"control {name}": value for name, value in held().items()}
    world.barrier()
    apart = world.apart()
    apart.barrier()
    found |= {f"apart {name}": value for name, value in held().items()}
    world.barrier()
    apart.close()


def messages(world: World, found: Found, count: int) -> None:
    """Measure a control reduction on one node, on two, and in one ring, and an all-gather of a small object."""
    vector = torch.ones(NUMBERS, dtype=torch.float64)
    found["board seconds"], found["board computed"] = cost(world, lambda: world.control_reduce(vector).wait(), count)
    board = share_board(world.control, (str(2 * world.rank // world.size),))
    on_nodes = world.control.allreduce if board is None else lambda vectors: board.post(*vectors)
    found["nodes seconds"], found["nodes computed"] = cost(world, lambda: on_nodes([vector]).wait(), count)
    world.barrier()
    if board is not None:
        board.close()
    reduce = world.control.allreduce
    found["gloo seconds"], found["gloo computed"] = cost(world, lambda: reduce([vector]).wait(), count)
    exchange = max(1, count // 5)
    found["object seconds"], found["object computed"] = cost(world, lambda: world.all_gather_object(None), exchange)
    with counted() as traffic:
        world.all_gather_object(None)
    found["object received"] = traffic.received


def checkpoints(strategy: str, ranks: int, layers: int, directory: Path) -> Found:
    """Save and load a small GPT with AdamW's state and every rank's random states."""
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=ranks)
    fabric.launch()
    model = GPT(layers)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(next_token_loss(model, batches(1, rows=1)[0]))
    optimizer.step()
    path, found = directory / f"{strategy}.ckpt", Found()
    # The first save is a warm-up.
    for name, verb in (("", fabric.save_state), ("save", fabric.save_state), ("load", fabric.load_state)):
        fabric.barrier()
        began = time.perf_counter()
        with counted() as traffic:
            verb(path)
        found[f"{name} seconds"] = time.perf_counter() - began
        found[f"{name} exchanges"], found[f"{name} received"] = traffic.exchanges, traffic.received
    found["sockets"] = held()["sockets"]
    found["files"] = len(os.listdir(path))
    found["manifest"] = (path / "manifest.json").stat().st_size
    fabric.barrier()
    fabric.free_memory()
    fabric.world.close()
    return found


def main() -> None:
    ranks, began, count, layers = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=ranks)
    fabric.launch()
    found: dict[str, Any] = {"met seconds": time.monotonic() - began}
    torch.set_num_threads(1)
    world = fabric.world
    groups(world, found)
    if not count:
        return report(world, found)
    messages(world, found, count)
    directory = Path(world.broadcast_object(tempfile.mkdtemp() if world.is_global_zero else ""))
    try:
        for strategy in ("ddp", "fsdp"):
            found[strategy] = checkpoints(strategy, ranks, layers, directory)
            gc.collect()
    finally:
        world.barrier()
        if world.is_global_zero:
            shutil.rmtree(directory, ignore_errors=True)
    report(world, found)


def report(world: World, found: dict[str, Any]) -> None:
    """Print the results of all ranks, on rank 0."""
    everyone = world.all_gather_object(found)
    if world.is_global_zero:
        print("RESULT " + json.dumps(everyone), flush=True)


if __name__ == "__main__":
    main()
