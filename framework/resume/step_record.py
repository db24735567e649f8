"""``StepRecord``: the state of a fit after an optimizer step, from which one rank can save after an error.

``StepState`` is the part of it that later code of the fit may change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..checkpoint import read_manifest, save
from ..checkpoint.staging import SaveThread
from ..core.errors import CheckpointError, ConfigurationError, StorageError
from ..core.torch_internals import tree_map
from ..data.accumulation_window import Windows
from ..distributed.world import World
from ..run.run import Run
from ..state.module_state import buffer_locations
from ..state.optimizer_state import groups_of
from ..system.atomic_files import make_directory
from .capture import RankState, RunState, StateHolders, counters, place_of

_Buffers = dict[tuple[int, str], Tensor]
"""Tensors by the ``id`` of a module's table of buffers and the key in the table."""


_LEAVES = frozenset({bool, int, float, str, type(None), Tensor})


class StepState:
    """The state of a fit after an optimizer step, read in little time.

    It holds buffers, counters, the position in the data, hyperparameters of optimizers, and the states of schedulers,
    callbacks and other objects. Names, weights and the tensors of optimizers are read by ``restored``: they are the
    same until the next update begins.
    """

    def __init__(self, run: Run, windows: Windows) -> None:
        """Read the state. No collective."""
        self._run = run
        self._progress, self._averages = copy(run.progress), run.averages.state_dict()
        self._place, self._marks = place_of(windows), run.loggers.mark()
        self._groups = [groups_of(optimizer) for optimizer in run.optimizers]
        self._states = _copied(StateHolders(run).states())
        self._buffers = _copied_buffers(run.module)

    def restored(self) -> RunState:
        """Return the full state of the step. Where every rank holds it, no collective.

        Raises:
            ConfigurationError: a hyperparameter of an optimizer cannot be saved.
        """
        run = self._run
        state = RunState(run)
        state.add_training(run, self._place, run.seed, self._marks, self._groups)
        buffers = {
            name: self._buffers[id(table), key]
            for name, (table, key) in buffer_locations(run.module).items()
            if (id(table), key) in self._buffers
        }
        state.go_back(counters(self._progress, self._averages), self._states, buffers)
        return state


def _copied(value: Any) -> Any:
    """Return a copy of nested containers with the same leaves."""
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    # tree_map knows all other containers, but is slow.
    return value if kind in _LEAVES else tree_map(lambda leaf: leaf, value)


def _copied_buffers(module: nn.Module) -> _Buffers:
    found = {
        (id(part._buffers), key): buffer
        for part in module.modules()
        for key, buffer in part._buffers.items()
        if buffer is not None and key not in part._non_persistent_buffers_set
    }
    if not found:
        return {}
    with torch.no_grad():
        copies = [torch.empty_like(buffer) for buffer in found.values()]
        # One kernel for many small tensors on a device.
        torch._foreach_copy_(copies, list(found.values()))
    return dict(zip(found, copies, strict=True))


# Of several ranks; the supervisor ends a failed rank 20 s after its error.
LIMIT_SECONDS = 15.0
_LOOK_SECONDS = 0.05
_T = TypeVar("_T")


class StepRecord:
    """The state of a fit after an optimizer step, where every rank holds the full state.

    Weights and optimizer state are read by ``save``, and must not have been updated before. All other state is that of
    the moment of the record: buffers, counters, the position in the data, schedulers, callbacks and random generators.
    """

    def __init__(self, run: Run, windows: Windows) -> None:
        """Record the state. No collective.

        Raises:
            ConfigurationError: ranks hold parts of the state, which none of them could save alone.
        """
        if not run.traits.replicates or run.traits.weights_on_disk:
            raise ConfigurationError(
                f"a checkpoint after an error is not possible under strategy={run.strategy.name!r}, where each rank "
                "holds a part of the state: remove OnExceptionCheckpoint or save_on_exception=True; "
                "ModelCheckpoint(every_n_train_steps=..., asynchronous=True) limits the steps that an error costs."
            )
        self.step = run.progress.global_step
        self._identity = run.directory.identity
        self._device = run.world.device
        self._limit = None if run.world.size == 1 else LIMIT_SECONDS
        self._state = StepState(run, windows)
        # One rank alone cannot save the generators of the others. Without any, a resumed run seeds all of them.
        self._rank_state = RankState(run, windows) if run.world.size == 1 else None

    def check(self) -> None:
        """Check that the state can be saved. No collective.

        Raises:
            ConfigurationError: a value has a type that cannot be saved.
        """
        self._state.restored()
        self._rank_document()

    def save(self, path: Path) -> bool:
        """Write a checkpoint; return whether this rank wrote it. No collective.

        One of several ranks takes at most ``LIMIT_SECONDS``. If several ranks save, since the error is raised on each
        or the others lost the connection, the first one writes, and the others wait for it.

        Raises:
            PhalanxError: the checkpoint could not be written.
        """
        make_directory(path.parent)
        claim = path.with_name(f".{path.name}.claim-{self._identity}-{self.step}")
        if not _is_first(claim):
            _wait_until_gone(claim)
            return False
        try:
            if self._is_saved(path):
                return False
            self._write(path)
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _is_saved(self, path: Path) -> bool:
        """Whether the path holds this or a later step of this run."""
        with suppress(CheckpointError, StorageError, TypeError, KeyError):
            document = read_manifest(path).document
            return bool(document["run"] == self._identity and document["progress"]["global_step"] >= self.step)
        return False

    def _write(self, path: Path) -> None:
        until = None if self._limit is None else time.monotonic() + self._limit
        late = f"{path} was not written within {LIMIT_SECONDS:g} s."
        # Scalars of an optimizer may be on a device that waits for another rank.
        state = _result(self._device, lambda given_up: self._state.restored(), until, late)
        # Hooks of the user run on this thread.
        snapshot = replace(state.training(), rank_document=self._rank_document())

        def write(given_up: Callable[[], bool]) -> None:
            finite = f"at optimizer step {self.step}"
            save(path, snapshot, World.single(torch.device("cpu")), finite=finite, given_up=given_up)

        _result(self._device, write, until, late)

    def _rank_document(self) -> Any:
        return None if self._rank_state is None else self._rank_state.document()


def _result(device: torch.device, task: Callable[[Callable[[], bool]], _T], until: float | None, late: str) -> _T:
    """Return the result of ``task``, which runs on a thread and is passed a function that returns whether to give up.

    Raises:
        StorageError: the task has not ended at the time ``until``; ``late`` is the message.
    """
    results: list[_T] = []
    work: SaveThread | None = None
    work = SaveThread(lambda: results.append(task(lambda: work is not None and work.given_up)), device)
    if not work.wait(None if until is None else max(0.0, until - time.monotonic())):
        work.give_up()
        raise StorageError(late)
    if work.error is not None:
        raise work.error
    return results[0]


def _is_first(claim: Path) -> bool:
    """Create the file and return True, unless a rank that is still alive has created it."""
    with suppress(FileNotFoundError):
        if time.time() - claim.stat().st_mtime > LIMIT_SECONDS:
            claim.unlink(missing_ok=True)
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _wait_until_gone(claim: Path) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while claim.exists() and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
