"""``Logger``: the contract of destinations for metrics. Only rank 0 calls a logger's methods."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..core.arguments import NamesArguments
from ..core.errors import ConfigurationError
from ..distributed.rank_zero import is_rank_zero
from .image_files import figure_png, pictures
from .media import Histogram, Images, Media, Table, Text

if TYPE_CHECKING:
    from torch import nn

MEDIA_DIRECTORY = "media"
"""The directory for media files below that of a logger."""
_WITHOUT_DIRECTORY = "phalanx_logs"


class Logger(NamesArguments, ABC):
    """Base class of loggers.

    All loggers of a run share its directory: ``attach`` passes it before anything is written, unless the user set
    ``save_dir``. The run's directory is below the ``save_dir`` of its first logger, if that was set. A logger opens and
    creates nothing before the first metric arrives.
    """

    _thread: LoggerThread | None = None
    _stored_kinds: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str:
        """The version of this run within the experiment."""

    @property
    def save_dir(self) -> str | None:
        """The root directory of ``name/version``, or None if the logger writes no files."""
        return None

    @property
    def given_save_dir(self) -> str | None:
        """The root directory that the user gave to this logger, or None if it follows the run."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The directory that contains all versions of the experiment, or None if the logger writes no files."""
        return None

    @property
    def group_separator(self) -> str:
        """The text between a group and a name in the names of metrics."""
        return "/"

    @property
    def log_dir(self) -> str | None:
        """The directory of this run's files, or None if the logger writes no files."""
        return None

    @property
    def experiment(self) -> Any:
        """The underlying writer, for operations that this interface does not cover."""
        return None

    def expect(self, root: Path, name: str) -> None:
        """Set the root and the name of the runs to come. Called when a Trainer is created, before ``attach``."""

    def attach(self, root: Path, name: str, version: int) -> None:
        """Set the run's directory, ``root/name/version_<version>``."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at an optimizer step."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters."""

    @property
    def records_graph(self) -> bool:
        """Whether ``log_graph`` records anything."""
        return type(self).log_graph is not Logger.log_graph

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Record the model's graph, computed from ``input_array`` or the model's ``example_input_array``."""

    def save(self) -> None:
        """Flush buffered records."""

    def finalize(self, status: str) -> None:
        """Flush buffered records and close; ``status`` is ``"success"``, ``"failed"`` or ``"interrupted"``."""
        self.save()

    @property
    def close_seconds(self) -> float:
        """The longest time that the end of a run waits for ``finalize``."""
        return 5.0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after everything recorded so far, in JSON values, for a checkpoint."""
        return {}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Drop records made after a checkpoint, since the resumed run records them again.

        Called before the first metric of a run that resumes in the directory of the checkpoint.

        Args:
            step: the checkpoint's number of optimizer steps.
            state: the ``state_dict`` of that moment; empty if unknown.
        """

    def after_save_checkpoint(self, callback: Any) -> None:
        """Called after a checkpoint was written, with the callback that saved it, such as ``ModelCheckpoint``."""

    # ---- media -------------------------------------------------------------------------------------------------------

    def log_image(
        self, key: str, images: Any, step: int | None = None, caption: str | Sequence[str] | None = None
    ) -> None:
        """Record one image or several.

        Args:
            key: the name.
            images: an image or a list of images: tensors with shape (channels, height, width) or (height, width),
                arrays with shape (height, width, channels) or (height, width), PIL images, or paths of files; or a
                tensor with shape (images, channels, height, width). Floating-point values are from 0 to 1, integers
                from 0 to 255.
            step: the optimizer step.
            caption: a text for each image.

        Raises:
            ConfigurationError: an image has another type or shape, or the number of captions is not that of the images.
        """
        if not is_rank_zero():
            return
        found = pictures(images)
        captions = [caption] if isinstance(caption, str) else list(caption or [])
        if captions and len(captions) != len(found):
            raise ConfigurationError(f"log_image({key!r}) has {len(captions)} captions for {len(found)} images.")
        self._pass_on(Images(key, self._step(step), found, captions))

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Record a matplotlib figure as an image. It is drawn in the calling thread, and not closed.

        Raises:
            ConfigurationError: ``figure`` is not a figure.
        """
        if is_rank_zero():
            self._pass_on(Images(key, self._step(step), [figure_png(figure)], []))

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Record a table: ``columns`` and the rows in ``data``, or a pandas ``dataframe``.

        Raises:
            ConfigurationError: neither is given, or a row has another length than the first.
        """
        if not is_rank_zero():
            return
        if dataframe is not None:
            columns, data = [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
        if data is None:
            raise ConfigurationError(f"log_table({key!r}): give columns and data, or a dataframe.")
        rows = [[_cell(value) for value in row] for row in data]
        names = list(columns) if columns is not None else [str(number) for number in range(len(rows[0]) if rows else 0)]
        if any(len(row) != len(names) for row in rows):
            raise ConfigurationError(f"log_table({key!r}): every row needs {len(names)} values, one for each column.")
        self._pass_on(Table(key, self._step(step), names, rows))

    def log_text(
        self,
        key: str,
        text: str | None = None,
        step: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
    ) -> None:
        """Record a text, which may be Markdown; or texts in a table, as ``log_table`` does.

        Raises:
            ConfigurationError: ``text`` is not a string.
        """
        if text is None:
            self.log_table(key, columns, data, dataframe, step)
            return
        if not isinstance(text, str):
            raise ConfigurationError(f"log_text({key!r}): give a string; several texts make a table, for log_table.")
        if is_rank_zero():
            self._pass_on(Text(key, self._step(step), text))

    def log_histogram(self, key: str, values: Any, step: int | None = None, bins: int = 64) -> None:
        """Record the distribution of the finite values in a tensor or an array of any shape. Collective for a sharded
        tensor, such as a weight or a gradient under ``fsdp``: the values are those of the full tensor.

        Raises:
            ConfigurationError: ``bins`` is less than 1.
        """
        if bins < 1:
            raise ConfigurationError(f"log_histogram({key!r}, bins={bins}): give 1 or more.")
        # Whether it is a DTensor, whose import takes a tenth of a second.
        if hasattr(values, "full_tensor"):
            values = values.full_tensor()
        if not is_rank_zero():
            return
        numbers = torch.as_tensor(values).detach().cpu().double().flatten()
        numbers = numbers[numbers.isfinite()]
        low, high = (numbers.min().item(), numbers.max().item()) if len(numbers) else (0.0, 1.0)
        if low == high:
            low, high = low - 0.5, high + 0.5
        counts = torch.histc(numbers, bins, low, high).long().tolist()
        edges = torch.linspace(low, high, bins + 1, dtype=torch.float64).tolist()
        total, squares = numbers.sum().item(), numbers.square().sum().item()
        self._pass_on(Histogram(key, self._step(step), counts, edges, total, squares))

    def log_media(self, media: Media) -> None:
        """Show or store a media item; called in the logger's thread during a run, on rank 0 alone."""
        files = self._write_files(media)
        if media.kind not in self._stored_kinds:
            self._stored_kinds |= {media.kind}
            self._say(f"{type(self).__name__} shows no {media.kind}: they are stored as files, such as {files[0]}.")

    def use_thread(self, thread: LoggerThread | None) -> None:
        """Have media recorded in the thread that calls this logger; with None, in the calling thread."""
        self._thread = thread

    def _write_files(self, media: Media) -> list[Path]:
        directory = getattr(self, "log_dir", None) or _WITHOUT_DIRECTORY
        return media.write(Path(directory) / MEDIA_DIRECTORY)

    def _step(self, step: int | None) -> int:
        if step is not None:
            return int(step)
        return self._thread.newest_step if self._thread is not None else 0

    def _pass_on(self, media: Media) -> None:
        if self._thread is not None:
            self._thread.put_media(media)
        else:
            self.log_media(media)

    def _say(self, sentence: str) -> None:
        """Print a sentence on the console, once the run's own lines allow it."""
        if self._thread is not None:
            self._thread.note(sentence)
        else:
            sys.stderr.write(f"{sentence}\n")


class LoggerThread(Protocol):
    """The thread that calls a logger during a run."""

    @property
    def newest_step(self) -> int:
        """The step of the newest metrics."""

    def put_media(self, media: Media) -> None:
        """Have ``log_media`` called after all earlier calls."""

    def note(self, sentence: str) -> None:
        """Have a sentence printed on the console."""


def media_record(media: Media, files: Sequence[Path], directory: Path) -> Mapping[str, Any]:
    """Return the description of a media item whose files are below a directory, in JSON values."""
    record = {"key": media.key, "kind": media.kind, "files": [str(file.relative_to(directory)) for file in files]}
    if isinstance(media, Images) and media.captions:
        record["captions"] = list(media.captions)
    return record


def _cell(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    return value if isinstance(value, bool | int | float | str | None) else str(value)
