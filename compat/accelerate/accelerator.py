"""``Accelerator``: Accelerate's methods over a Fabric."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...framework.core.arguments import names_arguments
from ...framework.fabric.fabric import Fabric
from ...framework.fabric.verbs import verb
from ...framework.parallel.strategy import Strategy
from .arguments import by_class, default_devices, precision_of, strategy_of, updates
from .configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from .states import NumberedStates, write_object
from .trackers import Trackers


def read(path: str) -> Any:
    """Return a property that reads an attribute of an attribute."""
    return property(attrgetter(path), doc=f"The value of ``{path}``.")


class Accelerator:
    """Ranks, strategy and precision for hand-written loops, under Accelerate's names; see ``phalanx.Fabric``.

    Without a launcher it runs on one rank, unless ``devices`` asks for more. ``strategy`` and ``devices`` are those of
    Fabric; the other arguments are Accelerate's.

    Attributes:
        fabric: The Fabric that does the work.
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
        *,
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] | None = None,
    ) -> None:
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
        )
        self.fabric.launch()
        self._autocast = handlers.get(AutocastKwargs)
        self._profile = handlers.get(ProfileKwargs) or ProfileKwargs()
        self._trackers = Trackers(log_with, self.project_configuration)
        self._states = NumberedStates(self.fabric, self.project_configuration)

    # ---- the same as in Fabric --------------------------------------------------------------------------------------

    accumulate = verb("fabric", Fabric.accumulate)
    backward = verb("fabric", Fabric.backward)
    check_trigger = verb("fabric", Fabric.check_trigger)
    clip_grad_norm_ = verb("fabric", Fabric.clip_grad_norm_)
    clip_grad_value_ = verb("fabric", Fabric.clip_grad_value_)
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

    # ---- the place of this process ----------------------------------------------------------------------------------

    device = read("fabric.device")
    num_processes = read("fabric.world_size")
    process_index = read("fabric.global_rank")
    local_process_index = read("fabric.local_rank")
    is_main_process = read("fabric.is_main_process")
    is_local_main_process = read("fabric.is_local_main_process")
    is_last_process = read("fabric.is_last_process")
    sync_gradients = read("fabric.sync_gradients")
    gradient_accumulation_steps = read("fabric.gradient_accumulation_steps")
    optimizer_step_was_skipped = read("fabric.optimizer_step_was_skipped")
    trackers = read("fabric.loggers")

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return bool(self.num_processes > 1)

    @property
    def distributed_type(self) -> DistributedType:
        """How the work is spread over ranks."""
        strategy = self.fabric.strategy
        if strategy.traits.shards_state:
            return DistributedType.DEEPSPEED if strategy.traits.takes_one_optimizer else DistributedType.FSDP
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    split_batches = read("dataloader_config.split_batches")
    dispatch_batches = read("dataloader_config.dispatch_batches")
    even_batches = read("dataloader_config.even_batches")
    use_seedable_sampler = read("dataloader_config.use_seedable_sampler")
    use_stateful_dataloader = read("dataloader_config.use_stateful_dataloader")
    non_blocking = read("dataloader_config.non_blocking")

    # ---- set-up -----------------------------------------------------------------------------------------------------

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
                optimizers = [each for each in objects if isinstance(each, Optimizer) and updates(each, given)]
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

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None) -> Any:
        """Set up a module whose optimizer is set up later, or that has none. Collective."""
        move = self.device_placement if device_placement is None else device_placement
        return self.fabric.setup_module(model, move_to_device=move)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Set up an optimizer of a module that is set up."""
        return self.fabric.setup_optimizers(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Set up a scheduler. It steps once for each rank after an update, unless batches are split."""
        steps = 1 if self.dataloader_config.split_batches else self.num_processes
        follows = self.step_scheduler_with_optimizer
        return self.fabric.setup_scheduler(scheduler, follows, steps_per_update=steps if follows else 1)

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None) -> Any:
        """Set up a loader. Collective."""
        config = self.dataloader_config
        return self.fabric.setup_dataloaders(
            data_loader,
            move_to_device=self.device_placement if device_placement is None else device_placement,
            split_batches=config.split_batches,
            dispatch_batches=bool(config.dispatch_batches),
            even_batches=config.even_batches,
        )

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the user's own module."""
        return self.fabric.unwrap_model(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the precision's context for computations outside a set-up module."""
        handler = autocast_handler or self._autocast
        if handler is None:
            return self.fabric.autocast()
        dtype, enabled = self.fabric.precision.compute_dtype, handler.enabled and self.mixed_precision != "no"
        return torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=handler.cache_enabled)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Profile a block with ``torch.profiler.profile``."""
        handler = profile_handler or self._profile
        return self.fabric.profile(handler.output_trace_dir, **handler.options())

    # ---- trackers ---------------------------------------------------------------------------------------------------

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Create the loggers that ``log_with`` names, and record the configuration of the run.

        Args:
            project_name: name of the directory below the logging directory.
            config: hyperparameters.
            init_kwargs: for each name of a logger, further arguments.
        """
        self.fabric.loggers.extend(self._trackers.create(project_name, init_kwargs or {}))
        if self.is_main_process and config is not None:
            for logger in self.fabric.loggers:
                logger.log_hyperparams(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a logger by name, or with ``unwrap`` its experiment object."""
        logger = self._trackers.find(name)
        return logger.experiment if unwrap else logger

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Send metrics to all loggers, from rank 0."""
        self.fabric.log_dict(values, step)

    def end_training(self) -> None:
        """Close the loggers."""
        self.fabric.end_training()

    # ---- files ------------------------------------------------------------------------------------------------------

    project_dir = read("project_configuration.project_dir")
    logging_dir = read("project_configuration.logging_dir")
    save_iteration = read("project_configuration.iteration")

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object with ``torch.save``, or a dict of tensors as safetensors, on rank 0."""
        if self.is_main_process:
            write_object(obj, f, safe_serialization)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, **options: Any) -> str:
        """Save all objects that are set up or registered, and every rank's random generators. Collective.

        Args:
            output_dir: the directory; by default a numbered one, see ``ProjectConfiguration``.
            options: ``safe_serialization`` is accepted; tensors are always stored as safetensors.

        Returns:
            The directory.
        """
        return self._states.save(output_dir)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Load what ``save_state`` saved, by default the last numbered one. Collective."""
        self._states.load(input_dir)
