"""``ProgressBar``: displays progress as a live bar and a table of epochs, and as lines of text without a terminal.

``RichProgressBar`` and ``TQDMProgressBar`` take the arguments of Lightning's classes of these names.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..framework.api.callback import Callback, in_call_order
from ..framework.core.absent_names import lacks, must_be_none
from ..framework.core.errors import ConfigurationError, is_count
from ..framework.core.foreign_names import MEMBERS
from ..framework.profiling.meter import SpeedInterval
from ..framework.system.console import is_notebook
from ..framework.system.environment import moves_cursor, progress_choice
from .epoch_table import Best, EpochRow, EpochTable, shown_metrics
from .progress_screens import UNKNOWN, Ending, Frame, Lines, Live, Notebook, Screen

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

_NEVER = float("inf")
# Reading a loss from a GPU waits for all work queued there. At this interval the cost is negligible.
_DEVICE_SECONDS = 0.5
# Seconds of training that a displayed throughput covers at least.
_THROUGHPUT_SECONDS = 1.0


@lacks(MEMBERS["ProgressBar"])
class ProgressBar(Callback):
    """Display epoch, batches, speed, remaining time, loss, and the metrics logged with ``prog_bar=True``, on rank 0.

    In training, these are followed by the optimizer step, the learning rate, the samples or tokens of all ranks in a
    second, the model FLOPs utilization (MFU) if it is known, the share of time in which the ranks waited for data, this
    rank's memory at its peak, and the time at which the fit will end.

    - In a terminal, progress is a live bar, drawn by rich, and each epoch adds a row to a table: the optimizer step,
      the logged metrics of training and validation, the seconds of the epoch with its validations, the speed, and a
      ``*`` if the metric that a ``ModelCheckpoint`` or an ``EarlyStopping`` monitors is the best so far.
    - In a notebook, the bar and the table are HTML.
    - Elsewhere it is lines of text: one about every ten seconds, and one at the end of each epoch.

    The variable ``PHALANX_PROGRESS`` overrides the choice: ``rich`` (the bar), ``plain`` (lines) or ``off``. The cost
    per batch is one reading of the clock. No thread is started.

    Args:
        refresh_seconds: Time between two updates of the live bar, in seconds.
        line_seconds: Minimum time between two lines of text within an epoch, in seconds.

    Raises:
        ConfigurationError: A time is not positive.
    """

    # The line printed at the end of an epoch contains its metrics, so they must have been reduced before.
    monitors = True
    _shown = True

    def __init__(self, refresh_seconds: float = 0.1, line_seconds: float = 10.0) -> None:
        for name, value in (("refresh_seconds", refresh_seconds), ("line_seconds", line_seconds)):
            if not value > 0:
                raise ConfigurationError(f"{type(self).__name__}({name}={value!r}): give a time above 0.")
        self._refresh_seconds = refresh_seconds
        self._line_seconds = line_seconds
        self._active = True
        self._trainer: TrainerView | None = None
        self._screen: Screen = Lines(line_seconds)
        self._frames: list[Frame] = []
        self._next_look = _NEVER
        self._skips_batches = False
        """Whether a resumed epoch has begun whose first batches are skipped before the others are trained."""
        self._throughput: SpeedInterval | None = None
        self._epoch_throughput: SpeedInterval | None = None
        self._throughput_text: list[str] = []
        self._table = EpochTable(Best())
        self._ending = Ending(0, UNKNOWN)
        self._epoch_began = 0.0

    @property
    def state_key(self) -> str:
        return "ProgressBar"

    @property
    def trainer(self) -> TrainerView:
        """The Trainer of the current or last stage.

        Raises:
            ConfigurationError: No stage has begun.
        """
        if self._trainer is None:
            raise ConfigurationError(f"{type(self).__name__}.trainer is known in a stage: read it in a hook.")
        return self._trainer

    @property
    def is_enabled(self) -> bool:
        """Whether progress is displayed from the next stage on."""
        return self._shown

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is displayed from the next stage on."""
        return not self._shown

    def enable(self) -> None:
        """Display progress from the next stage on."""
        self._shown = True

    def disable(self) -> None:
        """Display nothing from the next stage on."""
        self._shown = False

    def get_metrics(self, trainer: TrainerView, module: TrainModule) -> dict[str, Any]:
        """Return the numbers and strings to display; override it to change them.

        By default the most recent loss, unless a metric has "loss" in its name, and the metrics logged with
        ``prog_bar=True``.
        """
        metrics, loss = trainer.progress_bar_metrics, trainer.latest_loss
        has_own = loss is None or any("loss" in name for name in metrics)
        return {**({} if has_own else {"loss": loss}), **metrics}

    def print(self, *args: Any, sep: str = " ") -> None:
        """Print a line of text on rank 0, above the live bar if there is one."""
        if self._active:
            self.show(sep.join(map(str, args)))

    def show(self, text: str) -> bool:
        """Print a line of text, above the live bar if there is one."""
        self._screen.show(text)
        return True

    def wants(self, hook: str) -> bool:
        return super().wants(hook) and (self._active or hook == "setup")

    def _make_screen(self) -> Screen:
        if is_notebook():
            return Notebook()
        return Live(self._refresh_seconds) if moves_cursor(sys.stdout) else Lines(self._line_seconds)

    def _chosen_screen(self, choice: str | None) -> Screen:
        """Return the screen that the environment chooses, else the one for this output."""
        if choice == "plain":
            return Lines(self._line_seconds)
        if choice == "rich" and not is_notebook():
            return Live(self._refresh_seconds, force=True)
        return self._make_screen()

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def check(self, trainer: TrainerView, stage: str) -> None:
        progress_choice()

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        choice = progress_choice()
        self._trainer = trainer
        self._active = trainer.is_global_zero and trainer.verbose and self._shown and choice != "off"
        self._frames.clear()
        self._next_look = _NEVER
        if self._active:
            self._screen.close()
            self._screen = self._chosen_screen(choice)

    def teardown(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        self._release()

    def on_exception(self, trainer: TrainerView, module: TrainModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        """Close the screen, and leave the objects of the run, which cannot be copied."""
        self._screen.close()
        self._screen = Lines(self._line_seconds)
        self._throughput = self._epoch_throughput = None

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._table = EpochTable(_best_of(trainer))
        self._ending = Ending(trainer.global_step, trainer.estimated_stepping_batches)

    def on_train_epoch_start(self, trainer: TrainerView, module: TrainModule) -> None:
        last = trainer.max_epochs
        label = f"epoch {trainer.current_epoch}" + (f"/{last - 1}" if last is not None and last > 0 else "")
        self._frames.clear()
        self._throughput, self._throughput_text = SpeedInterval(trainer.run.meter, _THROUGHPUT_SECONDS), []
        self._epoch_throughput = SpeedInterval(trainer.run.meter)
        self._epoch_began = time.monotonic()
        done = trainer.progress.batch_in_epoch
        self._begin(label, trainer.num_training_batches, done)
        self._skips_batches = done > 0
        if self._skips_batches:
            self._next_look = 0.0

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        if self._skips_batches:
            # The batches that a resumed epoch skips are read after the start of the epoch: they are not training.
            self._skips_batches = False
            self._frames[-1].restart_clock(batch_idx + 1, now)
            self._ending.restart_clock(trainer.global_step)
            self._next_look = now + self._screen.seconds
        else:
            self._draw(trainer, module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        if not self._frames:
            return
        frame, now, progress = self._frames.pop(), time.monotonic(), trainer.progress
        throughput = None if self._epoch_throughput is None else self._epoch_throughput.take()
        details = _as_text(self.get_metrics(trainer, module)) + ([] if throughput is None else [str(throughput)])
        logged = trainer.run.metrics
        metrics = shown_metrics(logged.epoch_numbers(progress.global_batch - progress.batch_in_epoch))
        seconds = now - self._epoch_began
        self._table.add(EpochRow(progress.epoch, progress.global_step, metrics, seconds, throughput))
        self._screen.end_epoch(frame.ended(progress.batch_in_epoch, details, now), self._table)

    def on_train_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._next_look = _NEVER
        self._screen.close()

    def on_validation_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if trainer.sanity_checking:
            self._begin("sanity check", sum(trainer.num_sanity_val_batches) or UNKNOWN)
        else:
            self._begin("validation", sum(trainer.num_val_batches) or UNKNOWN)

    def on_validation_batch_end(
        self,
        trainer: TrainerView,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        done = self._frames[-1].count_batch()
        if time.monotonic() >= self._next_look:
            self._draw(trainer, module, done)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._finish(trainer, quiet=trainer.state.fn == "fit")

    def on_test_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("test", sum(trainer.num_test_batches) or UNKNOWN)

    def on_test_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._finish(trainer)

    def on_predict_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("prediction", sum(trainer.num_predict_batches) or UNKNOWN)

    def on_predict_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._finish(trainer)

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def _begin(self, label: str, total: float, done: int = 0) -> None:
        now = time.monotonic()
        self._frames.append(Frame(label, total, now, done, now, done))
        self._next_look = now + self._screen.seconds

    def _draw(self, trainer: TrainerView, module: TrainModule, done: int) -> None:
        frame = self._frames[-1]
        loss = trainer.latest_loss
        frame.look(done, time.monotonic())
        in_training = len(self._frames) == 1 and trainer.state.fn == "fit" and not trainer.sanity_checking
        details: list[str] = []
        if in_training:
            if (throughput := None if self._throughput is None else self._throughput.take()) is not None:
                self._throughput_text = [str(throughput)]
            step = trainer.global_step
            details = [
                *_as_text(self.get_metrics(trainer, module)), f"step {step:,}", *_learning_rate(trainer),
                *self._throughput_text, *self._ending.text(step),
            ]  # fmt: skip
        self._screen.draw(frame, details)
        on_device = isinstance(loss, Tensor) and loss.device.type != "cpu"
        pause = self._screen.pause(frame)
        self._next_look = time.monotonic() + (max(pause, _DEVICE_SECONDS) if on_device else pause)

    def _finish(self, trainer: TrainerView, quiet: bool = False) -> None:
        if not self._frames:
            return
        frame = self._frames.pop()
        self._screen.end("" if quiet else frame.ended(frame.counted, [], time.monotonic()))
        if self._frames:
            # Exclude the duration of the validation from the training speed.
            self._frames[-1].shift(time.monotonic() - frame.began)
            self._next_look = 0.0 if self._skips_batches else time.monotonic() + self._screen.seconds
        else:
            self._next_look = _NEVER
            if trainer.state.fn != "fit":
                self._screen.close()


@lacks(MEMBERS["RichProgressBar"])
class RichProgressBar(ProgressBar):
    """A ``ProgressBar`` that draws the live bar even if the output is not a terminal.

    Args:
        refresh_seconds: Time between two updates of the live bar, in seconds.
        line_seconds: Minimum time between two lines of text within an epoch, in seconds.
        refresh_rate: 0: display nothing. Other numbers have no effect, as updates follow the clock.
        leave: Accepted for compatibility: a line with the metrics of each epoch always remains.
        theme: Must be None; Lightning has the argument.
        console_kwargs: Further arguments of rich's ``Console``, such as ``theme``.

    Raises:
        ConfigurationError: A time is not positive, the rate is negative, or a theme is given.
    """

    def __init__(
        self,
        refresh_seconds: float = 0.1,
        line_seconds: float = 10.0,
        *,
        refresh_rate: int = 1,
        leave: bool = True,
        theme: None = None,
        console_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        must_be_none("RichProgressBar(theme=...)", theme, "the bar has rich's colors; console_kwargs can set others")
        super().__init__(refresh_seconds, line_seconds)
        self.refresh_rate = _checked(self, refresh_rate)
        self._shown = refresh_rate > 0
        self.theme = theme
        self._console_arguments = dict(console_kwargs or {})

    def _make_screen(self) -> Screen:
        return Live(self._refresh_seconds, force=True, console_arguments=self._console_arguments)


@lacks(MEMBERS["TQDMProgressBar"])
class TQDMProgressBar(ProgressBar):
    """A ``ProgressBar`` with the arguments of Lightning's class of this name.

    Args:
        refresh_rate: 0: display nothing. Other numbers have no effect, as updates follow the clock.
        process_position: Accepted for compatibility: only rank 0 displays progress.
        leave: Accepted for compatibility: a line with the metrics of each epoch always remains.

    Raises:
        ConfigurationError: The rate is negative.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        self.refresh_rate, self.process_position = _checked(self, refresh_rate), process_position
        self._shown = refresh_rate > 0


def _checked(bar: ProgressBar, refresh_rate: int) -> int:
    if not is_count(refresh_rate, 0):
        raise ConfigurationError(
            f"{type(bar).__name__}(refresh_rate={refresh_rate!r}): give a whole number, 0 for no display."
        )
    return refresh_rate


def _best_of(trainer: TrainerView) -> Best:
    """Return the metric that checkpoints are ranked by, or else that stops the fit, with its best value so far."""
    for callback in reversed(in_call_order(trainer.callbacks)):
        if (ranked := callback.ranked_metric) is not None:
            return Best(*ranked)
    return Best()


def _as_text(metrics: Mapping[str, Any]) -> list[str]:
    """Return metrics as text. On a GPU, reading them waits for the device."""
    return [
        f"{name} {value}" if isinstance(value, str) else f"{name} {float(value):.4g}" for name, value in metrics.items()
    ]


def _learning_rate(trainer: TrainerView) -> list[str]:
    """Return the learning rate of the first optimizer's newest update, or before the first one that of the next.

    It is left out where reading it would wait for a device.
    """
    optimizers: Sequence[Any] = trainer.optimizers
    used = trainer.run.used_rates if trainer.run is not None else ()
    rate = used[0] if used else optimizers[0].param_groups[0].get("lr") if optimizers else None
    return [f"lr {rate:.3g}"] if isinstance(rate, float) and rate == rate else []
