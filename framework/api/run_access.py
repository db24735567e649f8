"""The Trainer of a module, and the values of its current or last run that steps and hooks read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import nn

from ..core.errors import ConfigurationError
from .outside_run import OutsideRun

if TYPE_CHECKING:
    from ..fabric.fabric import Fabric
    from ..metrics.logger import Logger
    from .contracts import AttachedRun, TrainerView


# The modules that were passed to a Trainer or a Fabric, while their runs last.
_IN_RUNS: WeakSet[RunAccess] = WeakSet()


class RunAccess(nn.Module):
    """The side of ``TrainModule`` that reads its Trainer.

    A module that is a part of another one, at any depth, reads the Trainer of the whole.
    """

    _own_run: AttachedRun | None = None
    # A weak reference, so that the whole is not a submodule of its part.
    _whole: ref[RunAccess] | None = None

    def _use_run(self, run: AttachedRun | None) -> None:
        """Read from a run, or from none, with all parts; those that are added later are found when they read."""
        self._own_run, self._whole = run, None
        if self._is_in_run(run):
            _IN_RUNS.add(self)
        else:
            _IN_RUNS.discard(self)
        for part in self._parts:
            part._whole = ref(self)

    @property
    def _parts(self) -> list[RunAccess]:
        return [part for part in self.modules() if isinstance(part, RunAccess) and part is not self]

    @property
    def _run(self) -> AttachedRun | None:
        own = self._own_run
        if self._is_in_run(own):
            return own
        whole = self._find_whole()
        return own if whole is None else whole._own_run

    def _find_whole(self) -> RunAccess | None:
        """Return the module that this one is a part of: one in a run, if there is one."""
        whole = None if self._whole is None else self._whole()
        if _IN_RUNS and whole not in _IN_RUNS and self not in _IN_RUNS:
            found = (other for other in list(_IN_RUNS) if any(part is self for part in other.modules()))
            whole = next(found, whole)
            self._whole = None if whole is None else ref(whole)
        return whole

    @staticmethod
    def _is_in_run(run: AttachedRun | None) -> bool:
        return run is not None and not isinstance(run, OutsideRun)

    @property
    def _live(self) -> AttachedRun:
        run = self._run
        if run is None:
            raise ConfigurationError(
                f"{type(self).__name__} belongs to no run: pass it to Trainer.fit, validate, test or predict, or set "
                "module.trainer in a test."
            )
        return run

    @property
    def trainer(self) -> TrainerView:
        """The Trainer of the current or last run. Set it to use steps and hooks without a run, for example in tests."""
        return self._live.trainer

    @trainer.setter
    def trainer(self, trainer: TrainerView | None) -> None:
        self.use_trainer(trainer)

    def use_trainer(self, trainer: TrainerView | None) -> None:
        """Set ``trainer``. Called by the Trainer after a stage whose ranks were forked.

        Raises:
            ConfigurationError: the module is in a run.
        """
        if self._in_run:
            raise ConfigurationError("module.trainer was set during a run: set it before fit, or after it.")
        self._use_run(None if trainer is None else OutsideRun(trainer))

    @property
    def _in_run(self) -> bool:
        return self._is_in_run(self._run)

    def check_free(self, caller: str) -> None:
        """Check that no stage of a Trainer is in progress on this module. Called by the Trainer.

        Raises:
            ConfigurationError: there is one.
        """
        # The run of a Fabric has no stages.
        if (stage := getattr(self._run, "stage", None)) is not None:
            raise ConfigurationError(
                f"{caller} was given {type(self).__name__}, which is in use by Trainer.{stage}: wait until that has "
                "ended, or pass a copy, copy.deepcopy(module)."
            )

    @property
    def fabric(self) -> Fabric:
        """The Fabric of the Trainer."""
        return self._live.fabric

    @property
    def device(self) -> torch.device:
        """The device of the parameters, or of the run without parameters."""
        parameter = next(self.parameters(), None)
        if parameter is not None:
            return parameter.device
        return self._live.world.device if self._in_run else torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        """Whether ``device`` is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return run.progress.epoch if (run := self._run) is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer updates applied."""
        return run.progress.global_step if (run := self._run) is not None else 0

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return run.trainer.global_rank if (run := self._run) is not None else 0

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return run.trainer.local_rank if (run := self._run) is not None else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the Trainer; an empty list without a Trainer."""
        return run.trainer.loggers if (run := self._run) is not None else []

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        self.fabric.print(*args, **kwargs)

    @property
    def device_mesh(self) -> None:
        """None: ``configure_tensor_parallel`` is given the mesh of the ranks that split layers."""

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks, stacked in a new first dimension; see ``Fabric.all_gather``. Collective."""
        return self.fabric.all_gather(data, group, sync_grads)
