"""Public names of Lightning's callbacks that have no counterpart here, by class, with what to use instead.

Most are internals of Lightning's classes that programs read or override.
"""

from __future__ import annotations

_MODE = "read mode, which is 'min' or 'max'"
EARLY_STOPPING = {"mode_dict": _MODE, "monitor_op": _MODE, "order_dict": _MODE}

MODEL_CHECKPOINT = {
    "check_monitor_top_k": "compare the value with kth_value, which the next checkpoint must improve on",
    "file_exists": "check the path on rank 0, and send the answer with trainer.world.broadcast_object",
}

_LABEL = "the labels of the stages are fixed"
_BATCHES = "read trainer.num_{0}_batches, a list with one number for each loader"
_LOADER = "compare dataloader_idx, which the hooks of batches receive"
PROGRESS_BAR = {
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
}
_DRAWN = "the bar is drawn by ProgressBar; override get_metrics to change the values that it shows"
TQDM_PROGRESS_BAR = dict.fromkeys(
    (
        *("BAR_FORMAT", "init_predict_tqdm", "init_sanity_tqdm", "init_test_tqdm", "init_train_tqdm"),
        *("init_validation_tqdm", "predict_progress_bar", "test_progress_bar", "train_progress_bar"),
        "val_progress_bar",
    ),
    _DRAWN,
)
RICH_PROGRESS_BAR = dict.fromkeys(
    (
        *("configure_columns", "predict_progress_bar_id", "progress", "refresh", "test_progress_bar"),
        *("test_progress_bar_id", "train_progress_bar", "train_progress_bar_id", "val_progress_bar"),
        *("val_progress_bar_id", "val_sanity_check_bar", "val_sanity_progress_bar_id"),
    ),
    _DRAWN,
)

MODEL_SUMMARY = {"summarize": "call phalanx.callbacks.summary.summarize(module, max_depth), which returns the table"}

_AVERAGE = "the strategy keeps the average; override should_update to change when it is updated"
STOCHASTIC_WEIGHT_AVERAGING = {
    "avg_fn": "pass avg_fn to the constructor",
    "momenta": _AVERAGE,
    "n_averaged": _AVERAGE,
    "pl_module_contains_batch_norm": "batch norm layers are found when statistics are computed",
    "reset_batch_norm_and_save_state": _AVERAGE,
    "reset_momenta": _AVERAGE,
    "swa_end": "average_at_end=True loads the average into the module at the end of the fit",
    "transfer_weights": _AVERAGE,
    "update_parameters": _AVERAGE,
}

THROUGHPUT_MONITOR = {
    "available_flops": "read trainer.throughput.device_peak_flops; Trainer(device_peak_flops=...) sets it",
    "kwargs": "the callback has no further arguments",
}
