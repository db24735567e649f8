"""Names of Accelerate that have no counterpart, and a sentence for each that says what to use instead."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

from ...framework.core.arguments import check_names

C = TypeVar("C", bound=type[Any])

_MESH = "Trainer(parallel={'tp': 2, 'dp_shard': -1}) lays out the ranks; see docs/parallelism.md."
_PIPELINE = "Trainer(parallel={'pp': 2}) divides the blocks of a model into a pipeline; see docs/parallelism.md."
_SEQUENCES = "Trainer(parallel={'cp': 2}) shares sequences over ranks; see docs/parallelism.md."
_FP8 = "mixed_precision='fp8' computes linear layers by torchao, without a recipe; Float8Mixed in a Fabric has options."
_MEGATRON = "Megatron-LM is not part of phalanx: use strategy='fsdp' with tensor_parallel, or 'zero3'."
_TP = "use FSDPStrategy(tensor_parallel=...), and configure_tensor_parallel in the module."
_INTERNAL = "it is a part of Accelerate's own machinery; phalanx has its own."
_FSDP = "fsdp is configured with FSDPStrategy, and its checkpoints hold full tensors."
_DUMMY = "create the optimizer and the scheduler in the program, and pass them to prepare."
_CONFIG_FILE = "Accelerator(...) and the launcher's command take the settings; there is no configuration file."
_COMPILE = "use Accelerator(dynamo_plugin=TorchDynamoPlugin(use_regional_compilation=True, ...))."

PACKAGE = {
    "InitProcessGroupKwargs": "phalanx creates the process group; Trainer(stall_timeout=...) limits waiting.",
    "ParallelismConfig": "name a strategy: Accelerator(strategy='fsdp'), or an object of phalanx.strategies.",
    "debug_launcher": "use notebook_launcher(function, args, num_processes=2).",
    "prepare_pippy": _PIPELINE,
    "synchronize_rng_states": "loaders draw the same permutation on all ranks without it.",
}

# Attributes of an Accelerator.
MEMBERS = {
    **dict.fromkeys(("parallelism_config", "torch_device_mesh"), _MESH),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_shard_rank"), _MESH),
    **dict.fromkeys(("tensor_parallel_rank", "context_parallel_rank", "pipeline_parallel_rank"), _MESH),
    "maybe_context_parallel": _SEQUENCES,
    "deepspeed_ulysses_dl_adapter": _SEQUENCES,
    "deepspeed_plugin": "the strategy is accelerator.fabric.strategy.",
    "fp8_backend": _FP8,
    "lomo_backward": "LOMO updates weights in backward: use another optimizer, and strategy='zero3' to save memory.",
    "scaler": "the loss scale is accelerator.fabric.scaler; GradScalerKwargs sets its start.",
}

# Arguments of an Accelerator.
ARGUMENTS = {
    "torch_tp_plugin": _TP,
    "megatron_lm_plugin": _MEGATRON,
    "deepspeed_plugins": "give one deepspeed_plugin, and create a second Accelerator for a module with other settings.",
    "parallelism_config": _MESH,
}

_HARDWARE = "phalanx trains on CPUs and CUDA GPUs."
# Fields of configuration objects, by class.
FIELDS: dict[str, dict[str, str]] = {
    "DataLoaderConfiguration": {"data_seed": "call set_seed before prepare; it decides the order of loaders too."},
    "ProjectConfiguration": {"save_on_each_node": "leave it out: checkpoints are in a directory that all nodes share."},
    "GradientAccumulationPlugin": {
        "sync_each_batch": "use FSDPStrategy(accumulate_shards=True), which reduces gradients in every backward pass; "
        "other strategies reduce them once for an update."
    },
    "FullyShardedDataParallelPlugin": {
        "auto_wrap_policy": "use transformer_cls_names_to_wrap or min_num_params, or FSDPStrategy(units=...).",
        "mixed_precision_policy": "use Accelerator(mixed_precision=...), or FSDPStrategy(reduce_dtype=...).",
        "state_dict_type": "leave it out: checkpoints hold full tensors, written by all ranks.",
        "use_orig_params": "leave it out: parameters keep their names.",
        "sync_module_states": "leave it out: all ranks start from rank 0's weights.",
        "backward_prefetch": "use FSDPStrategy(prefetch=...).",
        "forward_prefetch": "use FSDPStrategy(prefetch=...).",
        "cpu_ram_efficient_loading": "build the module in Fabric.init_module, and load it with Fabric.load_raw.",
    },
    "DeepSpeedPlugin": {
        "gradient_accumulation_steps": "use Accelerator(gradient_accumulation_steps=...).",
        "gradient_clipping": "call accelerator.clip_grad_norm_.",
        "zero3_init_flag": "build the module in Fabric.init_module.",
        "zero3_save_16bit_model": "leave it out: save_model writes full weights under every strategy.",
    },
}

# Names of accelerate.utils, besides those of PACKAGE; every other one is a part of Accelerate's own machinery.
UTILS = {
    **PACKAGE,
    **dict.fromkeys(("DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"), _DUMMY),
    **dict.fromkeys(("FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"), _FP8),
    **dict.fromkeys(("MegatronLMPlugin", "MegatronLMDummyScheduler", "MegatronLMDummyDataLoader"), _MEGATRON),
    **dict.fromkeys(("TorchTensorParallelPlugin", "TorchTensorParallelConfig"), _TP),
    "compile_regions": _COMPILE,
    **dict.fromkeys(("load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer"), _FSDP),
    **dict.fromkeys(("enable_fsdp_ram_efficient_loading", "disable_fsdp_ram_efficient_loading"), _FSDP),
    "merge_fsdp_weights": "checkpoints hold full tensors: use 'phalanx checkpoint consolidate'.",
    **dict.fromkeys(("load_and_quantize_model", "BnbQuantizationConfig"), "quantize the module before prepare."),
    **dict.fromkeys(("write_basic_config", "ComputeEnvironment"), _CONFIG_FILE),
    "TorchContextParallelConfig": _SEQUENCES,
    "synchronize_rng_state": PACKAGE["synchronize_rng_states"],
    "install_xla": _HARDWARE,
}


def sentence_for(name: str) -> str:
    """Return what to use instead of a name of ``accelerate.utils``."""
    return UTILS.get(name, _INTERNAL)


def knows_arguments(cls: C) -> C:
    """Let a class refuse arguments of Accelerate that it lacks with a sentence, and others with the closest match."""
    absent, construct = FIELDS.get(cls.__name__, {}), vars(cls)["__init__"]
    known = list(inspect.signature(cls).parameters)

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        check_names(cls.__name__, kwargs, known, absent)
        construct(self, *args, **kwargs)

    setattr(cls, "__init__", init)  # noqa: B010
    return cls
