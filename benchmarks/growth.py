"""Costs by number of ranks: measured for as many ranks as this machine can start, computed for more.

If there are more ranks than cores, elapsed time mostly shows how long ranks wait for a core; CPU time is comparable.
Run as a module under ``Fabric`` it is one of the ranks, and rank 0 prints the results of all.
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

from .growth_computed import computed
from .tables import Table, results
from .task import Job, build, loader_of, optimizer_of

RANKS, PRETENDED = (2, 4, 8, 16), (64, 256, 1024, 4096)
MILLI, MICRO, KILO, MEGA = 1e3, 1e6, 1 / 1024, 1 / 1024**2
# Offset of tcpi_bytes_received in the kernel's struct tcp_info.
_RECEIVED_AT = 128
# The length of a step's control reduction.
NUMBERS = 11
TIMES = 5

Found = dict[str, float]
Rows = list[tuple[str, str, float]]

_STAGES = {"met": "the default group", "control": "the default and control groups", "apart": "all three groups"}
_START: Rows = [
    ("creating the control group, elapsed ms", "control seconds", MILLI),
    ("creating the control group, CPU ms", "control computed", MILLI),
    ("size of the addresses that a rank receives for the control group, KiB", "control bytes", KILO),
    ("size of these addresses with lazy connections, KiB", "lazy control bytes", KILO),
    *((f"sockets with {title}", f"{stage} sockets", 1) for stage, title in _STAGES.items()),
    ("sockets with all three groups and lazy connections", "lazy apart sockets", 1),
    *((f"threads with {title}", f"{stage} threads", 1) for stage, title in _STAGES.items()),
    ("private memory before the model is created, MB", "apart private", MEGA),
]
_MESSAGES: Rows = [
    ("reduction through shared memory, CPU µs", "board computed", MICRO),
    ("reduction through shared memory, elapsed µs", "board seconds", MICRO),
    ("reduction on two nodes, CPU µs", "nodes computed", MICRO),
    ("reduction on two nodes, elapsed µs", "nodes seconds", MICRO),
    ("reduction through Gloo, CPU µs", "gloo computed", MICRO),
    ("reduction through Gloo, elapsed µs", "gloo seconds", MICRO),
    ("all-gather of a small object, CPU µs", "object computed", MICRO),
    ("all-gather of a small object, KiB received", "object received", KILO),
]
_CHECKPOINT: Rows = [
    ("files", "files", 1),
    ("size of the manifest, KiB", "manifest", KILO),
    ("collectives in a save", "save exchanges", 1),
    ("data that rank 0 receives in a save, KiB", "save received", KILO),
    ("data that the last rank receives in a save, KiB", "save received", KILO),
    ("duration of a save, ms", "save seconds", MILLI),
    ("collectives in a load", "load exchanges", 1),
    ("data that each rank receives in a load, KiB", "load received", KILO),
    ("duration of a load, ms", "load seconds", MILLI),
]
_COMPUTED_CHECKPOINT: Rows = [
    ("files", "files", 1),
    ("tensor pieces", "parts", 1),
    ("save plans that each rank receives, MB", "plans", MEGA),
    ("RNG states that rank 0 receives, MB", "documents", MEGA),
    ("assigning pieces to ranks, s on each rank", "assign seconds", 1),
    ("size of the manifest, MB", "manifest", MEGA),
    ("serializing the manifest, s on rank 0", "dump seconds", 1),
    ("parsing and checking the manifest, s on each rank", "parse seconds", 1),
    ("memory of the parsed manifest, MB", "parsed", MEGA),
    ("finding the pieces that a rank loads to resume on half as many ranks, s", "map seconds", 1),
    ("files that a rank opens to resume on half as many ranks", "opened", 1),
]
_COMPUTED_WORK: Rows = [
    ("reading the next batch of a shuffled dataset, µs", "training", MICRO),
    ("reading the next batch in an evaluation, µs", "evaluation", MICRO),
    ("reducing 20 logged means at the end of an epoch, ms", "reducing", MILLI),
    ("reading the heartbeats of all ranks, ms", "watching", MILLI),
]


def growth(rounds: int, quick: bool) -> Iterator[Table]:
    """Measure the ranks of this machine, and compute the cost of the same functions with the input of more ranks."""
    counts, operations = (RANKS[:1], 10) if quick else (RANKS, 200)
    measured = {count: ranks for count in counts if (ranks := _ranks(count, operations))}
    for count, ranks in measured.items():
        for rank, lazy in zip(ranks, _ranks(count, 0, TORCH_GLOO_LAZY_INIT="1"), strict=True):
            rank |= {f"lazy {name}": value for name, value in lazy.items()}
    head = ["ranks", *map(str, measured)]
    meeting = [
        "time until all ranks have connected, s",
        *(f"{max(_each(ranks, 'met seconds')):.1f}" for ranks in measured.values()),
    ]
    yield Table("start-up by ranks", head, [meeting, *_medians(_START, measured)])
    yield Table("control messages by ranks", head, _medians(_MESSAGES, measured))
    for strategy in ("ddp", "fsdp"):
        found = {count: [rank[strategy] for rank in ranks] for count, ranks in measured.items()}
        rows = _medians(_CHECKPOINT, found)
        for row, at in ((3, 0), (4, -1)):
            rows[row][1:] = [f"{ranks[at]['save received'] * KILO:.1f}" for ranks in found.values()]
        yield Table(f"checkpoint by ranks under {strategy}", head, rows)
    yield from beyond(PRETENDED[:2] if quick else PRETENDED, 1 if quick else 8)


def beyond(sizes: tuple[int, ...], layers: int) -> Iterator[Table]:
    """Compute what the same functions cost with the input that so many ranks would send."""
    found = {size: [computed(size, layers)] for size in sizes}
    head = ["ranks", *map(str, sizes)]
    yield Table("computed checkpoint by ranks", head, _medians(_COMPUTED_CHECKPOINT, found))
    yield Table("computed work by ranks", head, _medians(_COMPUTED_WORK, found))


def _each(ranks: list[Any], name: str) -> list[float]:
    return [rank[name] for rank in ranks]


def _medians(rows: Rows, found: dict[int, list[Any]]) -> list[list[str]]:
    """Return rows of medians over all ranks."""
    return [
        [title, *(_short(statistics.median(_each(ranks, name)) * scale) for ranks in found.values())]
        for title, name, scale in rows
    ]


def _short(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _ranks(count: int, operations: int, **variables: str) -> list[dict[str, Any]]:
    """Start ranks; return the measurements of each. Without ``operations`` they only create their process groups."""
    arguments = str(count), str(time.monotonic()), str(operations)
    found: list[list[dict[str, Any]]] = results("benchmarks.growth", *arguments, variables=variables)
    return found[0] if found else []


# ---- in a rank -------------------------------------------------------------------------------------------------------


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
    numbers, vector = [1.0] * NUMBERS, torch.ones(NUMBERS, dtype=torch.float64)
    found["board seconds"], found["board computed"] = cost(world, lambda: world.control_reduce(numbers).wait(), count)
    board = share_board(world.control, (str(2 * world.rank // world.size),))
    reduce_on_nodes = world.control_reduce if board is None else board.post
    found["nodes seconds"], found["nodes computed"] = cost(world, lambda: reduce_on_nodes(numbers).wait(), count)
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


def checkpoints(strategy: str, ranks: int, directory: Path) -> Found:
    """Save and load a small GPT with AdamW's state and every rank's random states."""
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=ranks)
    fabric.launch()
    job = Job(1, model="0.9m")
    net = build(job)
    model, optimizer = fabric.setup(net, optimizer_of(net, job))
    fabric.backward(model(next(iter(loader_of(job)))))
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
    found["files"] = len(os.listdir(path))
    found["manifest"] = (path / "manifest.json").stat().st_size
    fabric.barrier()
    fabric.free_memory()
    fabric.world.close()
    return found


def main() -> None:
    ranks, began, count = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=ranks)
    fabric.launch()
    found: dict[str, Any] = {"met seconds": time.monotonic() - began}
    torch.set_num_threads(1)
    world = fabric.world
    groups(world, found)
    if count:
        messages(world, found, count)
        directory = Path(world.broadcast_object(tempfile.mkdtemp() if world.is_global_zero else ""))
        for strategy in ("ddp", "fsdp"):
            found[strategy] = checkpoints(strategy, ranks, directory)
            gc.collect()
        world.barrier()
        if world.is_global_zero:
            shutil.rmtree(directory, ignore_errors=True)
    everyone = world.all_gather_object(found)
    if world.is_global_zero:
        print("RESULT " + json.dumps(everyone), flush=True)


if __name__ == "__main__":
    main()
