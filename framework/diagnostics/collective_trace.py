"""``Trainer(debug="collectives")``: before each collective the ranks compare what they are about to do.

Ranks whose collectives differ hang, or exchange the wrong numbers in silence. Here each rank first writes into the
process group's store what it is about to call (kind, shape, dtype, and the line of the user's code), and reads what the
others wrote: the first difference is an error on all of them that names both. It costs a few messages for each
collective, so it is for finding a fault, not for training.

Seen are the functions of ``torch.distributed``, whoever calls them through the module, the reductions and barriers of
phalanx's own, and backward passes that reduce gradients, which torch does in C++, where nothing else can look.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import DesyncError
from ..core.package_paths import OWN_FOLDERS
from ..distributed.rendezvous import shared_store

if TYPE_CHECKING:
    from ..run.run import Run

LIMIT_SECONDS = 120.0
_MAIN = "main"
_LEFT = "has left the fit with"
_WATCHED: Mapping[str, tuple[str, ...]] = {
    # Which of its arguments must be alike on all ranks; of lists the tensors in them.
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
    """Compare the collectives of all ranks in this context. Collective; in one process there are none.

    ``step`` is what the loop calls for each optimizer step.
    """
    if run.world.size == 1:
        yield
        return
    watch = CollectiveWatch(run, step)
    watch.install()
    try:
        yield
        watch.end()
    except BaseException as error:
        watch.leave(error)
        raise
    finally:
        watch.remove()


class CollectiveWatch:
    """Compares collectives while it is installed. One for each fit."""

    def __init__(self, run: Run, step: object, limit_seconds: float = LIMIT_SECONDS) -> None:
        """Collective."""
        self._run = run
        self._step = step
        self._world = run.world
        self._limit = limit_seconds
        self._undo: list[Callable[[], None]] = []
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._syncs = True
        # No other fit of these ranks has such keys.
        token = self._world.broadcast_object(time.time_ns())
        c10d: Any = dist.distributed_c10d
        self._store: Any = c10d.PrefixStore(f"collectives-{token}", shared_store())

    # ---- put on and taken off -------------------------------------------------------------------------------------

    def install(self) -> None:
        """Look at every collective from here on."""
        for name, arguments in _WATCHED.items():
            real = getattr(dist, name, None)
            if real is not None:
                watched = self._watched(name, real, arguments)
                for home in (dist, dist.distributed_c10d):
                    if getattr(home, name, None) is real:
                        self._put(home, name, watched)
        world, strategy = self._world, self._run.fabric.strategy
        self._put(world, "control_reduce", self._before(world.control_reduce, "a control reduction", shaped=True))
        self._put(world, "barrier", self._before(world.barrier, "a barrier"))
        self._put(strategy, "sync_gradients", self._noting(strategy.sync_gradients))
        backward = self._reducing(strategy.backward)
        self._put(strategy, "backward", backward)
        if "backward" in vars(self._step):
            # Taken hold of once for all steps.
            self._put(self._step, "backward", backward)

    def remove(self) -> None:
        """Take all of it off."""
        while self._undo:
            self._undo.pop()()

    def end(self) -> None:
        """Compare the end of the fit too: a rank that goes on waits for collectives that never come. Collective."""
        if self._undo:
            self._compare("the end of the fit", "", None)

    def leave(self, error: BaseException) -> None:
        """Tell ranks that wait for this one that it comes no more. No collective."""
        if not self._undo:
            return
        told = [f"{_LEFT} {type(error).__name__}: {str(error)[:200]}", "", ""]
        with self._lock, suppress(RuntimeError):
            for stream in {_MAIN, *self._numbers}:
                self._store.set(self._key(stream, self._numbers.get(stream, 0) + 1, self._world.rank), _packed(told))

    def _put(self, home: Any, name: str, value: Any) -> None:
        had = name in vars(home)
        before = getattr(home, name)
        setattr(home, name, value)
        self._undo.append(
            functools.partial(setattr, home, name, before) if had else functools.partial(delattr, home, name)
        )

    # ---- what is watched ------------------------------------------------------------------------------------------

    def _watched(self, name: str, real: Callable[..., Any], arguments: Sequence[str]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "deep", False):
                return real(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            what = ", ".join(text for key in arguments if (text := _shown(given.arguments.get(key))))
            self._compare(name, what, given.arguments.get("group"))
            self._inside.deep = True
            try:
                return real(*args, **kwargs)
            finally:
                self._inside.deep = False

        return call

    def _before(self, real: Callable[..., Any], kind: str, shaped: bool = False) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not getattr(self._inside, "deep", False):
                self._compare(kind, _shown(args[0]) if shaped else "", None)
            return real(*args)

        return call

    def _noting(self, real: Callable[[bool], None]) -> Callable[[bool], None]:
        def sync_gradients(enabled: bool) -> None:
            self._syncs = enabled
            real(enabled)

        return sync_gradients

    def _reducing(self, real: Callable[..., None]) -> Callable[..., None]:
        def backward(loss: Tensor, **options: Any) -> None:
            if self._syncs or self._run.fabric.strategy.traits.backward_has_collectives:
                self._compare("a backward pass that reduces gradients", "", None)
            real(loss, **options)

        return backward

    # ---- the comparison -------------------------------------------------------------------------------------------

    def _compare(self, kind: str, what: str, group: Any) -> None:
        """Tell the other members of a group what comes next here; return once all said the same.

        Raises:
            DesyncError: another one does something else, or does not come.
        """
        rank, size = self._world.rank, self._world.size
        members = range(size) if group is None else dist.get_process_group_ranks(group)
        if rank not in members or len(members) == 1:
            return
        # What all ranks do on their main threads has one order, whatever group it travels on.
        alike = len(members) == size and threading.current_thread() is threading.main_thread()
        stream = _MAIN if alike else group.group_name if group is not None else threading.current_thread().name
        with self._lock:
            number = self._numbers[stream] = self._numbers.get(stream, 0) + 1
        mine = [kind, what, _call_site()]
        self._store.set(self._key(stream, number, rank), _packed(mine))
        for other in members:
            if other != rank:
                theirs = self._read(stream, number, other, mine)
                if theirs != mine:
                    step = self._run.progress.global_step
                    raise DesyncError(_difference(number, step, (rank, mine), (other, theirs)))
        if number > 1:
            # All are here, so all have read what came before.
            self._store.delete_key(self._key(stream, number - 1, rank))

    def _read(self, stream: str, number: int, other: int, mine: list[str]) -> list[str]:
        key = self._key(stream, number, other)
        began, pause = time.monotonic(), 1e-4
        # Not the store's own wait, which would keep other threads of this rank from the store.
        while not self._store.check([key]):
            if time.monotonic() - began > self._limit:
                raise DesyncError(
                    f"rank {self._world.rank} {_doing(mine)}, its {number}. collective, and rank {other} has not come "
                    f"to one in {self._limit:.0f} s: look there for a condition, or a wait."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        found: list[str] = json.loads(self._store.get(key))
        return found

    @staticmethod
    def _key(stream: str, number: int, rank: int) -> str:
        return f"{stream}/{number}/{rank}"


def _packed(told: list[str]) -> str:
    return json.dumps(told)


def _shown(value: Any) -> str:
    """Return how an argument is compared: tensors by shape and dtype, all else by what it says."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "" if value is None else str(value).removeprefix("RedOpType.")


def _call_site() -> str:
    """Return the line of the user's own code that this comes from."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OWN_FOLDERS) and not any(part in file for part in _LIBRARIES):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _doing(told: Sequence[str]) -> str:
    kind, what, site = told
    if kind.startswith(_LEFT):
        return kind
    return f"is at {kind}{f' of {what}' if what else ''}{f' ({site})' if site else ''}"


def _difference(number: int, step: int, mine: tuple[int, list[str]], theirs: tuple[int, list[str]]) -> str:
    """Return the message, the same on both ranks."""
    (first, one), (second, other) = sorted((mine, theirs))
    part = next(name for name, a, b in zip(("kind", "shape, dtype or root", "line"), one, other, strict=True) if a != b)
    return (
        f"ranks {first} and {second} differ at optimizer step {step}, in their {number}. collective (its {part}): rank "
        f"{first} {_doing(one)}, rank {second} {_doing(other)}. Every rank must call the same ones in the same order: "
        "look for a condition on the rank, or on its data, around them."
    )
