"""The keyword arguments of the DeepSpeed strategies: what they are, and their rules."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ...framework.core.errors import ConfigurationError, unknown
from .keys import check_config, read_config

if TYPE_CHECKING:
    from typing_extensions import Unpack

Offload = Literal["cpu", "nvme"]


class ZeroArguments(TypedDict, total=False):
    """What ``DeepSpeedStrategy`` takes, all optional. Sizes count elements, not bytes."""

    stage: int
    """1, 2 or 3; by default what the config says, else 2."""
    offload_optimizer: bool | Offload | None
    """Keep the optimizer's state in the CPU's memory (True, "cpu") or on a disk ("nvme", stage 3)."""
    offload_parameters: bool | Offload | None
    """Keep parameters there too; stage 3."""
    nvme_path: str | os.PathLike[str] | None
    """A folder on a fast local disk, on every node."""
    config: Mapping[str, Any] | str | os.PathLike[str] | None
    """DeepSpeed's own settings, as a dict or the path of its JSON."""
    gather_weights: Literal["rank_zero", "all", "none"]
    """Who holds the module's whole weights after a fit."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"]
    """What gradients are added up in: fp32 unless asked otherwise."""
    communication_data_type: Literal["fp32", "bf16", "fp16"]
    """What gradients are reduced in: fp32 unless asked otherwise."""
    overlap_comm: bool
    contiguous_gradients: bool
    reduce_scatter: bool
    round_robin_gradients: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    sub_group_size: int
    prefetch_bucket_size: int
    param_persistence_threshold: int
    model_persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    zero_hpz_partition_size: int
    zero_quantized_weights: bool
    zero_quantized_gradients: bool
    pin_memory: bool
    optimizer_buffer_count: int
    params_buffer_count: int
    params_buffer_size: int
    max_in_cpu: int
    block_size: int
    queue_depth: int
    intra_op_parallelism: int
    single_submit: bool
    overlap_events: bool


_ZERO = "zero_optimization"
_OPTIMIZER, _PARAMETERS = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
# Where an argument goes in DeepSpeed's config, dotted.
_HOMES: dict[str, tuple[str, ...]] = {
    "grad_accum_dtype": ("data_types.grad_accum_dtype",),
    "communication_data_type": ("communication_data_type",),
    **{
        name: (f"{_ZERO}.{name}",)
        for name in (
            "overlap_comm",
            "contiguous_gradients",
            "reduce_scatter",
            "round_robin_gradients",
            "reduce_bucket_size",
            "allgather_bucket_size",
            "sub_group_size",
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "zero_quantized_gradients",
        )
    },
    **{
        name: (f"{_ZERO}.stage3_{name}",)
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
        )
    },
    "pin_memory": (f"{_OPTIMIZER}.pin_memory", f"{_PARAMETERS}.pin_memory"),
    "optimizer_buffer_count": (f"{_OPTIMIZER}.buffer_count",),
    "params_buffer_count": (f"{_PARAMETERS}.buffer_count",),
    "params_buffer_size": (f"{_PARAMETERS}.buffer_size",),
    "max_in_cpu": (f"{_PARAMETERS}.max_in_cpu",),
    **{
        name: (f"aio.{name}",)
        for name in ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
    },
}
_INSTEAD = {
    "offload_params_device": "offload_parameters='cpu' or 'nvme'",
    "offload_optimizer_device": "offload_optimizer='cpu' or 'nvme'",
    "remote_device": "offload_parameters='cpu' or 'nvme'",
    "thread_count": "intra_op_parallelism=...",
    "zero_optimization": "strategy='ddp' to train without it",
    "load_full_weights": "nothing: any checkpoint loads under any strategy",
    "logging_batch_size_per_gpu": "nothing: batch sizes are those of the loaders",
    "zero_allow_untested_optimizer": "nothing: any optimizer that updates each element by itself is taken",
    "exclude_frozen_parameters": "nothing: checkpoints are whole",
    "process_group_backend": "nothing: gloo on a CPU, NCCL on GPUs",
    **dict.fromkeys(
        ("accelerator", "cluster_environment", "parallel_devices"), "Trainer(accelerator=..., devices=...)"
    ),
    **dict.fromkeys(
        ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
        "precision='16-mixed', which scales the loss by itself",
    ),
    **dict.fromkeys(
        ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
        "config={'activation_checkpointing': {...}}",
    ),
}
_GATHERS = ("rank_zero", "all", "none")
_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class ZeroOptions:
    """What was asked for, checked. ``config`` holds the user's JSON with the arguments written into it."""

    stage: int = 2
    offload_optimizer: Offload | None = None
    offload_parameters: Offload | None = None
    nvme_path: Path | None = None
    gather_weights: str = "rank_zero"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def offloads(self) -> bool:
        """Whether anything lives outside the device's memory."""
        return self.offload_optimizer is not None or self.offload_parameters is not None

    @property
    def uses_nvme(self) -> bool:
        """Whether anything lives on a disk."""
        return "nvme" in (self.offload_optimizer, self.offload_parameters)

    @property
    def grad_accum_dtype(self) -> str:
        """The name of the dtype that gradients are added up in."""
        return str((self.config.get("data_types") or {}).get("grad_accum_dtype", "fp32"))


def resolve_options(**arguments: Unpack[ZeroArguments]) -> ZeroOptions:
    """Check the arguments of ``DeepSpeedStrategy`` and return what they ask for.

    Raises:
        UnknownNameError: an argument is not known.
        ConfigurationError: one breaks a rule, contradicts the config, or the config holds what phalanx decides.
    """
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    _check_names(given)
    config, called = read_config(given.get("config"))
    zero = config.get(_ZERO)
    zero = zero if isinstance(zero, Mapping) else {}
    clashes: list[str] = []
    stage = _agreed("stage", given.get("stage"), zero.get("stage"), f"{_ZERO}.stage", clashes)
    optimizer = _agreed_device("offload_optimizer", given, zero, "offload_optimizer", clashes)
    parameters = _agreed_device("offload_parameters", given, zero, "offload_param", clashes)
    path = _agreed_path(given, zero, clashes)
    for name, homes in _HOMES.items():
        for home in homes if name in given else ():
            _write(config, home, given[name], name, clashes)
    check_config(config, called, clashes)
    options = ZeroOptions(
        2 if stage is None else stage, optimizer, parameters, path, given.get("gather_weights", "rank_zero"), config
    )
    _check_combination(options)
    return options


def _check_names(given: Mapping[str, Any]) -> None:
    known = list(ZeroArguments.__annotations__)
    for name, value in given.items():
        if name in _INSTEAD:
            raise ConfigurationError(f"DeepSpeedStrategy has no argument {name!r}: use {_INSTEAD[name]}.")
        if name not in known:
            raise unknown("DeepSpeedStrategy argument", name, known)
        if name == "gather_weights" and value not in _GATHERS:
            raise unknown("gather_weights", str(value), _GATHERS)
        if name in ("grad_accum_dtype", "communication_data_type") and value not in _DTYPES:
            raise unknown(name, str(value), _DTYPES)


def _agreed(name: str, argument: Any, entry: Any, home: str, clashes: list[str]) -> Any:
    """Return what was asked for, as an argument or in the config."""
    if argument is not None and entry is not None and entry != "auto" and argument != entry:
        clashes.append(f"{home}: {entry!r} contradicts {name}={argument!r}; keep one of them")
    return entry if argument is None else argument


def _agreed_device(
    name: str, given: Mapping[str, Any], zero: Mapping[str, Any], block: str, clashes: list[str]
) -> Offload | None:
    entry = zero.get(block)
    device = entry.get("device") if isinstance(entry, Mapping) else None
    asked = given.get(name)
    asked = {True: "cpu", False: "none"}.get(asked, asked) if isinstance(asked, bool) else asked
    found = _agreed(name, asked, device, f"{_ZERO}.{block}.device", clashes)
    if found in (None, "none", "auto"):
        return None
    if found not in ("cpu", "nvme"):
        raise unknown(name, str(found), ("cpu", "nvme"))
    return "cpu" if found == "cpu" else "nvme"


def _agreed_path(given: Mapping[str, Any], zero: Mapping[str, Any], clashes: list[str]) -> Path | None:
    found = given.get("nvme_path")
    found = str(found) if isinstance(found, os.PathLike) else found
    for block in ("offload_optimizer", "offload_param"):
        entry = zero.get(block)
        path = entry.get("nvme_path") if isinstance(entry, Mapping) else None
        found = _agreed("nvme_path", found, path, f"{_ZERO}.{block}.nvme_path", clashes)
    if found is None or found == "auto":
        return None
    if not isinstance(found, str) or not found:
        raise ConfigurationError(f"nvme_path={found!r} must be the path of a folder.")
    return Path(found).expanduser().absolute()


def _write(config: dict[str, Any], home: str, value: Any, name: str, clashes: list[str]) -> None:
    """Put an argument where DeepSpeed reads it."""
    *blocks, key = home.split(".")
    block = config
    for each in blocks:
        inner = block[each] = {} if block.get(each) is None else block[each]
        if not isinstance(inner, dict):
            return  # reported as the entry that it is
        block = inner
    if block.get(key, value) != value and block[key] != "auto":
        clashes.append(f"{home}: {block[key]!r} contradicts {name}={value!r}; keep one of them")
    block.setdefault(key, value)


def _check_combination(options: ZeroOptions) -> None:
    stage = options.stage
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (1, 2, 3):
        ddp = " To train without ZeRO use strategy='ddp'." if stage == 0 else ""
        raise ConfigurationError(f"stage={stage!r} is no stage of ZeRO: choose 1, 2 or 3.{ddp}")
    if options.offload_parameters and stage < 3:
        raise ConfigurationError(
            f"offload_parameters={options.offload_parameters!r} needs stage=3, got stage={stage}: only stage 3 splits "
            "parameters. Use stage=3, or offload_optimizer alone."
        )
    if options.offload_optimizer == "nvme" and stage < 3:
        raise ConfigurationError(
            f"offload_optimizer='nvme' needs stage=3, got stage={stage}. Use stage=3, or offload_optimizer='cpu'."
        )
    if options.uses_nvme:
        if options.nvme_path is None:
            raise ConfigurationError(
                "Offloading to NVMe needs a folder on a fast local disk: use DeepSpeedStrategy(stage=3, "
                "offload_optimizer='nvme', offload_parameters='nvme', nvme_path='/path/of/the/disk'), or set the "
                "environment variable PHALANX_NVME_PATH and use strategy='zero3-nvme'."
            )
        check_swap_folder(options.nvme_path)


def check_secondary_shards(options: ZeroOptions, world_size: int) -> None:
    """Refuse groups for ZeRO++'s second copy of the parameters (hpZ) that do not divide the ranks.

    Raises:
        ConfigurationError: they do not.
    """
    zero = options.config.get(_ZERO)
    size = zero.get("zero_hpz_partition_size", 1) if isinstance(zero, Mapping) else 1
    if isinstance(size, int) and size > 0 and world_size % size:
        raise ConfigurationError(
            f"zero_hpz_partition_size={size} does not divide {world_size} rank(s): give the ranks of a node, or leave "
            "it out."
        )


def check_swap_folder(path: Path) -> None:
    """Refuse a folder that DeepSpeed could not swap to, by writing a file as it does, which bypasses the page cache.

    Raises:
        ConfigurationError: nothing can be written there, or its file system knows no direct writes.
    """
    standing = next(each for each in (path, *path.parents) if each.exists())
    try:
        handle, name = tempfile.mkstemp(dir=standing, prefix=".phalanx-")
    except OSError as error:
        raise ConfigurationError(
            f"nvme_path={str(path)!r} cannot be written: {error.strerror} at {str(standing)!r}. Choose a folder on a "
            "fast local disk that this user may write to."
        ) from None
    os.close(handle)
    try:
        os.close(os.open(name, os.O_WRONLY | getattr(os, "O_DIRECT", 0)))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ConfigurationError(
            f"nvme_path={str(path)!r} lies on a file system without direct writes (O_DIRECT), which DeepSpeed needs: "
            "choose a folder on a local disk, not on tmpfs or a network share."
        ) from None
    finally:
        os.unlink(name)


def lies_in_memory(path: Path) -> bool:
    """Whether a folder is on a file system that is kept in memory, where offloading saves none."""
    import psutil

    real = path.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    kind = next((mounts[each] for each in (real, *real.parents) if each in mounts), "")
    return kind in ("tmpfs", "ramfs")
