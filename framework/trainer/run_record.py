"""The record of a fit while it trains: what a thread of rank 0 reads from the run once a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..core.accelerators import peak_memory, used_memory
from ..report.evaluations import EVALUATIONS_FILE, new_evaluations
from ..report.recorder import RunRecorder
from ..run.run import rates_of
from ..system.environment import attempt
from ..system.processes import peak_resident_bytes, resident_bytes
from ..watchdog.heartbeat import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..data.accumulation_window import Windows
    from ..loop.fit_loop import FitLoop
    from ..metrics.logger_fanout import LoggerFanout
    from .session import Session


def start_recording(session: Session, loop: FitLoop) -> RunRecorder:
    """Record a fit from now on, in a thread of rank 0. What is logged is recorded, too.

    Results that other processes add to the record are passed to the loggers.
    """
    run = loop.run
    run.loggers.pick_up_by(LateResults(session.directory.path, run.loggers, run.progress.global_step).pick_up)
    begin = {
        "step": run.progress.global_step,
        "attempt": attempt(),
        "checkpoint": None if run.resumed is None else run.resumed.name,
        "rewind": session.origin is not None and session.origin.is_rewind,
    }
    recorder = RunRecorder(session.directory.path, _View(session, loop).look, begin)

    # Not the run, which holds this function: the workers of an interrupted fit would remain until garbage is collected.
    optimizers, used = run.optimizers, run.used_rates
    progress, counts_steps = run.progress, run.module.automatic_optimization

    def log(values: Mapping[str, float], step: int) -> None:
        # The learning rates of the newest update: ``used``, or those of now if no scheduler has changed them.
        recorder.log(values, step, [*used] if used else rates_of(optimizers))

    run.loggers.observe(log)

    source: dict[str, Any] = {}

    def mark(windows: Windows) -> None:
        found = windows.source.layout()
        recorder.mark_data({
            "step": progress.global_step,
            "epoch": progress.epoch,
            "batch": progress.batch_in_epoch,
            "window": windows.size,
            "end": windows.end,
            "counts_steps": counts_steps,
            # Windows of a cycle of sizes leave a mark each, of the same source.
            "source": None if found == source else found,
        })  # fmt: skip
        source.update(found)

    loop.windows.observe(mark)
    return recorder


class _View:
    """The state of a fit, read from another thread: plain attributes, no tensors of a device, no collectives."""

    def __init__(self, session: Session, loop: FitLoop) -> None:
        self._progress = loop.run.progress
        self._heartbeat = session.heartbeat
        self._world = loop.run.world
        self._meter = loop.run.meter
        steps, batches = loop.estimated_steps(), loop.windows.full
        self._known = {
            "stage": "fit",
            "world_size": loop.run.world.size,
            "max_epochs": loop.plan.max_epochs,
            "steps": None if steps == float("inf") else int(steps),
            "batches": batches,
        }

    def look(self) -> dict[str, Any]:
        """Return the state in JSON values."""
        progress = self._progress
        return {
            **self._known,
            "section": SECTIONS[self._heartbeat.read().section],
            "step": progress.global_step,
            "epoch": progress.epochs_done,
            "batch": progress.batch_in_epoch,
            "memory": self._memory(),
            "throughput": None if (throughput := self._meter.throughput()) is None else throughput.as_dict(),
        }

    def _memory(self) -> dict[str, Any]:
        """Return the bytes in use and at their peak: of the device, or without one of this process."""
        peak = peak_resident_bytes()
        device = self._world.device
        # The allocator's own counters: nothing waits for the device.
        used, device_peak = used_memory(device), peak_memory(device)
        if used is None:
            return {"used": resident_bytes() or peak, "host_peak_bytes": peak, "device_peak_bytes": None}
        return {"used": used, "host_peak_bytes": peak, "device_peak_bytes": device_peak}


class LateResults:
    """Reads what ``phalanx eval`` adds to the directory of a run while it trains.

    Args:
        directory: the run's directory.
        loggers: the loggers of the fit.
        step: the number of optimizer steps at which the fit begins.
    """

    def __init__(self, directory: Path, loggers: LoggerFanout, step: int) -> None:
        self._path = directory / EVALUATIONS_FILE
        self._loggers = loggers
        self._step, self._began = step, time.time()

    def pick_up(self) -> None:
        """Send the results that are new, each at the step of its checkpoint. One look at the file if there are none."""
        found, self._loggers.late_position = new_evaluations(self._path, self._loggers.late_position)
        for each in found:
            # Of a step that this fit trains again the weights are others.
            if each.step <= self._step or each.time >= self._began:
                # The values of a step are under its index, which is the number of steps before it.
                self._loggers.log_late(each.values, max(0, each.step - 1))
