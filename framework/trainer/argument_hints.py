"""Arguments that a Trainer does not have, and switches that are no switches: what is meant, in one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import ConfigurationError, did_you_mean

# What other frameworks, or older versions of them, call an argument: too far from our name for a closest match.
_OTHER_NAMES = {
    "gpus": "devices",
    "num_gpus": "devices",
    "num_processes": "devices",
    "nproc": "devices",
    "tpu_cores": "devices",
    "backend": "strategy",
    "distributed_backend": "strategy",
    "epochs": "max_epochs",
    "num_epochs": "max_epochs",
    "num_train_epochs": "max_epochs",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "max_grad_norm": "gradient_clip_val",
    "grad_clip": "gradient_clip_val",
    "fp16": "precision",
    "bf16": "precision",
    "mixed_precision": "precision",
    "amp_backend": "precision",
    "checkpoint_callback": "enable_checkpointing",
    "progress_bar_refresh_rate": "enable_progress_bar",
    "weights_summary": "enable_model_summary",
    "replace_sampler_ddp": "use_distributed_sampler",
    "val_percent_check": "limit_val_batches",
    "train_percent_check": "limit_train_batches",
    "weights_save_path": "default_root_dir",
    "output_dir": "default_root_dir",
}
_ELSEWHERE = {
    "resume_from_checkpoint": "give it to fit: fit(model, ckpt_path=...)",
    "ckpt_path": "give it to fit: fit(model, ckpt_path=...)",
    "seed": "call phalanx.seed_everything(seed) before",
    "model": "give it to fit: fit(model)",
    "datamodule": "give it to fit: fit(model, datamodule=...)",
    "lr": "it belongs to the optimizer, which configure_optimizers makes",
    "learning_rate": "it belongs to the optimizer, which configure_optimizers makes",
    "batch_size": "it belongs to the DataLoader",
    "auto_lr_find": "leave it out, and find a rate before fit",
    "auto_scale_batch_size": "leave it out, and find a size before fit",
    "track_grad_norm": "leave it out, and log the norm in on_before_optimizer_step",
    "model_registry": "leave it out: checkpoints lie in the run's directory",
    "enable_autolog_hparams": "leave it out, and call save_hyperparameters(logger=False)",
}


def refuse_unknown(arguments: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Refuse arguments that a constructor gathered in ``**unknown_arguments``.

    Raises:
        ConfigurationError: there is one; the message says which of the known ones is meant, or where it belongs.
    """
    for name, value in arguments.items():
        known = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
        given = f"Trainer({name}={value!r}): there is no such argument"
        if name in _ELSEWHERE:
            raise ConfigurationError(f"{given}; {_ELSEWHERE[name]}.")
        hint = f" Did you mean {_OTHER_NAMES[name]!r}?" if name in _OTHER_NAMES else did_you_mean(name, known)
        raise ConfigurationError(f"{given}.{hint} Known: {', '.join(known)}.")


def check_flags(**flags: bool | None) -> None:
    """Refuse what is neither True, False nor None.

    Raises:
        ConfigurationError: an argument is something else.
    """
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ConfigurationError(f"{name}={value!r} must be True or False.")
