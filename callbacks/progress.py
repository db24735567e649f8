"""``ProgressBar``: displays progress as a live bar in a terminal, and as occasional lines of text elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

_NEVER = float("inf")
# Reading a loss from a GPU waits for all work queued there. At this interval the cost is negligible.
_DEVICE_SECONDS = 0.5
_SMOOTHING = 0.3


class ProgressBar(Callback):
    """Display epoch, batches, speed, remaining time, loss, and the metrics logged with ``prog_bar=True``, on rank 0.

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

    def __init__(self, refresh_seconds: float = 0.1, line_seconds: float = 10.0) -> None:
        for name, value in (("refresh_seconds", refresh_seconds), ("line_seconds", line_seconds)):
            if not value > 0:
                raise ConfigurationError(f"{type(self).__name__}({name}={value!r}): give a time above 0.")
        self._refresh_seconds = refresh_seconds
        self._line_seconds = line_seconds
        self._active = True
        self._screen: _Screen = _Lines(line_seconds)
        self._frames: list[_Frame] = []
        self._next_look = _NEVER

    @property
    def state_key(self) -> str:
        return "ProgressBar"

    def show(self, text: str) -> bool:
        """Print a line of text, above the live bar if there is one."""
        self._screen.show(text)
        return True

    def wants(self, hook: str) -> bool:
        return super().wants(hook) and (self._active or hook == "setup")

    def _make_screen(self) -> _Screen:
        return _Live(self._refresh_seconds) if sys.stdout.isatty() else _Lines(self._line_seconds)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        self._active = trainer.is_global_zero
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
        self._begin(label, trainer.num_training_batches, trainer.progress.batch_in_epoch)

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._next_look:
            self._draw(trainer, batch_idx + 1)

    def on_train_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        if self._frames:
            frame = self._frames.pop()
            self._screen.end(frame.ended(trainer.progress.batch_in_epoch, _metrics_text(trainer)))

    def on_train_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._next_look = _NEVER
        self._screen.close()

    def on_validation_start(self, trainer: TrainerView, module: TrainModule) -> None:
        label = "sanity check" if trainer.sanity_checking else "validation"
        self._begin(label, _NEVER if trainer.sanity_checking else sum(trainer.num_val_batches) or _NEVER)

    def on_validation_batch_end(
        self,
        trainer: TrainerView,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._count(trainer)

    def on_validation_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._finish(trainer, quiet=trainer.state.stage == "fit")

    def on_test_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("test", _NEVER)

    def on_test_batch_end(
        self,
        trainer: TrainerView,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._count(trainer)

    def on_test_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._finish(trainer)

    def on_predict_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("prediction", _NEVER)

    def on_predict_batch_end(
        self,
        trainer: TrainerView,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._count(trainer)

    def on_predict_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._finish(trainer)

    # ---- the parts --------------------------------------------------------------------------------------------------

    def _begin(self, label: str, total: float, done: int = 0) -> None:
        now = time.monotonic()
        self._frames.append(_Frame(label, total, now, done, now, done))
        self._next_look = now + self._screen.seconds

    def _count(self, trainer: TrainerView) -> None:
        frame = self._frames[-1]
        frame.counted += 1
        if time.monotonic() >= self._next_look:
            self._draw(trainer, frame.counted)

    def _draw(self, trainer: TrainerView, done: int) -> None:
        frame = self._frames[-1]
        loss = trainer.latest_loss
        frame.look(done, time.monotonic())
        metrics_text = _metrics_text(trainer) if len(self._frames) == 1 and trainer.state.stage == "fit" else ""
        self._screen.draw(frame, metrics_text)
        on_device = isinstance(loss, Tensor) and loss.device.type != "cpu"
        pause = self._screen.pause(frame)
        self._next_look = time.monotonic() + (max(pause, _DEVICE_SECONDS) if on_device else pause)

    def _finish(self, trainer: TrainerView, quiet: bool = False) -> None:
        if not self._frames:
            return
        frame = self._frames.pop()
        self._screen.end("" if quiet else frame.ended(frame.counted, ""))
        if self._frames:
            # Exclude the duration of the validation from the training speed.
            self._frames[-1].shift(time.monotonic() - frame.began)
            self._next_look = time.monotonic() + self._screen.seconds
        else:
            self._next_look = _NEVER
            if trainer.state.stage != "fit":
                self._screen.close()


class RichProgressBar(ProgressBar):
    """A ``ProgressBar`` that draws the live bar even if the output is not a terminal."""

    def _make_screen(self) -> _Screen:
        return _Live(self._refresh_seconds, force=True)


@dataclass
class _Frame:
    """Progress of one stage: a training epoch, or an evaluation within it."""

    label: str
    total: float
    began: float
    counted: int
    looked: float
    done: int
    first: int = 0
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.first = self.counted

    def look(self, done: int, now: float) -> None:
        """Update the speed with the batches since the previous call."""
        if now > self.looked and done > self.done:
            rate = (done - self.done) / (now - self.looked)
            self.rate = rate if not self.rate else _SMOOTHING * rate + (1 - _SMOOTHING) * self.rate
        self.looked, self.done = now, done

    def shift(self, seconds: float) -> None:
        self.began += seconds
        self.looked += seconds

    def count(self) -> str:
        return f"{self.done}/{self.total:.0f}" if self.total != _NEVER else str(self.done)

    def pace(self) -> str:
        left = (self.total - self.done) / self.rate if self.rate and self.total != _NEVER else 0.0
        return f"{self.rate:.3g} it/s" + (f", {_duration(left)} left" if left else "")

    def ended(self, done: int, metrics_text: str) -> str:
        """Return the line for the end of the stage, with the average speed of the entire stage."""
        seconds = time.monotonic() - self.began
        self.done = done
        rate = f", {(done - self.first) / seconds:.3g} it/s" if seconds > 0 and done > self.first else ""
        return f"{self.label}: {done} batches in {_duration(seconds)}{rate}{metrics_text}"


class _Screen(Protocol):
    """Output of progress, and the time between two updates."""

    seconds: float

    def show(self, text: str) -> None: ...
    def draw(self, frame: _Frame, metrics_text: str) -> None: ...
    def pause(self, frame: _Frame) -> float: ...
    def end(self, line: str) -> None: ...
    def close(self) -> None: ...


class _Lines:
    """Lines of text: about ten in an epoch, at least ten seconds apart, and at least one per minute."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def show(self, text: str) -> None:
        # A single write, so that the output of other ranks on the same pipe cannot split the line.
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def draw(self, frame: _Frame, metrics_text: str) -> None:
        self.show(f"{frame.label}: {frame.count()} batches, {frame.pace()}{metrics_text}")

    def pause(self, frame: _Frame) -> float:
        tenth = frame.total / frame.rate / 10 if frame.rate else 0.0
        return min(max(self.seconds, tenth), 6 * self.seconds)

    def end(self, line: str) -> None:
        if line:
            self.show(line)

    def close(self) -> None:
        pass


class _Live:
    """A live bar of rich. It is refreshed explicitly, without rich's refresh thread."""

    def __init__(self, seconds: float, force: bool = False) -> None:
        # Importing rich takes tens of milliseconds, so it is imported only if a live bar is displayed.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.seconds = seconds
        self._console = Console(force_terminal=True) if force else Console()
        self._columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        self._text = TextColumn("{task.fields[text]}", markup=False)
        self._progress_class = Progress
        self._bar: Any = None
        self._task: Any = None

    def show(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def draw(self, frame: _Frame, metrics_text: str) -> None:
        if self._bar is None:
            self._bar = self._progress_class(
                *self._columns, self._text, console=self._console, auto_refresh=False, transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task("", text="")
        self._bar.update(
            self._task,
            description=frame.label,
            total=None if frame.total == _NEVER else frame.total,
            completed=frame.done,
            text=f"{frame.count()} {frame.pace()}{metrics_text}",
        )
        self._bar.refresh()

    def pause(self, frame: _Frame) -> float:
        return self.seconds

    def end(self, line: str) -> None:
        if line:
            self.show(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _metrics_text(trainer: TrainerView) -> str:
    """Return the loss and the metrics of the progress bar as text. On a GPU, reading them waits for the device.

    The most recent loss is omitted if the user has logged a metric with "loss" in its name.
    """
    metrics = trainer.progress_bar_metrics
    shows_own = trainer.latest_loss is None or any("loss" in name for name in metrics)
    values = {**({} if shows_own else {"loss": trainer.latest_loss}), **metrics}
    return "".join(f", {name} {float(value):.4g}" for name, value in values.items())


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
