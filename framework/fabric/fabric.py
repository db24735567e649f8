"""``Fabric``: world, strategy and precision as verbs, for people who own their loop. The Trainer's loop uses the same.

    fabric = Fabric(strategy="ddp", devices=2, accumulate=4)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for batch in loader:
        with fabric.accumulate(model):
            fabric.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()

The verbs stand on floors: ``ranks`` (who, gather, wait), ``setup`` (modules, optimizers, loaders),
``training`` (backward, accumulate, clip), ``checkpoints`` (save, load), and here launching and the rest.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError
from ..core.precision import DefaultDtype, Precision
from ..core.registry import CALLBACKS, LOGGERS
from ..distributed.seed import seed_everything
from ..distributed.world import placement
from ..launch.exit_hooks import install_rank_hooks
from ..launch.fork_launcher import launch_function
from ..launch.script_launcher import launch_script
from ..metrics.logger import Logger
from ..parallel.resources import resolve_resources
from ..parallel.strategy import Strategy
from ..system.entry_script import can_rerun_script
from .checkpoints import CheckpointVerbs


class Fabric(CheckpointVerbs):
    """The verbs of training on one rank or many.

    Args:
        accelerator: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        strategy: a name such as ``"ddp"``, or a configured object; ``"auto"`` is ``single`` for one rank, ``ddp`` for
            more, as no module is known yet that could be too large for them.
        devices: ranks on each node.
        num_nodes: how many nodes.
        precision: a name such as ``"bf16-mixed"``, or a ``Precision``.
        accumulate: micro-batches for each optimizer step inside ``accumulate``, a number or a schedule.
        callbacks: objects whose hooks ``call`` calls, or names of registered ones.
        loggers: where ``log`` writes: objects or names.

    Raises:
        ConfigurationError: an argument breaks a rule, or does not fit the machine or the launcher.
    """

    def __init__(
        self,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        accumulate: int | AccumulationSchedule = 1,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        super().__init__(resolve_resources(accelerator, strategy, devices, num_nodes, precision), accumulate)
        self.callbacks: list[Any] = [
            CALLBACKS.load(one)() if isinstance(one, str) else one for one in _listed(callbacks)
        ]
        self.loggers: list[Logger] = [LOGGERS.load(one)() if isinstance(one, str) else one for one in _listed(loggers)]
        self._registered = []

    # ---- ranks ----------------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the ranks, where none were started, and run ``function(fabric, *args, **kwargs)`` in them if given.

        A script is run again once for each rank, and this process only watches them; what follows in the script runs in
        the ranks. In a notebook or an interpreter the function runs in forked ranks, and what it returns on rank 0 is
        returned here. Under torchrun and its like the ranks are there already.

        Raises:
            ConfigurationError: there is no script to run again, and no function.
            RankError: a forked rank failed.
        """
        if self.resources.must_launch:
            if can_rerun_script():
                launch_script(self.resources.world_size, libraries=self.resources.strategy.libraries)
            if function is None:
                raise ConfigurationError(
                    f"launch() with devices={self.resources.devices} has no script to run again for each rank: in a "
                    "notebook or an interpreter, put the code into a function and call launch(function)."
                )
            return launch_function(_run_in_rank, (self, function, args, kwargs), self.resources.world_size)
        install_rank_hooks(self.resources.place)
        _ = self.world
        return None if function is None else function(self, *args, **kwargs)

    def seed_everything(self, seed: int | None = None, workers: bool = False, verbose: bool = False) -> int:
        """Seed all generators alike on all ranks, and the order of loaders set up from now on; return the seed."""
        self._seed = seed_everything(seed, workers, verbose)
        return self._seed

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build modules on this rank's device in the precision's dtype; with ``empty_init``, not initialised."""
        with ExitStack() as stack:
            stack.enter_context(self.device)
            stack.enter_context(self.strategy.building())
            stack.enter_context(DefaultDtype(self.precision.parameter_dtype))
            if empty_init:
                stack.enter_context(_NoInitialisation())
            yield

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of all that was set up and empty the caches; returns a None for each object, to assign to its name."""
        for engine in self._engines:
            engine.strategy.teardown()
        for held in (self._engines, self._schedulers, self._loaders, self._registered, self._windows):
            held.clear()
        self._window = None
        del held
        count = len(objects)
        del objects
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return [None] * count

    # ---- callbacks and loggers ------------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook of the callbacks that have it, in order, with the keyword arguments that each takes."""
        for callback in self.callbacks:
            hook = getattr(callback, hook_name, None)
            if callable(hook):
                hook(*args, **_accepted(hook, kwargs))

    @property
    def logger(self) -> Logger:
        """The first logger.

        Raises:
            ConfigurationError: there is none.
        """
        if not self.loggers:
            raise ConfigurationError("this Fabric has no logger: pass loggers=... to it.")
        return self.loggers[0]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Send a figure to all loggers, on rank 0."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send figures to all loggers, on rank 0; ``step`` is by default the number of updates so far."""
        if not self.is_global_zero or not self.loggers:
            return
        if step is None:
            step = max((one.applied for one in self._optimizers()), default=0)
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for logger in self.loggers:
            logger.log_metrics(numbers, step)

    def end_training(self) -> None:
        """Close the loggers; call it when the loop is over."""
        if self.is_global_zero:
            for logger in self.loggers:
                logger.finalize("success")

    @contextmanager
    def profile(self, trace_dir: str | Path | None = None, **options: Any) -> Generator[Any, None, None]:
        """Profile the block with ``torch.profiler.profile(**options)``; each rank writes its trace if asked."""
        with torch.profiler.profile(**options) as profiler:
            yield profiler
        if trace_dir is not None:
            directory = Path(trace_dir)
            directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(directory / f"rank_{self.global_rank}.json"))


def _run_in_rank(fabric: Fabric, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fabric.resources.place = placement()
    result = function(fabric, *args, **kwargs)
    # A forked rank ends without its exit handlers, so what loggers hold back is written now.
    fabric.end_training()
    return result


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _accepted(hook: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(hook).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


class _NoInitialisation(TorchFunctionMode):
    """Leaves out what ``torch.nn.init`` would fill new parameters with: they are loaded later."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
