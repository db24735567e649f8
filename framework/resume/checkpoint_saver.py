"""Synchronous and asynchronous checkpoint saves of one run, and their error handling.

    save      Collective: waits for the previous save, captures the run, writes it or passes a copy to a thread
    finish    Collective: waits for the asynchronous save and handles its result, the same on all ranks
    close     at the end of the run, also after an error; no collective

In an asynchronous save a thread of every rank writes the rank's part; the threads use a process group of their own, so
that their collectives do not interleave with those of training. When rank 0's thread has finished, it raises a signal
that makes all ranks call ``finish`` at the same boundary; an earlier save or the end of the fit calls it as well. So at
most one save is pending, and no rank acts on a result that other ranks do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from torch.optim import Optimizer

from ..checkpoint.deletion import BackgroundDeletion
from ..checkpoint.save_request import SaveRequest
from ..checkpoint.staging import SaveThread, Staging
from ..checkpoint.write_plan import CheckpointContents
from ..checkpoint.writer import save
from ..core.errors import ConfigurationError, NonFiniteError, PhalanxError, StorageError
from ..core.split_optimizer import optimizers_in
from ..data.accumulation_window import Windows
from ..distributed.control import Signal
from ..distributed.world import World
from ..run.run import Run
from ..state.frozen_base import FrozenBase
from ..state.module_state import shapes_of
from .capture import capture_run
from .step_record import StepRecord

_FAILURES_IN_A_ROW = 3
_TOLERATED = (ConfigurationError, NonFiniteError, StorageError)
# Seconds that a pending save may still take after an error. The supervisor ends the other ranks soon after one that
# failed, so several ranks get little time; a single process may still finish a large checkpoint.
_GRACE_SECONDS, _GRACE_SECONDS_ALONE = 1.0, 30.0
_QUIET_SECONDS = 0.2  # after it, a single process says that it still writes
_LAST_SECONDS = 1.0
# Bytes per element of canonical state, which is float32 for any compute dtype.
_ELEMENT_BYTES = 4


def num_moments(optimizer: Optimizer) -> int:
    """Return the approximate number of parameter-sized tensors in an optimizer's state per parameter."""
    defaults = [part.defaults for part in optimizers_in(optimizer)]
    return max(2 if "betas" in each else int(bool(each.get("momentum", 1))) for each in defaults)


@dataclass
class _Pending:
    """An asynchronous save that has not finished."""

    number: int
    request: SaveRequest
    work: SaveThread
    notes: list[str] = field(default_factory=list)


class Saver:
    """Saves checkpoints of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.base: FrozenBase | None = None
        self.before_save: Callable[[], object] | None = None
        """Called before each save, on all ranks; it raises if the state must not be saved."""
        self._windows: Windows | None = None
        self._staging = Staging(run.world.device)
        self._deletion = BackgroundDeletion()
        self._apart: World | None = None
        self._pending: _Pending | None = None
        self._number = 0
        self._failures: dict[str, tuple[int, PhalanxError]] = {}
        """For each failure key whose last save failed: the number of failures in a row, and the last error."""

    @property
    def is_pending(self) -> bool:
        """Whether an asynchronous save is in progress, which is the same on all ranks."""
        return self._pending is not None

    @property
    def sharded(self) -> bool:
        """Whether every rank writes its own part of a checkpoint."""
        return not self._run.traits.replicates

    def follow(self, windows: Windows) -> None:
        """Save the position in the data of these windows with every checkpoint from now on."""
        self._windows = windows

    def keep_base(self) -> None:
        """Record the weights with which the fit begins, if checkpoints leave out those that stay frozen. Collective."""
        run = self._run
        if not run.module.save_frozen:
            self.base = FrozenBase(run.strategy, run.module, run.world)

    def record(self) -> StepRecord:
        """Return a record of the state after the last optimizer step; see ``StepRecord``."""
        assert self._windows is not None
        return StepRecord(self._run, self._windows)

    def prepare(self, size: int = 0) -> None:
        """Prepare asynchronous saves of about ``size`` bytes on this rank. Collective."""
        if self._apart is None:
            self._apart = self._run.world.apart()
        if self.sharded or self._run.world.is_global_zero:
            self._staging.reserve(size)

    def estimate(self, weights_only: bool) -> int:
        """Return the approximate size of a checkpoint in bytes, summed over ranks.

        Optimizer state is estimated by the type of the optimizer, as it does not exist before the first step.
        """
        run = self._run
        trained = {name for name, parameter in run.module.named_parameters() if parameter.requires_grad}
        absent = FrozenBase.frozen_names(run.module) if self.base is not None else set[str]()
        sizes = {name: prod(shape) for name, shape in shapes_of(run.strategy, run.module).items() if name not in absent}
        elements = sum(sizes.values())
        if not weights_only and run.optimizers:
            most = max(map(num_moments, run.optimizers))
            elements += most * sum(size for name, size in sizes.items() if name in trained)
        return _ELEMENT_BYTES * elements

    def save(self, request: SaveRequest) -> None:
        """Save the state of the run after its last optimizer step. Collective.

        Raises:
            NonFiniteError: on all ranks; a weight is NaN or infinite, and the request is not tolerant.
            StorageError: on all ranks; the checkpoint could not be written, and the request is not tolerant, or it is
                the third failure in a row. Existing checkpoints are unchanged.
            ConfigurationError: the call is in the middle of an accumulation window.
        """
        run = self._run
        run.check_together("save_checkpoint")
        # At most one save is pending: a second one would need its own copy of the state in memory.
        self.finish()
        if run.in_window:
            raise ConfigurationError(
                "save_checkpoint was called within an optimizer step, where gradients are incomplete: call "
                "it in on_train_batch_end once trainer.global_step has grown, or at an epoch's end."
            )
        if self.before_save is not None:
            self.before_save()
        notes: list[str] = []
        error: BaseException | None = None
        with run.heartbeat.section("save"):
            contents = capture_run(run, self._windows, run.seed, request.weights_only)
            request.step = run.progress.global_step
            if request.asynchronous:
                self._write_behind(request, contents)
                return
            try:
                self._write(request, contents, run.world, notes, lambda: False)
            except PhalanxError as met:
                error = met
        self._handle_result(request, error, notes)

    def finish(self, number: int | None = None) -> None:
        """Wait for the asynchronous save, if one is pending, and handle its result. Collective.

        With ``number`` wait only if the save with this number is the pending one. Raises the same errors as ``save``.
        """
        pending = self._pending
        if pending is None or number not in (None, pending.number):
            return
        with self._run.heartbeat.section("save"):
            pending.work.wait()
        self._pending = None
        self._handle_result(pending.request, pending.work.error, pending.notes)

    def end(self) -> None:
        """Wait for pending saves and deletions; raise if the most recent save of any failure key failed. Collective.

        Raises:
            StorageError: on all ranks. After the last save no later one can replace it, so that a tolerant request
                raises as well.
        """
        self.finish()
        with self._run.heartbeat.section("save"):
            self._deletion.wait()
        for _, error in self._failures.values():
            raise StorageError(f"the training is done, but its last checkpoint is not on the disk: {error}") from None

    def close(self) -> None:
        """Release resources. A save that is pending after a failure is given a grace period. No collective."""
        pending, self._pending, over = self._pending, None, True
        self._staging.close()
        # The reference would keep the worker processes of the data alive.
        self._windows = self.before_save = None
        if pending is not None:
            alone = self._run.world.size == 1
            if not pending.work.wait(_QUIET_SECONDS if alone else _GRACE_SECONDS) and alone:
                self._run.note(f"{pending.request.path} is still being written: interrupt to leave it.")
                pending.work.wait(_GRACE_SECONDS_ALONE)
            pending.work.give_up()
            over = pending.work.wait(_LAST_SECONDS)
            if not over or pending.work.error is not None:
                lost = StorageError(f"{pending.request.path} was not saved: the run ended before it was written.")
                if not pending.request.optional:
                    self._run.note(str(lost))
                    pending.request.on_done(lost)
        # After a successful fit no deletion is pending; after a failure the next run deletes the rest.
        self._deletion.close(_LAST_SECONDS)
        for text in self._deletion.problems():
            self._run.note(text)
        # The saving thread may still use its process group, which is released together with the thread: destroying it
        # here could crash a collective in progress.
        if self._apart is not None and (pending is None or over):
            self._apart.close()
        self._apart = None

    def _write_behind(self, request: SaveRequest, contents: CheckpointContents) -> None:
        self.prepare()
        run, apart = self._run, self._apart
        assert apart is not None
        if self.sharded or run.world.is_global_zero:
            state = run.strategy.state
            contents = self._staging.take(contents, [state.stepping_optimizer(one) for one in run.optimizers])
        else:
            # Rank 0 writes for all ranks. This rank needs no copy of its state, which training may change now.
            contents = self._staging.take(CheckpointContents({}, None, contents.rank_document))
        self._number += 1
        number, notes = self._number, list[str]()
        work: SaveThread | None = None

        def write() -> None:
            self._staging.finish()
            self._write(request, contents, apart, notes, lambda: work is not None and work.given_up)

        def over() -> None:
            # Runs in the saving thread, which must not call ``finish``: the main thread may be in a collective.
            if run.world.is_global_zero:
                run.triggers.post(Signal.SAVE_DONE, number)

        work = SaveThread(write, run.world.device, over)
        self._pending = _Pending(number, request, work, notes)

    def _write(
        self,
        request: SaveRequest,
        contents: CheckpointContents,
        world: World,
        notes: list[str],
        given_up: Callable[[], bool],
    ) -> None:
        when = f"at optimizer step {request.step}"
        leads = world.is_global_zero if request.nodes is None else request.nodes.leads
        if leads:
            request.make_room()
        save(
            request.path,
            contents,
            world,
            self.sharded,
            also=request.also,
            finite=when,
            given_up=given_up,
            deletion=self._deletion,
            nodes=request.nodes,
        )
        if world.is_global_zero:
            notes += request.prune(self._deletion)

    def _handle_result(self, request: SaveRequest, error: BaseException | None, notes: list[str]) -> None:
        """Handle the result of a save, the same on all ranks."""
        note = self._run.note
        for text in [*notes, *self._deletion.problems()]:
            note(text)
        if error is None:
            self._failures.pop(request.failure_key, None)
            request.on_done(None)
            return
        if isinstance(error, PhalanxError):
            request.on_done(error)
        if request.optional and isinstance(error, _TOLERATED):
            return
        if not request.tolerant or not isinstance(error, _TOLERATED):
            raise error
        if isinstance(error, NonFiniteError):
            note(f"No checkpoint was saved at step {request.step}: {error}")
            return
        count = 1 + (self._failures[request.failure_key][0] if request.failure_key in self._failures else 0)
        self._failures[request.failure_key] = count, error
        if count >= _FAILURES_IN_A_ROW:
            raise type(error)(f"{error} It was the third save in a row that failed, so the run ends.") from None
        note(f"{error} Training continues, and older checkpoints are unchanged ({count} of 3 in a row).")
