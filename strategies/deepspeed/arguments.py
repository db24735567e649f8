"""Keyword arguments of the DeepSpeed strategies and the user's DeepSpeed JSON config, and their rules.

An argument is another spelling of an entry of the JSON: it is written to where DeepSpeed reads it, and contradicts an
entry that has another value. Refused are entries that phalanx decides (batch sizes, accumulation, clipping, precision,
optimizer, scheduler), the value ``"auto"``, which only Hugging Face's integration fills in, and misspelled top-level
names, which DeepSpeed would ignore. One message names all of them, each with its replacement. Every other entry goes to
DeepSpeed unchanged.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ...framework.core.arguments import check_names
from ...framework.core.errors import ConfigurationError, did_you_mean, unknown

if TYPE_CHECKING:
    from typing_extensions import Unpack

Offload = Literal["cpu", "nvme"]


class ZeroArguments(TypedDict, total=False):
    """Arguments of ``DeepSpeedStrategy``, all optional. Sizes count elements, not bytes."""

    stage: int
    """Stage of ZeRO: 1, 2 or 3. Default: the stage in ``config``, else 2."""
    offload_optimizer: bool | Offload | None
    """Keep the optimizer's state in CPU memory (True, "cpu") or on a disk ("nvme", which needs stage 3)."""
    offload_parameters: bool | Offload | None
    """Keep the parameters in CPU memory or on a disk too. Needs stage 3."""
    nvme_path: str | os.PathLike[str] | None
    """A folder on a fast local disk, on every node."""
    config: Mapping[str, Any] | str | os.PathLike[str] | None
    """DeepSpeed's own settings, as a dict or the path of a JSON file."""
    gather_weights: Literal["rank_zero", "all", "none"]
    """The ranks that hold the module's full weights after a fit."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"]
    """The dtype in which gradients are accumulated. Default: fp32."""
    communication_data_type: Literal["fp32", "bf16", "fp16"]
    """The dtype in which gradients are reduced. Default: fp32."""
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
    """Needs CUDA."""
    zero_quantized_gradients: bool
    """Needs CUDA."""
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


_OPTIMIZER, _PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def _under(prefix: str, names: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"{prefix}{name}",) for name in names.split()}


_KEYS: dict[str, tuple[str, ...]] = {
    **_under("", "communication_data_type"),
    **_under("data_types.", "grad_accum_dtype"),
    **_under("zero_optimization.", "stage overlap_comm contiguous_gradients reduce_scatter round_robin_gradients"),
    **_under("zero_optimization.", "reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size"),
    **_under("zero_optimization.", "zero_quantized_weights zero_quantized_gradients"),
    **_under("zero_optimization.stage3_", "prefetch_bucket_size param_persistence_threshold max_live_parameters"),
    **_under("zero_optimization.stage3_", "model_persistence_threshold max_reuse_distance"),
    **_under("aio.", "block_size queue_depth intra_op_parallelism single_submit overlap_events"),
    "offload_optimizer": (f"{_OPTIMIZER}.device",),
    "offload_parameters": (f"{_PARAMETERS}.device",),
    "nvme_path": (f"{_OPTIMIZER}.nvme_path", f"{_PARAMETERS}.nvme_path"),
    "pin_memory": (f"{_OPTIMIZER}.pin_memory", f"{_PARAMETERS}.pin_memory"),
    "optimizer_buffer_count": (f"{_OPTIMIZER}.buffer_count",),
    "params_buffer_count": (f"{_PARAMETERS}.buffer_count",),
    "params_buffer_size": (f"{_PARAMETERS}.buffer_size",),
    "max_in_cpu": (f"{_PARAMETERS}.max_in_cpu",),
}
"""The dotted keys of DeepSpeed's config that an argument sets."""

# Arguments of Lightning's and Accelerate's DeepSpeed classes that have another name, or no place, here.
_INSTEAD = {
    "offload_params_device": "use offload_parameters='cpu' or 'nvme'",
    "offload_optimizer_device": "use offload_optimizer='cpu' or 'nvme'",
    "remote_device": "use offload_parameters='cpu' or 'nvme'",
    "thread_count": "use intra_op_parallelism=...",
    "zero_optimization": "use strategy='ddp' to train without it",
    "load_full_weights": "leave it out: any checkpoint loads under any strategy",
    "logging_batch_size_per_gpu": "leave it out: batch sizes are those of the loaders",
    "zero_allow_untested_optimizer": "leave it out: any optimizer that updates each element independently is accepted",
    "exclude_frozen_parameters": "leave it out: checkpoints are complete",
    "process_group_backend": "leave it out: gloo on a CPU, NCCL on GPUs",
    **dict.fromkeys(
        ("accelerator", "cluster_environment", "parallel_devices"), "use Trainer(accelerator=..., devices=...)"
    ),
    **dict.fromkeys(
        ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
        "use precision='16-mixed', which scales the loss automatically",
    ),
    **dict.fromkeys(
        ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
        "use config={'activation_checkpointing': {...}}",
    ),
}
_DTYPES = ("fp32", "bf16", "fp16")
_CHOICES = {
    "gather_weights": ("rank_zero", "all", "none"),
    "grad_accum_dtype": _DTYPES,
    "communication_data_type": _DTYPES,
    "offload_optimizer": ("cpu", "nvme", "none"),
    "offload_parameters": ("cpu", "nvme", "none"),
}


# ---- the JSON ------------------------------------------------------------------------------------------------------

_BATCHES = "the DataLoader's batch_size"
_ACCUMULATION = "Trainer(accumulate_grad_batches=...) or Fabric(accumulate=...)"
_PRECISION = "Trainer(precision=...) or Fabric(precision=...)"

OWNED: dict[str, str] = {
    "train_batch_size": _BATCHES,
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": _ACCUMULATION,
    "managed_gradient_accumulation": _ACCUMULATION,
    "gradient_clipping": "Trainer(gradient_clip_val=...) or Fabric.clip_gradients",
    "gradient_allreduce_op": "TrainModule.batch_weight: gradients are weighted means over ranks",
    "zero_optimization.compute_grad_norm": "nothing: the norm is always available",
    **dict.fromkeys(
        ("bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types.param_dtype", "data_types.buffer_dtype"),
        _PRECISION,
    ),
    "optimizer": "TrainModule.configure_optimizers: torch.optim.Adam(W) becomes DeepSpeed's own form",
    "scheduler": "TrainModule.configure_optimizers, with any torch scheduler",
    "dataloader_drop_last": "DataLoader(drop_last=...)",
    "checkpoint": "Trainer's checkpoints: one format for all strategies",
    **dict.fromkeys(
        ("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
        "offload_optimizer='cpu' alone: with this key DeepSpeed updates in processes of its own, beside training, and "
        "no checkpoint could hold the state of a step",
    ),
    "zero_optimization.cpu_offload": "DeepSpeedStrategy(offload_optimizer='cpu')",
    "zero_optimization.cpu_offload_param": "DeepSpeedStrategy(stage=3, offload_parameters='cpu')",
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeedStrategy(pin_memory=...)",
    "sequence_parallel_size": "Trainer(parallel={'cp': ...}), with strategy='ddp' or 'fsdp'",
    "tensor_parallel": "strategy FSDPStrategy(tensor_parallel=...)",
    "pipeline": "Trainer(parallel={'pp': ...}), with strategy='pipeline'",
}
"""Dotted keys that phalanx decides, and what to use instead."""

# The other names that DeepSpeed 0.19.8 reads at the top level. It ignores all others without a warning.
_TOP_LEVEL = (
    "activation_checkpointing", "aio", "autotuning", "comet", "comms_logger", "communication_data_type", "compile",
    "csv_monitor", "data_efficiency", "data_types", "datastates_ckpt", "disable_allgather", "disable_python_gc",
    "dump_state", "expert_parallel", "flops_profiler", "gradient_predivide_factor", "hybrid_engine", "log_level",
    "memory_breakdown", "prescale_gradients", "seq_parallel_communication_data_type", "steps_per_print", "tensorboard",
    "timers", "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb",
    "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip

# Blocks that arguments are written into.
_BLOCKS = {key.rpartition(".")[0] for keys in _KEYS.values() for key in keys}

# DeepSpeed itself defines "auto" in these.
_OWN_AUTO = ("data_types.keep_in_fp32_modules", "expert_parallel.")


def read_config(given: Any) -> tuple[dict[str, Any], str]:
    """Return a copy of the user's config, and how messages call it.

    Args:
        given: None, a dict, or the path of a JSON file.

    Raises:
        ConfigurationError: the file cannot be read, is not valid JSON, or does not hold an object.
    """
    if given is None:
        return {}, "config"
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given)), "config"
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigurationError(f"config={given!r} must be a dict or the path of a JSON file.")
    path = Path(given).expanduser()
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ConfigurationError(f"config={str(given)!r} cannot be read: {error.strerror}. Check the path.") from None
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"config={str(given)!r} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            "(JSON has no comments and no comma before a closing bracket)."
        ) from None
    except ValueError as error:  # not UTF-8, or a duplicate key
        raise ConfigurationError(f"config={str(given)!r} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"config={str(given)!r} must hold a JSON object, not {type(found).__name__}.")
    return found, f"config {str(given)!r}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Python's parser would let the last of two equal keys win without a warning."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return found


def check_config(config: Mapping[str, Any], called: str, contradictions: list[str]) -> None:
    """Refuse a config with entries that must not be there.

    Args:
        called: how the message calls the config.
        contradictions: phrases about entries that an argument contradicts, for the same message.

    Raises:
        ConfigurationError: naming all offending entries at once.
    """
    found = [*_offences(config), *contradictions]
    if found:
        count = f"{len(found)} entries" if len(found) > 1 else "an entry"
        raise ConfigurationError(f"DeepSpeed {called} has {count} to change. " + "; ".join(found) + ".")


def _offences(block: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a phrase for every entry that must not be there; a refused block is not searched further."""
    for key, value in block.items():
        name = f"{prefix}{key}"
        phrase = _offence(name, value)
        if phrase is not None:
            yield f"{name}: {phrase}"
        elif isinstance(value, Mapping):
            yield from _offences(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            yield from _offences({f"{key}[{index}]": item for index, item in enumerate(value)}, prefix)


def _offence(name: str, value: Any) -> str | None:
    if name in OWNED:
        return f"decided by phalanx; use {OWNED[name]}"
    if name in _BLOCKS and value is not None and not isinstance(value, Mapping):
        return f"{value!r} must be an object {{...}}"
    if value == "auto" and not name.startswith(_OWN_AUTO):
        return "'auto' is supported by Hugging Face's integration alone; leave it out, or give a value"
    if "." not in name and "[" not in name and name not in _TOP_LEVEL:
        # An unrelated name is let through, as DeepSpeed does: users keep notes there. A near miss is a typo.
        guess = did_you_mean(name, [*_TOP_LEVEL, *OWNED])
        return f"not a key of DeepSpeed.{guess.rstrip('?')}" if guess else None
    return None


# ---- arguments -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroOptions:
    """Checked options of a DeepSpeed strategy.

    ``config`` holds the user's JSON with the arguments written into it, without the keys that the other fields hold.
    """

    stage: int = 2
    offload_optimizer: Offload | None = None
    offload_parameters: Offload | None = None
    nvme_path: Path | None = None
    gather_weights: str = "rank_zero"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def offloads(self) -> bool:
        """Whether optimizer state or parameters are held outside of the device's memory."""
        return self.offload_optimizer is not None or self.offload_parameters is not None

    @property
    def uses_nvme(self) -> bool:
        """Whether optimizer state or parameters are held on a disk."""
        return "nvme" in (self.offload_optimizer, self.offload_parameters)

    @property
    def grad_accum_dtype(self) -> str:
        """The name of the dtype in which gradients are accumulated."""
        return str((self.config.get("data_types") or {}).get("grad_accum_dtype", "fp32"))


def resolve_options(**arguments: Unpack[ZeroArguments]) -> ZeroOptions:
    """Check the arguments of ``DeepSpeedStrategy`` and merge them with the user's config.

    Raises:
        UnknownNameError: an argument or its value is not known.
        ConfigurationError: an argument breaks a rule or contradicts the config, or the config sets a key that
            phalanx decides.
    """
    given: dict[str, Any] = {name: _plain(name, value) for name, value in arguments.items() if value is not None}
    _check_names(given)
    config, called = read_config(given.get("config"))
    contradictions: list[str] = []
    for name, keys in _KEYS.items():
        for key in keys if name in given else ():
            _write(config, key, given[name], name, contradictions)
    check_config(config, called, contradictions)
    # These values move to ZeroOptions, so that an empty config means that there is nothing for DeepSpeed to check.
    stage = _take(config, "zero_optimization.stage")
    optimizer = _device("offload_optimizer", _take(config, f"{_OPTIMIZER}.device"))
    parameters = _device("offload_parameters", _take(config, f"{_PARAMETERS}.device"))
    path = _path([_take(config, key) for key in _KEYS["nvme_path"]])
    gathers = given.get("gather_weights", "rank_zero")
    options = ZeroOptions(2 if stage is None else stage, optimizer, parameters, path, gathers, config)
    _check_combination(options)
    return options


def _plain(name: str, value: Any) -> Any:
    """Return an argument as JSON would hold it."""
    if name.startswith("offload_") and isinstance(value, bool):
        return "cpu" if value else "none"
    return str(value) if name == "nvme_path" and isinstance(value, os.PathLike) else value


def _check_names(given: Mapping[str, Any]) -> None:
    check_names("DeepSpeedStrategy", given, ZeroArguments.__annotations__, _INSTEAD)
    for name, value in given.items():
        if value not in _CHOICES.get(name, (value,)):
            raise unknown(name, str(value), _CHOICES[name])


def _write(config: dict[str, Any], key: str, value: Any, name: str, contradictions: list[str]) -> None:
    """Write an argument to a dotted key of the config, unless the user's JSON has another value there."""
    *blocks, last = key.split(".")
    block = config
    for each in blocks:
        inner = block[each] = {} if block.get(each) is None else block[each]
        if not isinstance(inner, dict):
            return  # check_config reports an entry that should be a block
        block = inner
    # check_config reports "auto".
    if block.get(last, value) not in (value, "auto"):
        contradictions.append(f"{key}: {block[last]!r} contradicts {name}={value!r}; keep one of them")
    block.setdefault(last, value)


def _take(block: dict[str, Any], key: str) -> Any:
    """Remove a dotted key, and the blocks that are empty without it; return its value, or None."""
    first, _, rest = key.partition(".")
    if not rest:
        return block.pop(first, None)
    found = _take(block[first], rest) if block.get(first) else None
    if not block.get(first):
        block.pop(first, None)
    return found


def _device(name: str, found: Any) -> Offload | None:
    if found not in (None, *_CHOICES[name]):
        raise unknown(name, str(found), _CHOICES[name])
    return None if found == "none" else found


def _path(found: list[Any]) -> Path | None:
    paths = [each for each in found if each is not None]
    if not paths:
        return None
    if any(each != paths[0] for each in paths):
        raise ConfigurationError(
            f"nvme_path={paths[0]!r} of the optimizer and {paths[1]!r} of the parameters differ; keep one of them."
        )
    if not isinstance(paths[0], str) or not paths[0]:
        raise ConfigurationError(f"nvme_path={paths[0]!r} must be the path of a folder.")
    return Path(paths[0]).expanduser().absolute()


def _check_combination(options: ZeroOptions) -> None:
    stage = options.stage
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (1, 2, 3):
        ddp = " To train without ZeRO use strategy='ddp'." if stage == 0 else ""
        raise ConfigurationError(f"stage={stage!r} must be a stage of ZeRO: 1, 2 or 3.{ddp}")
    if options.offload_parameters and stage < 3:
        raise ConfigurationError(
            f"offload_parameters={options.offload_parameters!r} needs stage=3, got stage={stage}: only stage 3 splits "
            "parameters. Use stage=3, or offload_optimizer alone."
        )
    if options.offload_optimizer == "nvme" and stage < 3:
        raise ConfigurationError(
            f"offload_optimizer='nvme' needs stage=3, got stage={stage}. Use stage=3, or offload_optimizer='cpu'."
        )


# ---- the folder of state on a disk ----------------------------------------------------------------------------------


def check_swap_folder(options: ZeroOptions) -> None:
    """Refuse a folder that DeepSpeed cannot swap to, if there is anything to swap.

    A file is created and opened as DeepSpeed opens its own: with direct writes, which bypass the page cache. Permission
    bits and mount options do not tell reliably whether that succeeds.

    Raises:
        ConfigurationError: no folder is given, it is not writable, or its file system does not support direct writes.
    """
    if not options.uses_nvme:
        return
    path = options.nvme_path
    if path is None:
        raise ConfigurationError(
            "Offloading to NVMe needs a folder on a fast local disk: use DeepSpeedStrategy(stage=3, "
            "offload_optimizer='nvme', offload_parameters='nvme', nvme_path='/path/of/the/disk'), or set the "
            "environment variable PHALANX_NVME_PATH and use strategy='zero3-nvme'."
        )
    existing = next(each for each in (path, *path.parents) if each.exists())
    try:
        handle, name = tempfile.mkstemp(dir=existing, prefix=".phalanx-")
    except OSError as error:
        raise ConfigurationError(
            f"nvme_path={str(path)!r} cannot be written: {error.strerror} ({str(existing)!r}). Choose a folder on "
            "a fast local disk that this user may write to."
        ) from None
    os.close(handle)
    try:
        os.close(os.open(name, os.O_WRONLY | getattr(os, "O_DIRECT", 0)))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ConfigurationError(
            f"nvme_path={str(path)!r} is on a file system without direct writes (O_DIRECT), which DeepSpeed needs: "
            "choose a folder on a local disk, not on tmpfs or a network share."
        ) from None
    finally:
        os.unlink(name)


def is_in_memory(path: Path) -> bool:
    """Whether a folder is on a file system that is held in memory, so that offloading to it saves nothing."""
    import psutil

    real = path.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    kind = next((mounts[each] for each in (real, *real.parents) if each in mounts), "")
    return kind in ("tmpfs", "ramfs")
