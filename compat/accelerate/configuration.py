"""The configuration objects of Accelerate, with the fields that have an effect here; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.profiler import ProfilerActivity, schedule

from ...framework.core.arguments import names_fields
from ...framework.core.errors import ConfigurationError, unknown


class DistributedType(str, Enum):
    """The kind of distribution over ranks."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    # Kinds of hardware that phalanx does not train on: programs compare with them.
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_XPU = "MULTI_XPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_HPU = "MULTI_HPU"


@names_fields
@dataclass
class DataLoaderConfiguration:
    """The sharing of loaders between ranks.

    Attributes:
        split_batches: the loader's batch is the global one, of which each rank takes its part.
        dispatch_batches: only rank 0 reads, and sends the other ranks their batches.
        even_batches: all ranks get the same number of batches.
        use_seedable_sampler: accepted; a permutation always depends on the seed and the epoch alone.
        non_blocking: accepted; copies from pinned memory never block.
        use_stateful_dataloader: accepted; the position of a loader is saved in every checkpoint.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@names_fields
@dataclass
class ProjectConfiguration:
    """The directories of a run, and how many of its states are kept.

    Attributes:
        project_dir: the root of all files.
        logging_dir: the root of the trackers' files; default: ``project_dir``.
        automatic_checkpoint_naming: number the states that ``save_state`` writes below ``project_dir/checkpoints``.
        total_limit: the number of numbered states that are kept; None keeps all.
        iteration: the number of the next state.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0

    @property
    def states(self) -> Path:
        """The directory of numbered states."""
        return Path(self.project_dir or ".") / "checkpoints"

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the root, and the root of the trackers' files if there is none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@names_fields
@dataclass
class GradientAccumulationPlugin:
    """The number of micro-batches of an update.

    Attributes:
        num_steps: the number of micro-batches.
        adjust_scheduler: accepted; a scheduler always steps once for each update.
        sync_with_dataloader: must be True: the last window of a loader always ends with it.

    Raises:
        ConfigurationError: ``sync_with_dataloader`` is False.
    """

    num_steps: int
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True

    def __post_init__(self) -> None:
        if not self.sync_with_dataloader:
            raise ConfigurationError(
                "GradientAccumulationPlugin(sync_with_dataloader=False) lets a window continue in the next epoch, and "
                "here the last window of a loader ends with it: leave it out, or write the loop without accumulate."
            )


@names_fields
@dataclass
class AutocastKwargs:
    """Whether the block of ``autocast`` computes in the precision's dtype, and whether casts are cached."""

    enabled: bool = True
    cache_enabled: bool | None = None


class DDPCommunicationHookType(str, Enum):
    """The compression of gradients under ``ddp``."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@names_fields
@dataclass
class DistributedDataParallelKwargs:
    """Arguments of torch's ``DistributedDataParallel``, and the compression of gradients, for ``DDPStrategy``.

    Attributes:
        comm_hook: the compression.
        comm_wrapper: ``FP16`` or ``BF16``: the dtype in which the hook computes.
        comm_state_option: arguments of torch's ``PowerSGDState``.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``DDPStrategy``.

        Raises:
            ConfigurationError: the compression is not known, or ``comm_state_option`` has no hook to configure.
        """
        given = {name: value for name, value in vars(self).items() if not name.startswith("comm_")}
        kinds = DDPCommunicationHookType
        if self.comm_hook not in list(kinds):
            raise unknown("comm_hook", str(self.comm_hook), [each.value for each in kinds])
        keeps_state = self.comm_hook in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD)
        if self.comm_state_option and not keeps_state:
            raise ConfigurationError(
                "comm_state_option is for PowerSGD: give comm_hook=DDPCommunicationHookType.POWER_SGD."
            )
        if self.comm_hook == kinds.NO:
            return given
        hooks = {
            kinds.FP16: default_hooks.fp16_compress_hook,
            kinds.BF16: default_hooks.bf16_compress_hook,
            kinds.POWER_SGD: powerSGD_hook.powerSGD_hook,
            kinds.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers = {
            kinds.NO: None,
            kinds.FP16: default_hooks.fp16_compress_wrapper,
            kinds.BF16: default_hooks.bf16_compress_wrapper,
        }
        if self.comm_wrapper not in wrappers:
            raise unknown("comm_wrapper", str(self.comm_wrapper), [each.value for each in wrappers])
        given["ddp_comm_hook"] = hooks[self.comm_hook]
        given["ddp_comm_wrapper"] = wrappers[self.comm_wrapper]
        if keeps_state:
            given["ddp_comm_state"] = partial(powerSGD_hook.PowerSGDState, None, **self.comm_state_option)
        return given


@names_fields
@dataclass
class GradScalerKwargs:
    """The loss scale of ``mixed_precision="fp16"``; with ``enabled=False`` losses are not scaled."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@names_fields
@dataclass
class ProfileKwargs:
    """Arguments of ``torch.profiler.profile``.

    Attributes:
        activities: any of ``"cpu"`` and ``"cuda"``.
        output_trace_dir: a directory in which each rank writes its trace as ``profile_<n>.json``.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``torch.profiler.profile``."""
        given = {name: value for name, value in vars(self).items() if value}
        given.pop("output_trace_dir", None)
        if self.activities:
            given["activities"] = [getattr(ProfilerActivity, name.upper()) for name in self.activities]
        if self.schedule_option:
            given["schedule"] = schedule(**given.pop("schedule_option"))
        return given
