"""``Saver``: a run's saves, written here or behind the training, and what becomes of them.

    save      Collective: waits for the save before, captures the run, writes it or hands a copy to a thread
    finish    Collective: what came of the save behind the training is heeded, on all ranks alike
    close     the end, however it came; no collective

Behind the training every rank's thread writes its part; they agree among themselves on a world of their own. When rank
0's is over it raises a trigger, so that all ranks settle at the same boundary; a save, or the end of the fit, that
comes first settles as well. So at most one save is under way, and no rank acts on what only it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ..checkpoint import save
from ..checkpoint.background_deletion import BackgroundDeletion
from ..checkpoint.background_task import Background
from ..checkpoint.save_request import SaveRequest
from ..checkpoint.staging import Staging
from ..checkpoint.write_plan import Snapshot
from ..core.errors import ConfigurationError, NonFiniteError, PhalanxError, StorageError
from ..distributed.control import Signal
from . import capture_run

if TYPE_CHECKING:
    from ..data.accumulation_window import Windows
    from ..distributed.world import World
    from ..run.run import Run

_FAILURES_IN_A_ROW = 3
_TOLERATED = (ConfigurationError, NonFiniteError, StorageError)
# Other ranks are ended soon after one that failed; alone, a large checkpoint may still be finished.
_GRACE_SECONDS = {True: 30.0, False: 1.0}
_LAST_SECONDS = 1.0


# What canonical state is kept in, whatever is computed with.
_ELEMENT_BYTES = 4


def _moments(optimizer: Optimizer) -> int:
    """Return about how many tensors of a parameter's size an optimizer keeps for it."""
    defaults = optimizer.defaults
    return 2 if "betas" in defaults else int(bool(defaults.get("momentum", 1)))


@dataclass
class _Pending:
    """A save behind the training."""

    number: int
    request: SaveRequest
    work: Background
    notes: list[str] = field(default_factory=list)


class Saver:
    """The saves of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._windows: Windows | None = None
        self._staging = Staging(run.world.device)
        self._deletion = BackgroundDeletion()
        self._apart: World | None = None
        self._pending: _Pending | None = None
        self._number = 0
        self._failures: dict[str, tuple[int, PhalanxError]] = {}
        """Of those whose last save failed: how many in a row, and the last error."""

    @property
    def sharded(self) -> bool:
        """Whether every rank writes a part."""
        return not self._run.traits.replicates

    def follow(self, windows: Windows) -> None:
        """Save the position in these windows with every checkpoint from now on."""
        self._windows = windows

    def prepare(self, size: int = 0) -> None:
        """Get ready for saves behind the training, of about ``size`` bytes on this rank. Collective."""
        if self._apart is None:
            self._apart = self._run.world.apart()
        if self.sharded or self._run.world.is_global_zero:
            self._staging.reserve(size)

    def estimate(self, weights_only: bool) -> int:
        """Return about how many bytes a checkpoint takes on all ranks; before the first step there are no moments."""
        run = self._run
        trained = {name for name, parameter in run.module.named_parameters() if parameter.requires_grad}
        sizes = {name: prod(shape) for name, shape in run.strategy.shapes(run.module).items()}
        elements = sum(sizes.values())
        if not weights_only and run.optimizers:
            moments = max(_moments(optimizer) for optimizer in run.optimizers)
            elements += moments * sum(size for name, size in sizes.items() if name in trained)
        return _ELEMENT_BYTES * elements

    def save(self, request: SaveRequest) -> None:
        """Save the run as it stands after its last optimizer step. Collective.

        Raises:
            NonFiniteError: on all ranks; a weight is NaN or infinite, and the request is not tolerant.
            StorageError: on all ranks; it could not be written, and the request is not tolerant, or it was the third in
                a row. What was there is untouched.
            ConfigurationError: an accumulation window is under way.
        """
        run = self._run
        run.check_together("save_checkpoint")
        self.finish()
        if run.in_window:
            raise ConfigurationError(
                "save_checkpoint was called within an optimizer step, where gradients are half gathered: call "
                "it in on_train_batch_end once trainer.global_step has grown, or at an epoch's end."
            )
        notes: list[str] = []
        error: BaseException | None = None
        with run.heartbeat.section("save"):
            snapshot = capture_run(run, self._windows, run.seed, request.weights_only)
            request.captured_at(run.progress.global_step)
            if request.asynchronous:
                self._write_behind(request, snapshot)
                return
            try:
                self._write(request, snapshot, run.world, notes, lambda: False)
            except PhalanxError as met:
                error = met
        self._heed(request, error, notes)

    def finish(self, number: int | None = None) -> None:
        """Wait for the save behind the training, if there is one, and heed what came of it. Collective.

        With ``number`` only for that one. Raises as ``save`` does for it.
        """
        pending = self._pending
        if pending is None or number not in (None, pending.number):
            return
        with self._run.heartbeat.section("save"):
            pending.work.wait()
        self._pending = None
        self._heed(pending.request, pending.work.error, pending.notes)

    def end(self) -> None:
        """Wait for pending saves and deletions; raise if the most recent save of any failure key failed. Collective.

        Raises:
            StorageError: on all ranks; no later save will make up for the one that failed.
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
        # It would keep the data's worker processes alive.
        self._windows = None
        if pending is not None:
            alone = self._run.world.size == 1
            if not pending.work.wait(0.2 if alone else _GRACE_SECONDS[alone]) and alone:
                self._run.note(f"{pending.request.path} is still being written: interrupt to leave it.")
                pending.work.wait(_GRACE_SECONDS[alone])
            pending.work.give_up()
            over = pending.work.wait(_LAST_SECONDS)
            if not over or pending.work.error is not None:
                lost = StorageError(f"{pending.request.path} was not saved: the run ended before it was written.")
                self._run.note(str(lost))
                pending.request.on_done(lost)
        # Nothing is left to delete after a fit that ended well; after a failure the next run deletes the rest.
        self._deletion.close(_LAST_SECONDS)
        for text in self._deletion.problems():
            self._run.note(text)
        # A process group that the saving thread may still use is released together with that thread.
        if self._apart is not None and (pending is None or over):
            self._apart.close()
        self._apart = None

    def _write_behind(self, request: SaveRequest, snapshot: Snapshot) -> None:
        self.prepare()
        run, apart = self._run, self._apart
        assert apart is not None
        if self.sharded or run.world.is_global_zero:
            strategy = run.strategy
            snapshot = self._staging.take(snapshot, [strategy.stepping_optimizer(one) for one in run.optimizers])
        else:
            # Rank 0 writes for all; what this rank holds may change from here on.
            snapshot = self._staging.take(Snapshot({}, None, snapshot.rank_document))
        self._number += 1
        number, notes = self._number, list[str]()
        work: Background | None = None

        def write() -> None:
            self._staging.finish()
            self._write(request, snapshot, apart, notes, lambda: work is not None and work.given_up)

        def over() -> None:
            if run.world.is_global_zero:
                run.triggers.post(Signal.SAVE_DONE, number)

        work = Background(write, over)
        self._pending = _Pending(number, request, work, notes)

    def _write(
        self,
        request: SaveRequest,
        snapshot: Snapshot,
        world: World,
        notes: list[str],
        given_up: Callable[[], bool],
    ) -> None:
        when = f"at optimizer step {request.step}"
        save(
            request.path,
            snapshot,
            world,
            self.sharded,
            also=request.also,
            finite=when,
            given_up=given_up,
            deletion=self._deletion,
        )
        if world.is_global_zero:
            notes += request.prune(self._deletion)

    def _heed(self, request: SaveRequest, error: BaseException | None, notes: list[str]) -> None:
        """Act on what came of a save; the same on all ranks."""
        note = self._run.note
        for text in [*notes, *self._deletion.problems()]:
            note(text)
        if error is None:
            self._failures.pop(request.failure_key, None)
            request.on_done(None)
            return
        if isinstance(error, PhalanxError):
            request.on_done(error)
        if not request.tolerant or not isinstance(error, _TOLERATED):
            raise error
        if isinstance(error, NonFiniteError):
            note(f"No checkpoint was saved at step {request.step}: {error}")
            return
        count = 1 + (self._failures[request.failure_key][0] if request.failure_key in self._failures else 0)
        self._failures[request.failure_key] = count, error
        if count >= _FAILURES_IN_A_ROW:
            raise type(error)(f"{error} It was the third save in a row that failed, so the run ends.") from None
        note(f"{error} Training goes on, and older checkpoints are as they were ({count} of 3 in a row).")
