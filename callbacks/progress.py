"""``ProgressBar``: displays progress as a live bar in a terminal, and as occasional lines of text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..framework.api.callback import Callback
from ..framework.core.absent_names import lacks
from ..framework.core.errors import ConfigurationError
from ..framework.profiling.meter import Interval
from .absent import PROGRESS_BAR
from .progress_screens import UNKNOWN, Frame, Lines, Live, Screen

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

_NEVER = float("inf")
# Reading a loss from a GPU waits for all work queued there. At this interval the cost is negligible.
_DEVICE_SECONDS = 0.5
# Seconds of training that a displayed speed covers at least.
_SPEED_SECONDS = 1.0


@lacks(PROGRESS_BAR)
class ProgressBar(Callback):
    """Display epoch, batches, speed, remaining time, loss, and the metrics logged with ``prog_bar=True``, on rank 0.

    In training, these are followed by the samples or tokens of all ranks in a second, the model FLOPs utilization
    (MFU) if it is known, the share of time in which the ranks waited for data, and this rank's memory at its peak.

    In a terminal, progress is a live bar, drawn by rich. Elsewhere it is lines of text: one about every ten seconds,
    and one at the end of each epoch. The cost per batch is one reading of the clock. No thread is started.

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
        self._speed: Interval | None = None
        self._epoch_speed: Interval | None = None
        self._speed_text = ""

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
        return Live(self._refresh_seconds) if sys.stdout.isatty() else Lines(self._line_seconds)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        self._trainer = trainer
        self._active = trainer.is_global_zero and trainer.verbose and self._shown
        self._frames.clear()
        self._next_look = _NEVER
        if self._active:
            self._screen.close()
            self._screen = self._make_screen()

    def teardown(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        self._screen.close()

    def on_exception(self, trainer: TrainerView, module: TrainModule, exception: BaseException) -> None:
        self._screen.close()

    def on_train_epoch_start(self, trainer: TrainerView, module: TrainModule) -> None:
        last = trainer.max_epochs
        label = f"epoch {trainer.current_epoch}" + (f"/{last - 1}" if last is not None and last > 0 else "")
        self._frames.clear()
        self._speed, self._speed_text = Interval(trainer.run.meter, _SPEED_SECONDS), ""
        self._epoch_speed = Interval(trainer.run.meter)
        self._begin(label, trainer.num_training_batches, trainer.progress.batch_in_epoch)

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._next_look:
            self._draw(trainer, module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        if self._frames:
            frame = self._frames.pop()
            metrics_text = _as_text(self.get_metrics(trainer, module)) + _speed_of(self._epoch_speed)
            self._screen.end(frame.ended(trainer.progress.batch_in_epoch, metrics_text, time.monotonic()))

    def on_train_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._next_look = _NEVER
        self._screen.close()

    def on_validation_start(self, trainer: TrainerView, module: TrainModule) -> None:
        label = "sanity check" if trainer.sanity_checking else "validation"
        self._begin(label, UNKNOWN if trainer.sanity_checking else sum(trainer.num_val_batches) or UNKNOWN)

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
        self._finish(trainer, quiet=trainer.state.stage == "fit")

    def on_test_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("test", UNKNOWN)

    def on_test_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._finish(trainer)

    def on_predict_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("prediction", UNKNOWN)

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
        in_training = len(self._frames) == 1 and trainer.state.stage == "fit"
        metrics_text = ""
        if in_training:
            self._speed_text = _speed_of(self._speed) or self._speed_text
            metrics_text = _as_text(self.get_metrics(trainer, module)) + self._speed_text
        self._screen.draw(frame, metrics_text)
        on_device = isinstance(loss, Tensor) and loss.device.type != "cpu"
        pause = self._screen.pause(frame)
        self._next_look = time.monotonic() + (max(pause, _DEVICE_SECONDS) if on_device else pause)

    def _finish(self, trainer: TrainerView, quiet: bool = False) -> None:
        if not self._frames:
            return
        frame = self._frames.pop()
        self._screen.end("" if quiet else frame.ended(frame.counted, "", time.monotonic()))
        if self._frames:
            # Exclude the duration of the validation from the training speed.
            self._frames[-1].shift(time.monotonic() - frame.began)
            self._next_look = time.monotonic() + self._screen.seconds
        else:
            self._next_look = _NEVER
            if trainer.state.stage != "fit":
                self._screen.close()


def _speed_of(interval: Interval | None) -> str:
    found = None if interval is None else interval.take()
    return "" if found is None else f", {found}"


def _as_text(metrics: Mapping[str, Any]) -> str:
    """Return metrics as text. On a GPU, reading them waits for the device."""
    shown = {name: value if isinstance(value, str) else f"{float(value):.4g}" for name, value in metrics.items()}
    return "".join(f", {name} {text}" for name, text in shown.items())
