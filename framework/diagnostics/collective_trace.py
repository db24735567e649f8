"""``Trainer(debug="collectives")``: before each collective the ranks compare their next call.

Ranks whose collectives differ hang, or exchange wrong numbers without an error. In this mode each rank first writes a
description of its next collective into the process group's store (kind, shape, dtype, and the line of the user's code),
and reads those of the others: the first difference is an error on all ranks that names both sides. It costs several
messages for each collective, so it is for finding a fault, not for training.

It compares the functions of ``torch.distributed`` if they are called through the module, phalanx's own reductions and
barriers, and backward passes that reduce gradients. Reductions that torch runs in C++ during a backward pass are not
visible in Python.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import DesyncError
from ..core.package_paths import OWN_FOLDERS
from ..core.patches import patch
from ..core.wording import counted
from ..distributed.rendezvous import shared_store

if TYPE_CHECKING:
    from ..run.run import Run

LIMIT_SECONDS = 120.0
_MAIN = "main"
_LEFT = "has left the fit with"
# The arguments that must be the same on all ranks. Tensors are compared by shape and dtype, lists are not compared.
_TRACED: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("tensor", "op"),
    "broadcast": ("tensor", "src"),
    "reduce": ("tensor", "op", "dst"),
    "all_gather": ("tensor",),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather_single": ("input_tensor", "output_tensor"),
    "reduce_scatter": ("output", "op"),
    "reduce_scatter_tensor": ("output", "input", "op"),
    "reduce_scatter_single": ("output", "input", "op"),
    "gather": ("tensor", "dst"),
    "scatter": ("tensor", "src"),
    "all_to_all": (),
    "all_to_all_single": (),
    "barrier": (),
}
_LIBRARIES = (str(Path(torch.__file__).parent), "/site-packages/", "<frozen")


@contextmanager
def comparing_collectives(run: Run, step: object) -> Generator[None, None, None]:
    """Compare the collectives of all ranks within the context. Collective; does nothing in one process.

    ``step`` is the object that the loop calls for each optimizer step.
    """
    if run.world.size == 1:
        yield
        return
    trace = CollectiveTrace(run)
    with ExitStack() as patches:
        trace.install(patches, step)
        try:
            yield
            # A rank that continues would wait for collectives that the other ranks never call.
            trace.compare("the end of the fit", "", None)
        except BaseException as error:
            trace.report_exit(error)
            raise


class CollectiveTrace:
    """Compares the collectives of one fit."""

    def __init__(self, run: Run, limit_seconds: float = LIMIT_SECONDS) -> None:
        """Collective."""
        self._run = run
        self._world = run.world
        self._limit = limit_seconds
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._syncs = True
        # The keys of another fit of these ranks may still be in the store.
        token = self._world.broadcast_object(time.time_ns())
        c10d: Any = dist.distributed_c10d
        self._store: Any = c10d.PrefixStore(f"collectives-{token}", shared_store())

    def install(self, patches: ExitStack, step: object) -> None:
        """Compare before every collective from now on, until ``patches`` is closed."""
        for name, arguments in _TRACED.items():
            real = getattr(dist, name, None)
            if real is not None:
                traced = self._traced(name, real, arguments)
                for home in (dist, dist.distributed_c10d):
                    if getattr(home, name, None) is real:
                        patch(patches, home, name, traced)
        world, strategy = self._world, self._run.strategy
        patch(patches, world, "control_reduce", self._before(world.control_reduce, "a control reduction"))
        patch(patches, world, "barrier", self._before(world.barrier, "a barrier"))
        patch(patches, strategy, "sync_gradients", self._noting_sync(strategy.sync_gradients))
        backward = self._before_backward(strategy.backward)
        patch(patches, strategy, "backward", backward)
        if (passes := getattr(step, "passes", None)) is not None:
            # They hold bound references to the strategy's methods, so patching the strategy has no effect on them.
            patch(patches, passes, "run_backward", backward)
            patch(patches, passes, "sync", strategy.sync_gradients)

    def report_exit(self, error: BaseException) -> None:
        """Notify ranks that wait for this one that it has left the fit. Not collective."""
        description = json.dumps([f"{_LEFT} {type(error).__name__}: {str(error)[:200]}", "", ""])
        with self._lock, suppress(RuntimeError):
            for stream in {_MAIN, *self._counts}:
                self._store.set(self._key(stream, self._counts.get(stream, 0) + 1, self._world.rank), description)

    def _traced(self, name: str, real: Callable[..., Any], arguments: Sequence[str]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "collective", False):
                # torch's functions call one another; only the outermost call is the user's.
                return real(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            what = ", ".join(text for key in arguments if (text := _shown(given.arguments.get(key))))
            self.compare(name, what, given.arguments.get("group"))
            self._inside.collective = True
            try:
                return real(*args, **kwargs)
            finally:
                self._inside.collective = False

        return call

    def _before(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not getattr(self._inside, "collective", False):
                self.compare(kind, counted(len(args[0]), "number") if args else "", None)
            return real(*args)

        return call

    def _noting_sync(self, real: Callable[[bool], None]) -> Callable[[bool], None]:
        def sync_gradients(enabled: bool) -> None:
            self._syncs = enabled
            real(enabled)

        return sync_gradients

    def _before_backward(self, real: Callable[..., None]) -> Callable[..., None]:
        def backward(loss: Tensor, **options: Any) -> None:
            if self._syncs or self._run.traits.backward_has_collectives:
                self.compare("a backward pass that reduces gradients", "", None)
            real(loss, **options)

        return backward

    def compare(self, kind: str, what: str, group: Any) -> None:
        """Publish what this rank calls next; return once all members of ``group`` have published the same.

        Raises:
            DesyncError: another rank calls something else, has left, or does not call anything in time.
        """
        rank, size = self._world.rank, self._world.size
        members = range(size) if group is None else dist.get_process_group_ranks(group)
        if rank not in members or len(members) == 1:
            return
        # The calls of the main threads of all ranks have one order, for any groups.
        is_common = len(members) == size and threading.current_thread() is threading.main_thread()
        stream = _MAIN if is_common else group.group_name if group is not None else _thread_name()
        with self._lock:
            number = self._counts[stream] = self._counts.get(stream, 0) + 1
        mine = [kind, what, _call_site()]
        self._store.set(self._key(stream, number, rank), json.dumps(mine))
        for other in members:
            if other != rank:
                theirs = self._read(stream, number, other, mine)
                if theirs != mine:
                    step = self._run.progress.global_step
                    raise DesyncError(_difference(number, step, (rank, mine), (other, theirs)))
        if number > 1:
            # All ranks have reached this collective, so all have read the previous entry.
            self._store.delete_key(self._key(stream, number - 1, rank))

    def _read(self, stream: str, number: int, other: int, mine: list[str]) -> list[str]:
        key = self._key(stream, number, other)
        began, pause = time.monotonic(), 1e-4
        # The store's own wait would block the connection for other threads of this rank.
        while not self._store.check([key]):
            if time.monotonic() - began > self._limit:
                raise DesyncError(
                    f"rank {self._world.rank} {_described(mine)}, its {_ordinal(number)} collective, and rank {other} "
                    f"has not called one in {self._limit:.0f} s: look there for a condition, or a wait."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        found: list[str] = json.loads(self._store.get(key))
        return found

    @staticmethod
    def _key(stream: str, number: int, rank: int) -> str:
        return f"{stream}/{number}/{rank}"


def _thread_name() -> str:
    """Return a name of this thread that is the same on all ranks."""
    thread = threading.current_thread()
    # On CUDA, backward passes run in a thread of torch, which Python names by a number in the order of first use.
    return "backward" if isinstance(thread, threading._DummyThread) else thread.name


def _shown(value: Any) -> str:
    """Return the text to compare for an argument: shape and dtype of a tensor, else its ``str``."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "" if value is None else str(value).removeprefix("RedOpType.")


def _call_site() -> str:
    """Return the file and line of the innermost call in the user's own code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OWN_FOLDERS) and not any(part in file for part in _LIBRARIES):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _described(description: Sequence[str]) -> str:
    kind, what, site = description
    if kind.startswith(_LEFT):
        return kind
    return f"is at {kind}{f' of {what}' if what else ''}{f' ({site})' if site else ''}"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _difference(number: int, step: int, mine: tuple[int, list[str]], theirs: tuple[int, list[str]]) -> str:
    """Return the message, the same on both ranks."""
    (first, one), (second, other) = sorted((mine, theirs))
    part = next(name for name, a, b in zip(("kind", "shape, dtype or root", "line"), one, other, strict=True) if a != b)
    return (
        f"ranks {first} and {second} differ at optimizer step {step}, in their {_ordinal(number)} collective (its "
        f"{part}): rank {first} {_described(one)}, rank {second} {_described(other)}. Every rank must call the same "
        "collectives in the same order: look for a condition on the rank, or on its data, around them."
    )
