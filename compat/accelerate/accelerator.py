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

from ...framework.core.absent_names import lacks, sentence_for
from ...framework.core.arguments import check_names, is_from_call, names_arguments, refuse_unknown
from ...framework.core.errors import ConfigurationError, did_you_mean
from ...framework.core.foreign_names import MEMBERS
from ...framework.fabric.fabric import Fabric
from ...framework.fabric.module import engine_of
from ...framework.parallel.strategy import Strategy
from .arguments import by_class, default_devices, precision_of, strategy_of
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
from .preparation import Preparation
from .saved_states import NumberedStates, write_object
from .state import AcceleratorState, GradientState, on_local_process
from .trackers import Trackers

P = ParamSpec("P")
R = TypeVar("R")


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
        self._trackers = Trackers(self.fabric, log_with, self.project_configuration)
        self.state = AcceleratorState(self.fabric, self.mixed_precision, deepspeed_plugin, fsdp_plugin)
        self.gradient_state = GradientState(self.fabric)
        self._preparation = Preparation(
            self.fabric, self.dataloader_config, device_placement, step_scheduler_with_optimizer
        )
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
    init_trackers = verb("_trackers", Trackers.init_trackers)
    get_tracker = verb("_trackers", Trackers.get_tracker)

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

    prepare = verb("_preparation", Preparation.prepare)
    prepare_model = verb("_preparation", Preparation.prepare_model)
    prepare_optimizer = verb("_preparation", Preparation.prepare_optimizer)
    prepare_scheduler = verb("_preparation", Preparation.prepare_scheduler)
    prepare_data_loader = verb("_preparation", Preparation.prepare_data_loader)

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
