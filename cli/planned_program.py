"""``PlannedFit``: the first fit of a script, or of a class, with what is needed to plan it. Nothing is trained."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import Trainer, TrainModule
from ..framework.core.errors import ConfigurationError, PhalanxError
from ..framework.core.interception import intercepting
from ..framework.core.registry import STRATEGIES
from ..framework.core.wording import a_type
from ..framework.run.overrides import is_overridden
from ..framework.trainer.session import Session, StageRequest
from ..framework.trainer.settings import TrainerSettings
from .user_program import find_module, require_file


@dataclass(frozen=True)
class PlannedFit:
    """The arguments of a fit, and a Trainer of one rank on this machine that plans it."""

    trainer: Trainer
    settings: TrainerSettings
    """The settings that the program has given."""
    module: TrainModule
    loaders: Any = None
    datamodule: Any = None
    activation_bytes: int | None = None
    """0 if there is no data to measure them by."""

    @property
    def ranks(self) -> int:
        """The number of ranks that the program asks for."""
        return self.ranks_per_node * self.settings.num_nodes

    @property
    def ranks_per_node(self) -> int:
        """The number of them on each node."""
        devices = self.settings.devices
        if isinstance(devices, list):
            return len(devices)
        if str(devices).strip().isdigit():
            return int(devices)
        # "auto" and -1: the devices of this machine.
        return 1 if self.settings.accelerator == "cpu" else max(1, torch.cuda.device_count())

    @property
    def strategy(self) -> str:
        """The name of the strategy that the program asks for."""
        given = self.settings.strategy
        return canonical_strategy(given) if isinstance(given, str) else given.name


def canonical_strategy(name: str) -> str:
    """Return the name that a strategy's name stands for, ``"auto"`` included.

    Raises:
        UnknownNameError: there is no such strategy.
    """
    return name if name == "auto" else STRATEGIES.canonical(name)


class _Planner:
    """Lets a script's Trainers be ones for a single rank of this machine, and ends the script at its first fit."""

    def __init__(self, script: str) -> None:
        self._script = script
        self.found: PlannedFit | ConfigurationError | None = None

    def settings(self, given: TrainerSettings) -> TrainerSettings:
        # The machine of the script may have devices that this one lacks, and a plan writes no files.
        return replace(given, **_HERE, accelerator=_accelerator(given.accelerator))

    def stage(self, session: Session, stage: str, request: StageRequest) -> Any:
        if stage != "fit":
            self._end(ConfigurationError(f"{self._script} calls {stage} before fit, and a plan runs no stage."))
        assert isinstance(session.view, Trainer)
        loaders = request.given["train"]
        self._end(PlannedFit(session.view, session.requested, request.module, loaders, request.datamodule))

    def loop(self) -> None:
        self._end(ConfigurationError(f"{self._script} has a loop of its own, on Fabric: a plan needs a Trainer's fit."))

    def _end(self, found: PlannedFit | ConfigurationError) -> NoReturn:
        # A script that handles all exceptions may arrive here again.
        if self.found is None:
            self.found = found
        # Not a subclass: of all exceptions, this one alone ends a thread without a traceback.
        raise SystemExit


_HERE: dict[str, Any] = {
    "strategy": "auto", "devices": 1, "num_nodes": 1, "parallel": None, "max_restarts": 0, "compile": False,
}  # fmt: skip


def _accelerator(given: str) -> str:
    return "cpu" if given == "cpu" or not torch.cuda.is_available() else "auto"


def of_script(script: str, arguments: Sequence[str]) -> PlannedFit:
    """Run a script up to its first fit. What it prints appears on stderr.

    Raises:
        ConfigurationError: there is no such script, the file is of another kind, or it calls no fit.
        SystemExit: the script has failed, and its traceback was printed.
    """
    require_file(script, "script")
    path = Path(script)
    if path.suffix != ".py":
        raise ConfigurationError(f"{script!r} is not a Python script: a plan is made of a script or of MODULE:CLASS.")
    planner = _Planner(script)
    before, path_before = sys.argv, list(sys.path)
    sys.argv, sys.path[:] = [script, *arguments], [str(path.absolute().parent), *sys.path]
    try:
        with intercepting(planner), contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(script, run_name="__main__")
    except (Exception, SystemExit) as error:
        # The fit may be that of a thread, whose end the script takes for a failure.
        if planner.found is None:
            _fail(error, script)
    finally:
        sys.argv, sys.path[:] = before, path_before
    if isinstance(planner.found, PlannedFit):
        return planner.found
    raise planner.found or ConfigurationError(f"{script} ended without calling fit, so there is nothing to plan.")


def of_class(given: str) -> PlannedFit:
    """Make a module of the class that ``package.module:Class`` names.

    Raises:
        ConfigurationError: there is no such class, or its constructor requires arguments.
    """
    build = find_module(given, "")
    try:
        module = build()
    except TypeError as error:
        raise ConfigurationError(
            f"{given} cannot be built without arguments ({error}): plan a script instead."
        ) from error
    if not isinstance(module, TrainModule):
        raise ConfigurationError(f"{given} makes {a_type(module)}, and a plan needs a TrainModule.")
    trainer = Trainer(**_HERE, accelerator=_accelerator("auto"))
    bytes_given = None if is_overridden("train_dataloader", module) else 0
    return PlannedFit(trainer, TrainerSettings(devices=1), module, activation_bytes=bytes_given)


def _fail(error: BaseException, script: str) -> NoReturn:
    """Print the error of a script as the interpreter does, without the frames above the script's, and exit."""
    if isinstance(error, (PhalanxError, SystemExit)):
        raise error
    trace, file = error.__traceback__, os.path.abspath(script)
    while trace is not None and os.path.abspath(trace.tb_frame.f_code.co_filename) != file:
        trace = trace.tb_next
    # A script that cannot be parsed has no frame; its line is part of the error.
    traceback.print_exception(type(error), error, trace)
    raise SystemExit(1) from None
