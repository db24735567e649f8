"""``Accelerator``: Accelerate's methods over a Fabric."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import update_wrapper
from inspect import signature
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.core.absent_names import lacks, sentence_for
from ...framework.core.arguments import check_names, is_from_call, names_arguments, refuse_unknown
from ...framework.core.errors import ConfigurationError, did_you_mean, unknown
from ...framework.core.foreign_names import MEMBERS
from ...framework.core.registry import LOGGERS
from ...framework.fabric.fabric import Fabric
from ...framework.fabric.module import engine_of
from ...framework.metrics.logger import Logger
from ...framework.parallel.strategy import Strategy
from .arguments import by_class, default_devices, precision_of, strategy_of, updates
from .configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from .plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin, compilation_of
from .saved_states import NumberedStates, write_object
from .state import AcceleratorState, GradientState, on_local_process

P = ParamSpec("P")
R = TypeVar("R")

# The argument that takes the project's name, for loggers whose ``name`` is that of the run.
_PROJECT_ARGUMENTS = {"mlflow": "experiment_name", "trackio": "project", "wandb": "project"}


def verb(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls ``method`` of the attribute ``part``; signature and docstring are kept."""

    def call(accelerator: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(getattr(accelerator, part), *args, **kwargs)
        except TypeError as error:
            if is_from_call(error):
                refuse_unknown(f"{type(accelerator).__name__}.{method.__name__}", method, kwargs)
            raise

    update_wrapper(call, method)
    return call


def read(path: str) -> Any:
    """Return a property that reads an attribute of an attribute."""
    return property(attrgetter(path), doc=f"The value of ``{path}``.")


@lacks(MEMBERS["Accelerator"])
class Accelerator:
    """Ranks, strategy and precision for hand-written loops, under Accelerate's names; see ``phalanx.Fabric``.

    Without a launcher it runs on one rank, unless ``devices`` asks for more. ``strategy`` and ``devices`` are those of
    Fabric; the other arguments are Accelerate's.

    Attributes:
        fabric: The Fabric that does the work.
        state: The place of this process, the precision and the plug-ins.
        gradient_state: The micro-batch that the loop is in.
        trackers: The loggers, after ``init_trackers``.
        project_configuration: The directories of the run.
        dataloader_config: The sharing of loaders.

    Raises:
        ConfigurationError: an argument breaks a rule.
    """

    @names_arguments
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[Any] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        *,
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] | None = None,
        **others: Any,
    ) -> None:
        known = [name for name in signature(Accelerator).parameters if name != "others"]
        check_names("Accelerator", {k: v for k, v in others.items() if v is not None}, known)
        handlers = by_class(kwargs_handlers)
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None:
            self.project_configuration.set_directories(os.fspath(project_dir))
        self.dataloader_config = dataloader_config or DataLoaderConfiguration(split_batches=split_batches)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.mixed_precision = mixed_precision or "no"
        self.fabric = Fabric(
            accelerator="cpu" if cpu else "auto",
            strategy=strategy_of(strategy, deepspeed_plugin, fsdp_plugin, handlers),
            devices=default_devices() if devices is None else devices,
            precision=precision_of(mixed_precision, handlers.get(GradScalerKwargs)),
            accumulate=getattr(gradient_accumulation_plugin, "num_steps", gradient_accumulation_steps),
            compile=compilation_of(dynamo_backend, dynamo_plugin),
        )
        self.fabric.launch()
        self._autocast = handlers.get(AutocastKwargs)
        self._profile = handlers.get(ProfileKwargs) or ProfileKwargs()
        self._log_with, self._loggers = _loggers_of(log_with), dict[str, Logger]()
        self.state = AcceleratorState(self.fabric, self.mixed_precision, deepspeed_plugin, fsdp_plugin)
        self.gradient_state = GradientState(self.fabric)
        self._states = NumberedStates(self.fabric, self.project_configuration)

    def __getattr__(self, name: str) -> Any:
        if (sentence := sentence_for(Accelerator, name)) is not None:
            raise AttributeError(f"Accelerator has no {name}: {sentence}.")
        names = [each for each in dir(self) if each not in MEMBERS["Accelerator"]]
        raise AttributeError(f"Accelerator has no {name}.{did_you_mean(name, names)}")

    # ---- the same as in Fabric --------------------------------------------------------------------------------------

    accumulate = verb("fabric", Fabric.accumulate)
    check_trigger = verb("fabric", Fabric.check_trigger)
    clip_grad_norm_ = verb("fabric", Fabric.clip_grad_norm_)
    clip_grad_value_ = verb("fabric", Fabric.clip_grad_value_)
    end_training = verb("fabric", Fabric.end_training)
    free_memory = clear = verb("fabric", Fabric.free_memory)
    gather = verb("fabric", Fabric.gather)
    gather_for_metrics = verb("fabric", Fabric.gather_for_metrics)
    join_uneven_inputs = verb("fabric", Fabric.join_uneven_inputs)
    local_main_process_first = verb("fabric", Fabric.local_main_process_first)
    main_process_first = verb("fabric", Fabric.main_process_first)
    on_last_process = verb("fabric", Fabric.on_last_process)
    on_local_main_process = verb("fabric", Fabric.on_local_main_process)
    on_main_process = verb("fabric", Fabric.on_main_process)
    on_process = verb("fabric", Fabric.on_process)
    pad_across_processes = verb("fabric", Fabric.pad_across_processes)
    print = verb("fabric", Fabric.print)
    reduce = verb("fabric", Fabric.reduce)
    register_for_checkpointing = verb("fabric", Fabric.register_for_checkpointing)
    save_model = verb("fabric", Fabric.save_model)
    set_trigger = verb("fabric", Fabric.set_trigger)
    skip_first_batches = verb("fabric", Fabric.skip_first_batches)
    split_between_processes = verb("fabric", Fabric.split_between_processes)
    unscale_gradients = verb("fabric", Fabric.unscale_gradients)
    wait_for_everyone = verb("fabric", Fabric.wait_for_everyone)
    no_sync = verb("fabric", Fabric.no_backward_sync)

    @names_arguments
    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Create the loggers that ``log_with`` names, and record the configuration of the run.

        They write below the logging directory and the project's name.

        Args:
            project_name: name of the directory below the logging directory.
            config: hyperparameters.
            init_kwargs: for each name of a logger, further arguments.
        """
        for given in self._log_with:
            if isinstance(given, Logger):
                self._loggers[given.name] = given
                continue
            options = {"save_dir": self.project_configuration.logging_dir or "."}
            if argument := _PROJECT_ARGUMENTS.get(given):
                options[argument] = project_name
            else:
                options.update(name=project_name, version="")
            self._loggers[given] = LOGGERS.load(given)(**{**options, **(init_kwargs or {}).get(given, {})})
        self.fabric.loggers.extend(self._loggers.values())
        if self.fabric.is_global_zero and config is not None:
            for logger in self.fabric.loggers:
                logger.log_hyperparams(config)

    @names_arguments
    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a logger by name, or with ``unwrap`` its experiment object.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if not self._loggers:
            raise ConfigurationError("get_tracker: there are no trackers yet; pass log_with, and call init_trackers.")
        if name not in self._loggers:
            raise unknown("tracker", name, self._loggers)
        logger = self._loggers[name]
        return logger.experiment if unwrap else logger

    @names_arguments
    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Send metrics to all loggers, from rank 0."""
        self.fabric.log_dict(values, step)

    # ---- the place of this process ----------------------------------------------------------------------------------

    device = read("fabric.device")
    num_processes = read("fabric.world_size")
    process_index = read("fabric.global_rank")
    local_process_index = read("fabric.local_rank")
    is_main_process = read("fabric.is_main_process")
    is_local_main_process = read("fabric.is_local_main_process")
    is_last_process = read("fabric.is_last_process")
    sync_gradients = read("fabric.sync_gradients")
    optimizer_step_was_skipped = read("fabric.optimizer_step_was_skipped")
    trackers = read("fabric.loggers")

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return bool(self.num_processes > 1)

    @property
    def multi_device(self) -> bool:
        """Whether several ranks train on GPUs that each hold the full model."""
        return bool(self.distributed_type == DistributedType.MULTI_GPU)

    @property
    def is_fsdp2(self) -> bool:
        """Whether torch's ``fully_shard`` shards the model."""
        return bool(self.distributed_type == DistributedType.FSDP)

    is_composable_parallelism_enabled = is_fsdp2
    distributed_type = read("state.distributed_type")
    should_save_model = read("fabric.is_local_main_process")

    @names_arguments
    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: run the function on one rank of each node and return None on the others."""
        return on_local_process(self.fabric, function, local_process_index)

    split_batches = read("dataloader_config.split_batches")
    dispatch_batches = read("dataloader_config.dispatch_batches")
    even_batches = read("dataloader_config.even_batches")
    use_seedable_sampler = read("dataloader_config.use_seedable_sampler")
    use_stateful_dataloader = read("dataloader_config.use_stateful_dataloader")
    non_blocking = read("dataloader_config.non_blocking")

    # ---- set-up -----------------------------------------------------------------------------------------------------

    @names_arguments
    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Set up modules, optimizers, schedulers and loaders. Collective.

        Other objects come back as they are.

        Args:
            objects: in any order. An optimizer that is given with its module is set up together with it.
            device_placement: for each object, whether it is moved to the device.

        Returns:
            One object, or a tuple in the order given.
        """
        moves = device_placement or [self.device_placement] * len(objects)
        ready: dict[int, Any] = {}
        for given, move in zip(objects, moves, strict=True):
            if isinstance(given, nn.Module):
                # An optimizer of two modules is set up with the first, and taken along to the second.
                optimizers = [
                    each
                    for each in objects
                    if isinstance(each, Optimizer) and id(each) not in ready and updates(each, given)
                ]
                found = self.fabric.setup(given, *optimizers, move_to_device=move)
                ready.update(zip(map(id, [given, *optimizers]), found if optimizers else [found], strict=True))
        for given, move in zip(objects, moves, strict=True):
            if id(given) not in ready:
                ready[id(given)] = self._prepare_one(given, move)
        result = tuple(ready[id(given)] for given in objects)
        return result[0] if len(result) == 1 else result

    def _prepare_one(self, given: Any, move: bool) -> Any:
        if isinstance(given, Optimizer):
            return self.prepare_optimizer(given)
        if hasattr(given, "state_dict") and callable(getattr(given, "get_last_lr", None)):
            return self.prepare_scheduler(given)
        if isinstance(given, torch.utils.data.DataLoader):
            return self.prepare_data_loader(given, move)
        return given

    @names_arguments
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Set up a module whose optimizer is set up later, or that has none. Collective."""
        move = self.device_placement if device_placement is None else device_placement
        return self.fabric.setup_module(model, move_to_device=move)

    @names_arguments
    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Set up an optimizer of a module that is set up."""
        return self.fabric.setup_optimizers(optimizer)

    @names_arguments
    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Set up a scheduler. It steps once for each rank after an update, unless batches are split."""
        steps = 1 if self.dataloader_config.split_batches else self.fabric.world_size
        follows = self.step_scheduler_with_optimizer
        return self.fabric.setup_scheduler(scheduler, follows, steps_per_update=steps if follows else 1)

    @names_arguments
    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Set up a loader. Collective.

        Raises:
            ConfigurationError: ``slice_fn_for_dispatch`` is given.
        """
        if slice_fn_for_dispatch is not None:
            raise ConfigurationError(
                "slice_fn_for_dispatch is not known here: with dispatch_batches each rank gets whole batches of the "
                "loader, so give it the batch size of one rank."
            )
        config = self.dataloader_config
        return self.fabric.setup_dataloaders(
            data_loader,
            move_to_device=self.device_placement if device_placement is None else device_placement,
            split_batches=config.split_batches,
            dispatch_batches=bool(config.dispatch_batches),
            even_batches=config.even_batches,
        )

    @names_arguments
    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Generator[None, None, None]:
        """Reduce gradients in the backward passes inside, whose forward passes ran within ``no_sync``. Collective."""
        engine = engine_of(model)
        if engine is None:
            raise ConfigurationError("trigger_sync_in_backward takes a module that prepare returned.")
        before = engine.allow_sync(True)
        try:
            yield
        finally:
            engine.allow_sync(before)

    @names_arguments
    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a part of the module was spread over several devices by a device map."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    @names_arguments
    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the user's own module."""
        return self.fabric.unwrap_model(model)

    @names_arguments
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the precision's context for computations outside a set-up module."""
        handler = autocast_handler or self._autocast
        if handler is None:
            return self.fabric.autocast()
        dtype, enabled = self.fabric.precision.compute_dtype, handler.enabled and self.mixed_precision != "no"
        return torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=handler.cache_enabled)

    @names_arguments
    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Profile a block with ``torch.profiler.profile``."""
        handler = profile_handler or self._profile
        return self.fabric.profile(handler.output_trace_dir, "profile", **handler.options())

    # ---- files ------------------------------------------------------------------------------------------------------

    save_state = verb("_states", NumberedStates.save)
    load_state = verb("_states", NumberedStates.load)
    register_save_state_pre_hook = verb("_states", NumberedStates.register_save_state_pre_hook)
    register_load_state_pre_hook = verb("_states", NumberedStates.register_load_state_pre_hook)
    project_dir = read("project_configuration.project_dir")
    logging_dir = read("project_configuration.logging_dir")
    save_iteration = read("project_configuration.iteration")

    @names_arguments
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a module's weights in full; under a strategy that shards them, on rank 0. Collective."""
        return self.fabric.full_state_dict(model)

    @names_arguments
    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object with ``torch.save``, or a dict of tensors as safetensors, on rank 0."""
        if self.is_main_process:
            write_object(obj, f, safe_serialization)

    # `self` is positional-only, as in Fabric: an option may be named `self`.
    def backward(self, /, loss: Tensor, **options: Any) -> None:
        """Compute gradients. Collective; see ``Fabric.backward``.

        Outside ``accumulate`` the loss is divided by ``gradient_accumulation_steps``, so that the gradients of that
        many calls add up to their mean.
        """
        if not self.fabric.is_accumulating and self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        self.fabric.backward(loss, **options)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches of an update. It may be set between two updates."""
        return self.fabric.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.fabric.set_accumulation(steps)


def _loggers_of(log_with: Any) -> list[str | Logger]:
    """Return the loggers and names of loggers that ``log_with`` has; ``"all"`` is TensorBoard and CSV.

    Raises:
        UnknownNameError: there is no logger of a name.
    """
    several = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    names = [each if isinstance(each, Logger) else str(getattr(each, "value", each)) for each in several]
    found: list[str | Logger] = ["tensorboard", "csv"] if "all" in names else [*names]
    for name in found:
        if isinstance(name, str):
            LOGGERS.load(name)
    return found
