"""``StepRecord``: the state of a fit after an optimizer step, from which one rank can save after an error."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from ..checkpoint import read_manifest, save
from ..checkpoint.background_deletion import Background
from ..checkpoint.write_plan import Snapshot
from ..core.errors import CheckpointError, ConfigurationError, StorageError
from ..data.accumulation_window import Windows
from ..distributed.world import World
from ..run.run import Run
from ..system.atomic_files import make_directory
from .capture import RunState
from .rank_state import capture_rank

# Of several ranks; the supervisor ends a failed rank 20 s after its error.
LIMIT_SECONDS = 15.0
_LOOK_SECONDS = 0.05


class StepRecord:
    """The state of a fit after an optimizer step, where every rank holds the full state.

    Weights and optimizer state are references, valid until the next update begins. All other state is that of the
    moment of the record: buffers, counters, the position in the data, schedulers, callbacks and random generators.
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
        self._state = RunState(run)
        self._state.add_training(run, windows, run.seed, run.loggers.mark())
        self._state.freeze()
        # One rank alone cannot save the generators of the others. Without any, a resumed run seeds all of them.
        self._rank_document = capture_rank(run, windows) if run.world.size == 1 else None

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
            self._write(path, replace(self._state.training(), rank_document=self._rank_document))
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _is_saved(self, path: Path) -> bool:
        """Whether the path holds this or a later step of this run."""
        with suppress(CheckpointError, StorageError, TypeError, KeyError):
            document = read_manifest(path).document
            return bool(document["run"] == self._identity and document["progress"]["global_step"] >= self.step)
        return False

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        work: Background | None = None

        def write() -> None:
            finite = f"at optimizer step {self.step}"
            save(
                path,
                snapshot,
                World.single(torch.device("cpu")),
                finite=finite,
                given_up=lambda: work is not None and work.given_up,
            )

        work = Background(write, self._device)
        if not work.wait(self._limit):
            work.give_up()
            raise StorageError(f"{path} was not written within {LIMIT_SECONDS:g} s.")
        if work.error is not None:
            raise work.error


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
