"""``DeviceStatsMonitor``: logs the use of memory and processors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ..framework.api.callback import Callback
from ..framework.core.accelerators import has_own_memory
from ..framework.core.errors import ConfigurationError

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


class DeviceStatsMonitor(Callback):
    """Log statistics of rank 0's device before and after the steps that ``Trainer(log_every_n_steps=...)`` logs.

    Names of the metrics: ``DeviceStatsMonitor.on_train_batch_start/<statistic>``, and ``on_train_batch_end``. The
    statistics are:

    - on an accelerator that counts its memory, those of ``torch.accelerator.memory_stats``, in bytes or as counts. They
      are counted on the host, so that reading them does not wait for the device;
    - of the machine, with ``psutil``: ``cpu_percent``, ``cpu_vm_percent`` and ``cpu_swap_percent``.

    Args:
        cpu_stats: Log the statistics of the machine. None: only if the device is the CPU.

    Raises:
        ConfigurationError: The Trainer has no logger, or ``cpu_stats`` is True and ``psutil`` is not installed.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        if cpu_stats not in (None, True, False):
            raise ConfigurationError(f"DeviceStatsMonitor(cpu_stats={cpu_stats!r}): give True, False or None.")
        self.cpu_stats = cpu_stats
        self._reads_cpu = self._reads_device = False
        self._device = torch.device("cpu")
        self._every = 1
        self._taken_step = -1
        self._taken: dict[str, float] = {}

    def check(self, trainer: TrainerView, stage: str) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigurationError(
                "DeviceStatsMonitor requires a logger: pass one to the Trainer, or remove the callback."
            )
        if self.cpu_stats and not _has_psutil():
            raise ConfigurationError("DeviceStatsMonitor(cpu_stats=True) requires psutil: pip install psutil.")

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        device = trainer.world.device
        self._every, self._taken_step = trainer.log_every_n_steps, -1
        self._device, self._reads_device = device, trainer.is_global_zero and has_own_memory(device)
        wanted = device.type == "cpu" if self.cpu_stats is None else self.cpu_stats
        if wanted and not _has_psutil():
            trainer.note("DeviceStatsMonitor logs nothing about the CPU, as psutil is not installed.")
        self._reads_cpu = trainer.is_global_zero and wanted and _has_psutil()
        if self._reads_cpu:
            # The first value of cpu_percent has no meaning: each one counts from the previous call.
            _cpu_stats()

    def on_train_batch_start(self, trainer: TrainerView, module: TrainModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if (step + 1) % self._every == 0 and step != self._taken_step:
            self._taken_step, self._taken = step, self._values("on_train_batch_start")

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Only after the last micro-batch of the step, when global_step has grown.
        if self._taken and trainer.global_step > self._taken_step:
            trainer.log_metrics({**self._taken, **self._values("on_train_batch_end")})
            self._taken = {}

    def _values(self, hook: str) -> dict[str, float]:
        stats: dict[str, float] = {}
        if self._reads_device:
            stats.update(torch.accelerator.memory_stats(self._device))
        if self._reads_cpu:
            stats.update(_cpu_stats())
        return {f"{type(self).__qualname__}.{hook}/{name}": float(value) for name, value in stats.items()}


def _has_psutil() -> bool:
    return find_spec("psutil") is not None


def _cpu_stats() -> dict[str, float]:
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
