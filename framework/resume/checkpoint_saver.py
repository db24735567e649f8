"""``Saver``: a run's saves, written here or behind the training, and what becomes of them.

    save      Collective: waits for the save before, captures the run, writes it or hands a copy to a thread
    settle    Collective: what came of the save behind the training is heeded, on all ranks alike
    close     the end, however it came; no collective

Behind the training every rank's thread writes its part; they agree among themselves on a world of their own. When rank
0's is over it raises a trigger, so that all ranks settle at the same boundary; a save, or the end of the fit, that
comes first settles as well. So at most one save is under way, and no rank acts on what only it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ..checkpoint import save
from ..checkpoint.background_task import Background
from ..checkpoint.staging import Staging
from ..checkpoint.write_plan import Snapshot
from ..core.errors import ConfigurationError, NonFiniteError, PhalanxError, StorageError
from ..run.run import SAVED
from . import capture_run

if TYPE_CHECKING:
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


def _nothing(error: PhalanxError | None) -> None: ...


def _keep_all() -> list[str]:
    return []


@dataclass
class SaveOrder:
    """What is to be saved, and what is to happen then."""

    path: Path
    weights_only: bool = False
    asynchronous: bool = False
    also: Path | None = None
    """A second name for the same checkpoint."""
    owner: str = ""
    """Who counts failures in a row."""
    tolerant: bool = True
    """Whether training goes on where it fails."""
    prune: Callable[[], list[str]] = _keep_all
    """Called on rank 0 once the checkpoint is there, perhaps on another thread; returns what a person should know."""
    settled: Callable[[PhalanxError | None], None] = _nothing
    """Called on every rank, on the thread that trains, with what came of it."""
    step: int = 0
    """The optimizer step at which the run was captured."""


@dataclass
class _Pending:
    """A save behind the training."""

    number: int
    order: SaveOrder
    work: Background
    notes: list[str] = field(default_factory=list)


class Saver:
    """The saves of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._staging = Staging(run.world.device)
        self._apart: World | None = None
        self._pending: _Pending | None = None
        self._number = 0
        self._failures: dict[str, tuple[int, PhalanxError]] = {}
        """Of those whose last save failed: how many in a row, and the last error."""

    @property
    def sharded(self) -> bool:
        """Whether every rank writes a part."""
        return not self._run.fabric.strategy.traits.replicates

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
        sizes = {name: prod(shape) for name, shape in run.fabric.strategy.shapes(run.module).items()}
        elements = sum(sizes.values())
        if not weights_only and run.optimizers:
            moments = max(_moments(optimizer) for optimizer in run.optimizers)
            elements += moments * sum(size for name, size in sizes.items() if name in trained)
        return _ELEMENT_BYTES * elements

    def save(self, order: SaveOrder) -> None:
        """Save the run as it stands after its last optimizer step. Collective.

        Raises:
            NonFiniteError: on all ranks; a weight is NaN or infinite, and the order is not tolerant.
            StorageError: on all ranks; it could not be written, and the order is not tolerant, or it was the third in
                a row. What was there is untouched.
            ConfigurationError: an accumulation window is under way.
        """
        run = self._run
        run.check_together("save_checkpoint")
        self.settle()
        if run.in_window:
            raise ConfigurationError(
                "save_checkpoint was called within an optimizer step, where gradients are half gathered: call "
                "it in on_train_batch_end once trainer.global_step has grown, or at an epoch's end."
            )
        windows = run.trainer.loop.windows if run.trainer.loop is not None else None
        notes: list[str] = []
        error: BaseException | None = None
        with run.heartbeat.section("save"):
            snapshot = capture_run(run, windows, run.trainer.seed, order.weights_only)
            order.step = run.progress.global_step
            if order.asynchronous:
                self._write_behind(order, snapshot)
                return
            try:
                self._write(order, snapshot, run.world, notes, lambda: False)
            except PhalanxError as met:
                error = met
        self._heed(order, error, notes)

    def settle(self, number: int | None = None) -> None:
        """Wait for the save behind the training, if there is one, and heed what came of it. Collective.

        With ``number`` only for that one. Raises as ``save`` does for it.
        """
        pending = self._pending
        if pending is None or number not in (None, pending.number):
            return
        with self._run.heartbeat.section("save"):
            pending.work.wait()
        self._pending = None
        self._heed(pending.order, pending.work.error, pending.notes)

    def end(self) -> None:
        """Settle, and raise if the last save of somebody failed: nothing comes after it that would make up for it.

        Collective.

        Raises:
            StorageError: on all ranks.
        """
        self.settle()
        for _, error in self._failures.values():
            raise StorageError(f"the training is done, but its last checkpoint is not on the disk: {error}") from None

    def close(self) -> None:
        """Let go of what is held. A save that nobody settled, as the run failed, gets a moment. No collective."""
        pending, self._pending, over = self._pending, None, True
        self._staging.close()
        if pending is not None:
            alone = self._run.world.size == 1
            if not pending.work.wait(0.2 if alone else _GRACE_SECONDS[alone]) and alone:
                self._run.trainer.note(f"{pending.order.path} is still being written: interrupt to leave it.")
                pending.work.wait(_GRACE_SECONDS[alone])
            pending.work.give_up()
            over = pending.work.wait(_LAST_SECONDS)
            if not over or pending.work.error is not None:
                lost = StorageError(f"{pending.order.path} was not saved: the run ended before it was written.")
                self._run.trainer.note(str(lost))
                pending.order.settled(lost)
        # One that a thread may still use goes with that thread.
        if self._apart is not None and (pending is None or over):
            self._apart.close()
        self._apart = None

    def _write_behind(self, order: SaveOrder, snapshot: Snapshot) -> None:
        self.prepare()
        run, apart = self._run, self._apart
        assert apart is not None
        if self.sharded or run.world.is_global_zero:
            strategy = run.fabric.strategy
            snapshot = self._staging.take(snapshot, [strategy.stepping_optimizer(one) for one in run.optimizers])
        else:
            # Rank 0 writes for all; what this rank holds may change from here on.
            snapshot = self._staging.take(Snapshot({}, None, snapshot.rank_document))
        self._number += 1
        number, notes = self._number, list[str]()
        work: Background | None = None

        def write() -> None:
            self._staging.finish()
            self._write(order, snapshot, apart, notes, lambda: work is not None and work.given_up)

        def over() -> None:
            if run.world.is_global_zero:
                run.triggers.post(SAVED, number)

        work = Background(write, over)
        self._pending = _Pending(number, order, work, notes)

    def _write(
        self,
        order: SaveOrder,
        snapshot: Snapshot,
        world: World,
        notes: list[str],
        given_up: Callable[[], bool],
    ) -> None:
        when = f"at optimizer step {order.step}"
        save(order.path, snapshot, world, self.sharded, also=order.also, finite=when, given_up=given_up)
        if world.is_global_zero:
            notes += order.prune()

    def _heed(self, order: SaveOrder, error: BaseException | None, notes: list[str]) -> None:
        """Act on what came of a save; the same on all ranks."""
        note = self._run.trainer.note
        for text in notes:
            note(text)
        if error is None:
            self._failures.pop(order.owner, None)
            order.settled(None)
            return
        if isinstance(error, PhalanxError):
            order.settled(error)
        if not order.tolerant or not isinstance(error, _TOLERATED):
            raise error
        if isinstance(error, NonFiniteError):
            note(f"No checkpoint was saved at step {order.step}: {error}")
            return
        count = 1 + (self._failures[order.owner][0] if order.owner in self._failures else 0)
        self._failures[order.owner] = count, error
        if count >= _FAILURES_IN_A_ROW:
            raise type(error)(f"{error} It was the third save in a row that failed, so the run ends.") from None
        note(f"{error} Training goes on, and older checkpoints are as they were ({count} of 3 in a row).")
