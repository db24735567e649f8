"""``TensorBoardLogger``: writes metrics as TensorBoard event files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ..framework.core.arguments import check_names, keywords_of
from ..framework.metrics.file_logger import FileLogger, plain_number
from ..framework.metrics.hparams_text import flattened
from ..framework.metrics.image_files import png_size
from ..framework.metrics.media import Histogram, Images, Media, Table, Text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Those of SummaryWriter, whose import takes a tenth of a second.
_WRITER_ARGUMENTS = ("comment", "purge_step", "max_queue", "flush_secs", "filename_suffix")


class TensorBoardLogger(FileLogger):
    """Write metrics, hyperparameters and the model's graph as TensorBoard event files.

    ``experiment`` is torch's ``SummaryWriter``, for histograms, images and other data. TensorBoard is imported when the
    first metric arrives.

    Args:
        save_dir: root directory of the files; default: the run's.
        name: the experiment's name; ``""`` omits this directory level; default: the run's.
        version: a number, or the directory's name; default: the run's, or the next free one. Like an empty name, it
            applies only to the logger's files, not to checkpoints.
        log_graph: whether ``log_graph`` records the graph; it needs the module's ``example_input_array``.
        default_hp_metric: record the placeholder ``hp_metric`` with hyperparameters that are logged without a metric;
            TensorBoard's table shows hyperparameters only with a metric.
        prefix: prepended to the key of every metric, with ``-`` between.
        sub_dir: a subdirectory of the version's directory for the event files.
        kwargs: further arguments of ``SummaryWriter``, such as ``max_queue`` and ``flush_secs``.
    """

    _LIVE: ClassVar = {"_lock": Lock, "_writer": type(None)}

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_names(type(self).__name__, kwargs, [*keywords_of(TensorBoardLogger.__init__), *_WRITER_ARGUMENTS])
        super().__init__(save_dir, name, version, prefix)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        self._resumed_at = 0
        """The first step that a resumed run records; results of earlier ones may be in the files already."""
        self._earlier: dict[str, set[int]] | None = None
        # Metrics arrive in the writer thread; a user's histogram may open the file first.
        self._lock = Lock()

    @property
    def log_dir(self) -> str:
        return os.path.join(super().log_dir, self._sub_dir) if self._sub_dir else super().log_dir

    @property
    def sub_dir(self) -> str | None:
        """The subdirectory of the version's directory for the event files."""
        return self._sub_dir

    @property
    def experiment(self) -> SummaryWriter:
        with self._lock:
            if self._writer is None:
                # The import takes a tenth of a second, so it is made only when TensorBoard is used.
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(
                    str(self._make_log_dir()), **{"purge_step": self._purge_step, **self._kwargs}
                )
                # Records of a later run of this object continue after those of this run.
                self._purge_step = None
            return self._writer

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics; a mapping as a value becomes one chart of several lines. ``step`` counts up if None."""
        step = self._count_step(step)
        if step < self._resumed_at:
            metrics = {key: value for key, value in metrics.items() if not self._has_earlier(key, step)}
        writer = self.experiment
        for key, value in metrics.items():
            if isinstance(value, Mapping):
                writer.add_scalars(self._with_prefix(key), dict(value), step)
            else:
                writer.add_scalar(self._with_prefix(key), plain_number(value), step)

    def log_hyperparams(
        self, params: Any, metrics: Mapping[str, float] | float | None = None, step: int | None = None
    ) -> None:
        """Record hyperparameters, and the metrics by which TensorBoard's table compares runs."""
        params = self._write_hparams(params)
        if metrics is None:
            metrics = {"hp_metric": -1.0} if self._default_hp_metric else {}
        elif not isinstance(metrics, Mapping):
            metrics = {"hp_metric": float(metrics)}
        if not metrics:
            return
        from torch.utils.tensorboard.summary import hparams

        for key, value in metrics.items():
            self.experiment.add_scalar(self._with_prefix(key), plain_number(value), step or 0)
        files = self.experiment._get_file_writer()
        columns = hparams(flattened(params), dict.fromkeys(map(self._with_prefix, metrics)))
        for summary in columns:
            files.add_summary(summary, step or 0)

    @property
    def records_graph(self) -> bool:
        return self._log_graph

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Record the graph of ``model`` on ``input_array`` or its ``example_input_array``, if ``log_graph=True``."""
        if not self._log_graph:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if not isinstance(example, torch.Tensor | tuple):
            warnings.warn(
                f"The graph is not recorded: example_input_array is {type(example).__name__}; "
                "set it to a tensor, or to a tuple of forward's arguments.",
                stacklevel=2,
            )
            return
        with torch.no_grad():
            self.experiment.add_graph(_Shell(model), _on_device_of(model, example))

    def log_media(self, media: Media) -> None:
        _add_media(self.experiment, self._with_prefix(media.key), media)

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        # TensorBoard then hides the records of earlier files from this step.
        self._purge_step = self._resumed_at = step
        self._earlier = None

    def _has_earlier(self, key: str, step: int) -> bool:
        """Whether a value of a step before the resumption is in the files. They are read if there is such a step."""
        if self._earlier is None:
            # The import takes a tenth of a second, so it is made only when it is needed.
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            files = EventAccumulator(str(self._make_log_dir()), size_guidance={"scalars": 0})
            files.Reload()
            self._earlier = {tag: {each.step for each in files.Scalars(tag)} for tag in files.Tags()["scalars"]}
        return step in self._earlier.get(self._with_prefix(key), ())

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.flush()
            writer.close()


class _Shell(nn.Module):
    """The submodules of a module and its forward, without its properties: the tracer reads every property, and some are
    only available during a run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self.run = model.forward

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def _on_device_of(model: nn.Module, example: Any) -> Any:
    parameter = next(model.parameters(), None)
    if parameter is None:
        return example
    if isinstance(example, torch.Tensor):
        return example.to(parameter.device)
    return tuple(item.to(parameter.device) if isinstance(item, torch.Tensor) else item for item in example)


def _add_media(writer: SummaryWriter, tag: str, media: Media) -> None:
    """Record a media item under a tag; several images have their number after the tag, and a table is a text."""
    if isinstance(media, Images):
        # The import takes a tenth of a second, so it is made only when TensorBoard is used.
        from tensorboard.compat.proto.summary_pb2 import Summary

        contents = media.contents()
        for number, content in enumerate(contents):
            name = f"{tag}/{number}" if len(contents) > 1 else tag
            width, height = png_size(content)
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
            writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), media.step)
        for number, caption in enumerate(media.captions):
            writer.add_text(f"{tag}/caption" + (f"/{number}" if len(contents) > 1 else ""), caption, media.step)
    elif isinstance(media, Table):
        writer.add_text(tag, _markdown(media), media.step)
    elif isinstance(media, Text):
        writer.add_text(tag, media.text, media.step)
    elif isinstance(media, Histogram):
        # TensorBoard counts the values of a bucket up to its upper limit.
        low, high, count = media.edges[0], media.edges[-1], sum(media.counts)
        counts, limits = list(media.counts), list(media.edges[1:])
        writer.add_histogram_raw(tag, low, high, count, media.total, media.squares, limits, counts, media.step)


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in lines)
