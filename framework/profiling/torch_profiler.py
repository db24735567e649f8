"""``PyTorchProfiler``: traces of some steps of a fit, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function, schedule

from ..core.errors import ConfigurationError
from .profiler import Profiler


class PyTorchProfiler(Profiler):
    """Trace some steps of a fit with ``torch.profiler.profile``: operations, kernels, and the sections of the fit.

    Each rank writes one file for each traced group of steps, ``fit-rank_<n>-step_<last step>.pt.trace.json``, which
    TensorBoard's plugin, Perfetto (ui.perfetto.dev) and chrome://tracing open. The section ``callbacks`` includes the
    hooks of the module.

    Args:
        dirpath: The directory of the files; by default ``profile`` in the directory of the run.
        filename: The first part of the names of the files; by default ``fit``.
        schedule: The steps to trace, as ``torch.profiler.schedule`` returns them. By default one step is left out, one
            warms the tracer up, and three are traced.
        row_limit: The rows of the table of operations.
        options: Further arguments of ``torch.profiler.profile``, such as ``record_shapes`` and ``profile_memory``.

    Raises:
        ConfigurationError: ``on_trace_ready`` is given, which this class uses itself.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        row_limit: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        if "on_trace_ready" in options:
            raise ConfigurationError(
                "PyTorchProfiler(on_trace_ready=...): it writes the traces itself, into dirpath; leave it out."
            )
        self._schedule = _default_schedule() if schedule is None else schedule
        self._row_limit = row_limit
        self._options = options
        self._tracer: Any = None
        self._open: list[tuple[str, Any]] = []
        self._steps = 0
        self._table = ""
        self.traces: list[Path] = []
        """The files that this rank has written in the current or last fit."""

    def begin(self, directory: Path | None, rank: int) -> None:
        super().begin(directory, rank)
        self._open, self._steps, self._table, self.traces = [], 0, "", []
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        options = {"activities": activities, **self._options}
        self._tracer = torch.profiler.profile(schedule=self._schedule, on_trace_ready=self._write, **options)
        self._tracer.start()

    def start(self, action_name: str) -> None:
        if self._tracer is not None:
            block = record_function(action_name)
            block.__enter__()
            self._open.append((action_name, block))

    def stop(self, action_name: str) -> None:
        if all(name != action_name for name, _ in self._open):
            return
        while True:
            name, block = self._open.pop()
            block.__exit__(None, None, None)
            if name == action_name:
                return

    def step(self) -> None:
        if self._tracer is not None:
            self._steps += 1
            self._tracer.step()

    def end(self) -> None:
        tracer, self._tracer = self._tracer, None
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)
        if tracer is not None:
            tracer.stop()
        super().end()

    def summary(self) -> str:
        """Return the operations that took the most time in the traced steps."""
        return self._table

    def _write(self, tracer: Any) -> None:
        on_device = torch.cuda.is_available()
        self._table = tracer.key_averages().table(
            sort_by="self_cuda_time_total" if on_device else "self_cpu_time_total", row_limit=self._row_limit
        )
        if self._directory is not None:
            path = self.path(f"-step_{self._steps}.pt.trace.json")
            tracer.export_chrome_trace(str(path))
            self.traces.append(path)


def _default_schedule() -> Callable[[int], ProfilerAction]:
    return schedule(wait=1, warmup=1, active=3, repeat=1)
