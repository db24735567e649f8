"""Checks for ``phalanx doctor`` that need torch: GPUs, DeepSpeed's ops, and ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

import torch

from ..framework.core.errors import PhalanxError
from ..framework.core.size_text import size_text
from ..framework.distributed.world import World
from ..framework.launch.fork_launcher import launch_function
from ..strategies.deepspeed.library import require_deepspeed
from ..strategies.deepspeed.ops import OPS, check_build, missing_ops
from .machine_checks import Check

_ELEMENTS, _ROUNDS = 1 << 20, 5


def check_gpus() -> Iterator[Check]:
    """Show the CUDA devices, and check that each pair of them can reach the other's memory."""
    count = torch.cuda.device_count()
    if not count:
        built = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no device"
        yield Check("GPUs", "devices", True, f"none: {built}")
        return
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        yield Check("GPUs", f"device {index}", True, f"{found.name}, {size_text(found.total_memory)}")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if pairs:
        shown = "all pairs" if not apart else f"not between {', '.join(f'{a} and {b}' for a, b in apart[:3])}"
        yield Check("GPUs", "peer access", not apart, shown, "transfers go through host memory, which is slower")


def check_deepspeed(build: bool) -> Iterator[Check]:
    """Check DeepSpeed, its ops, and the compiler that builds them; with ``build`` build those that are missing."""
    try:
        require_deepspeed("zero2")
    except PhalanxError as error:
        text = str(error)
        yield Check("DeepSpeed", "package", "not installed" in text, text.partition(": ")[0], text)
        return
    try:
        check_build(OPS)
    except PhalanxError as error:
        found, _, advice = str(error).partition(": ")
        yield Check("DeepSpeed", "tools", False, found, advice)
        build = False
    if build and (missing := missing_ops(OPS)):
        # In a process of its own, as ranks are forked from this one, which must not load an op.
        subprocess.run([sys.executable, "-m", "phalanx.strategies.deepspeed.ops", *missing], check=False)
    missing = missing_ops(OPS)
    for name in OPS:
        yield Check("DeepSpeed", name, True, "not built yet (--build builds it)" if name in missing else "built")


def time_reduction() -> float:
    """Return the seconds of an all-reduce of 4 MB of two ranks that are forked from this process."""
    seconds: float = launch_function(_reduce, (), 2)
    return seconds


def _reduce() -> float:
    world = World.from_environment("cpu")
    try:
        tensor, times = torch.ones(_ELEMENTS), []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            world.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        return median(times)
    finally:
        world.close()
