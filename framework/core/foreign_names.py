"""Names of Lightning and Accelerate that phalanx lacks, each with a sentence that says what to use instead.

The tables are by class, and so is their use: ``lacks`` of ``absent_names.py`` for members, ``unknown_argument`` of
``arguments.py`` for arguments, and ``face`` of ``lazy_exports.py`` for modules.
"""

from __future__ import annotations

from collections.abc import Mapping

_LOOPS = "there are no loop objects: read trainer.progress, or write your own loop with phalanx.Fabric"
_KEYS = "checkpoints have other keys: read hyperparameters with phalanx.checkpoint"
_MODE = "read mode, which is 'min' or 'max'"
_LABEL = "the labels of the stages are fixed"
_BATCHES = "read trainer.num_{0}_batches, a list with one number for each loader"
_LOADER = "compare dataloader_idx, which the hooks of batches receive"
_DRAWN = "the bar is drawn by ProgressBar; override get_metrics to change the values that it shows"
_AVERAGE = "the strategy keeps the average; override should_update to change when it is updated"

_MESH = "Trainer(parallel={'tp': 2, 'dp_shard': -1}) lays out the ranks; see docs/parallelism.md."
_PIPELINE = "Trainer(parallel={'pp': 2}) divides the blocks of a model into a pipeline; see docs/parallelism.md."
_SEQUENCES = "Trainer(parallel={'cp': 2}) shares sequences over ranks; see docs/parallelism.md."
_FP8 = "mixed_precision='fp8' computes linear layers by torchao, without a recipe; Float8Mixed in a Fabric has options."
_MEGATRON = "Megatron-LM is not part of phalanx: use strategy='fsdp' with tensor_parallel, or 'zero3'."
_TP = "use FSDPStrategy(tensor_parallel=...), and configure_tensor_parallel in the module."
_FSDP = "fsdp is configured with FSDPStrategy, and its checkpoints hold full tensors."
_DUMMY = "create the optimizer and the scheduler in the program, and pass them to prepare."
_CONFIG_FILE = "Accelerator(...) and the launcher's command take the settings; there is no configuration file."
_COMPILE = "use Accelerator(dynamo_plugin=TorchDynamoPlugin(use_regional_compilation=True, ...))."
_HARDWARE = "phalanx trains on CPUs and CUDA GPUs."

CHECKPOINT_KEYS = {
    "CHECKPOINT_HYPER_PARAMS_KEY": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_NAME": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_TYPE": _KEYS,
}
# Members of classes. Of an nn.Module only methods and keys are listed, whose use raises: an nn.Module replaces the
# message of every missing attribute by its own, and another look-up would slow down each access to a layer.
MEMBERS: Mapping[str, Mapping[str, str]] = {
    "Trainer": {
        "accelerator": "read the device from trainer.world.device",
        "distributed_sampler_kwargs": "read trainer.world.data_rank and trainer.world.data_size",
        "fit_loop": _LOOPS,
        "init_module": "build large layers in the module's configure_model, which runs under the strategy",
        "precision_plugin": "read the precision's name from trainer.precision",
        "predict_loop": _LOOPS,
        "test_loop": _LOOPS,
        "val_check_batch": "read trainer.val_check_interval and trainer.num_training_batches",
        "validate_loop": _LOOPS,
    },
    "TrainModule": {
        **CHECKPOINT_KEYS,
        "configure_sharded_model": "build large layers in configure_model",
        "to_onnx": "call torch.onnx.export(module, ...)",
        "to_tensorrt": "export with torch.export, and compile with torch_tensorrt",
        "to_torchscript": "call torch.jit.script or torch.jit.trace with the network inside the module, such as "
        "module.net",
    },
    "DataModule": {
        **CHECKPOINT_KEYS,
        "load_from_checkpoint": "create the DataModule yourself and pass it to fit, which restores its state",
        "name": "read type(datamodule).__name__",
    },
    "Strategy": {
        "all_gather": "call self.all_gather(value) of the module, or trainer.fabric.all_gather(value)",
        "barrier": "call trainer.fabric.barrier()",
        "batch_to_device": "call trainer.fabric.to_device(batch)",
        "broadcast": "call trainer.fabric.broadcast(value)",
        "global_rank": "read trainer.global_rank",
        "is_global_zero": "read trainer.is_global_zero",
        "lightning_module": "read trainer.lightning_module",
        "local_rank": "read trainer.local_rank",
        "model": "read trainer.model",
        "node_rank": "read trainer.node_rank",
        "num_processes": "read trainer.world_size",
        "optimizers": "read trainer.optimizers",
        "precision_plugin": "read the precision's name from trainer.precision",
        "reduce": "call trainer.fabric.all_reduce(value)",
        "reduce_boolean_decision": "call trainer.fabric.all_reduce(float(value), 'min') for all, or 'max' for any",
        "root_device": "read trainer.fabric.device",
        "world_size": "read trainer.world_size",
    },
    "EarlyStopping": {"mode_dict": _MODE, "monitor_op": _MODE, "order_dict": _MODE},
    "ModelCheckpoint": {
        "check_monitor_top_k": "compare the value with kth_value, which the next checkpoint must improve on",
        "file_exists": "check the path on rank 0, and send the answer with trainer.world.broadcast_object",
    },
    "ModelSummary": {
        "summarize": "call phalanx.callbacks.summary.summarize(module, max_depth), which returns the table"
    },
    "ProgressBar": {
        "has_dataloader_changed": _LOADER,
        "predict_description": _LABEL,
        "reset_dataloader_idx_tracker": _LOADER,
        "sanity_check_description": _LABEL,
        "test_description": _LABEL,
        "total_predict_batches_current_dataloader": _BATCHES.format("predict"),
        "total_test_batches_current_dataloader": _BATCHES.format("test"),
        "total_train_batches": "read trainer.num_training_batches",
        "total_val_batches": _BATCHES.format("val"),
        "total_val_batches_current_dataloader": _BATCHES.format("val"),
        "train_description": _LABEL,
        "validation_description": _LABEL,
    },
    "RichProgressBar": dict.fromkeys(
        (
            *("configure_columns", "predict_progress_bar_id", "progress", "refresh", "test_progress_bar"),
            *("test_progress_bar_id", "train_progress_bar", "train_progress_bar_id", "val_progress_bar"),
            *("val_progress_bar_id", "val_sanity_check_bar", "val_sanity_progress_bar_id"),
        ),
        _DRAWN,
    ),
    "TQDMProgressBar": dict.fromkeys(
        (
            *("BAR_FORMAT", "init_predict_tqdm", "init_sanity_tqdm", "init_test_tqdm", "init_train_tqdm"),
            *("init_validation_tqdm", "predict_progress_bar", "test_progress_bar", "train_progress_bar"),
            "val_progress_bar",
        ),
        _DRAWN,
    ),
    "StochasticWeightAveraging": {
        "avg_fn": "pass avg_fn to the constructor",
        "momenta": _AVERAGE,
        "n_averaged": _AVERAGE,
        "pl_module_contains_batch_norm": "batch norm layers are found when statistics are computed",
        "reset_batch_norm_and_save_state": _AVERAGE,
        "reset_momenta": _AVERAGE,
        "swa_end": "average_at_end=True loads the average into the module at the end of the fit",
        "transfer_weights": _AVERAGE,
        "update_parameters": _AVERAGE,
    },
    "ThroughputMonitor": {
        "available_flops": "read trainer.throughput.device_peak_flops; Trainer(device_peak_flops=...) sets it",
        "kwargs": "the callback has no further arguments",
    },
    "Accelerator": {
        **dict.fromkeys(("parallelism_config", "torch_device_mesh"), _MESH),
        **dict.fromkeys(("data_parallel_rank", "data_parallel_shard_rank"), _MESH),
        **dict.fromkeys(("tensor_parallel_rank", "context_parallel_rank", "pipeline_parallel_rank"), _MESH),
        "maybe_context_parallel": _SEQUENCES,
        "deepspeed_ulysses_dl_adapter": _SEQUENCES,
        "deepspeed_plugin": "the strategy is accelerator.fabric.strategy.",
        "fp8_backend": _FP8,
        "lomo_backward": "LOMO updates weights in backward: use another optimizer, and strategy='zero3' to save "
        "memory.",
        "scaler": "the loss scale is accelerator.fabric.scaler; GradScalerKwargs sets its start.",
    },
}

# Arguments of constructors.
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "Trainer": {
        "resume_from_checkpoint": "give it to fit: fit(model, ckpt_path=...)",
        "ckpt_path": "give it to fit: fit(model, ckpt_path=...)",
        "patience": "it belongs to EarlyStopping(patience=...), one of the callbacks",
        "monitor": "it belongs to EarlyStopping and ModelCheckpoint, which are callbacks",
        "seed": "call phalanx.seed_everything(seed) before",
        "model": "give it to fit: fit(model)",
        "datamodule": "give it to fit: fit(model, datamodule=...)",
        "lr": "it belongs to the optimizer, which configure_optimizers makes",
        "learning_rate": "it belongs to the optimizer, which configure_optimizers makes",
        "batch_size": "it belongs to the DataLoader",
        "auto_lr_find": "call trainer.find_lr before fit",
        "auto_scale_batch_size": "call trainer.find_batch_size before fit, or pass global_batch_size=... and "
        "micro_batch_size='auto', which is found as the fit trains",
        "track_grad_norm": "leave it out, and log the norm in on_before_optimizer_step",
    },
    "Accelerator": {
        "torch_tp_plugin": _TP,
        "megatron_lm_plugin": _MEGATRON,
        "deepspeed_plugins": "give one deepspeed_plugin, and create a second Accelerator for a module with other "
        "settings.",
        "parallelism_config": _MESH,
    },
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

# Arguments of other frameworks or their older versions whose names are too different for a closest match, each with the
# names that functions of phalanx may have for it. Their values may differ.
SYNONYMS = {
    "gpus": ("devices",),
    "num_gpus": ("devices",),
    "num_processes": ("devices",),
    "nproc": ("devices",),
    "tpu_cores": ("devices",),
    "backend": ("strategy",),
    "distributed_backend": ("strategy",),
    "epochs": ("max_epochs",),
    "num_epochs": ("max_epochs",),
    "num_train_epochs": ("max_epochs",),
    "accumulate_grad_batches": ("accumulate",),
    "gradient_accumulation_steps": ("accumulate_grad_batches", "accumulate"),
    "max_grad_norm": ("gradient_clip_val", "max_norm"),
    "grad_clip": ("gradient_clip_val",),
    "gradient_clip_val": ("max_norm",),
    "fp16": ("precision",),
    "bf16": ("precision",),
    "mixed_precision": ("precision",),
    "amp_backend": ("precision",),
    "log_with": ("loggers", "logger"),
    "checkpoint_callback": ("enable_checkpointing",),
    "progress_bar_refresh_rate": ("enable_progress_bar",),
    "weights_summary": ("enable_model_summary",),
    "replace_sampler_ddp": ("use_distributed_sampler",),
    "val_percent_check": ("limit_val_batches",),
    "train_percent_check": ("limit_train_batches",),
    "weights_save_path": ("default_root_dir",),
    "output_dir": ("default_root_dir",),
    "train_loader": ("train_dataloaders", "dataloaders"),
    "val_loader": ("val_dataloaders", "dataloaders"),
    "module": ("model",),
    "resume_from_checkpoint": ("ckpt_path",),
    "checkpoint": ("ckpt_path",),
    "ckpt": ("ckpt_path",),
    "period": ("every_n_epochs",),
    "filepath": ("dirpath",),
    "root_dir": ("save_dir", "default_root_dir"),
    "find_unused": ("find_unused_parameters",),
}

# Names of the package accelerate.
ACCELERATE = {
    "InitProcessGroupKwargs": "phalanx creates the process group; Trainer(stall_timeout=...) limits waiting.",
    "ParallelismConfig": "name a strategy: Accelerator(strategy='fsdp'), or an object of phalanx.strategies.",
    "debug_launcher": "use notebook_launcher(function, args, num_processes=2).",
    "prepare_pippy": _PIPELINE,
    "synchronize_rng_states": "loaders draw the same permutation on all ranks without it.",
}
# Names of accelerate.utils; every other one is a part of Accelerate's own machinery.
ACCELERATE_UTILS = {
    **ACCELERATE,
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
    "synchronize_rng_state": ACCELERATE["synchronize_rng_states"],
    "install_xla": _HARDWARE,
}
ACCELERATE_INTERNAL = "it is a part of Accelerate's own machinery; phalanx has its own."
