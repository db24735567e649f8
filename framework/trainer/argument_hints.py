"""Constructor arguments declared by a dataclass, and hints for arguments that do not exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ..core.errors import ConfigurationError, did_you_mean

# Names of arguments in other frameworks or their older versions, too different for a closest match.
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
}


P = ParamSpec("P")
T = TypeVar("T")


def takes(settings: Callable[P, T]) -> Callable[[Callable[[Any, T], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator: the constructor accepts the fields of a dataclass as keyword arguments.

    The signature and the list of arguments in the docstring are those of the dataclass.
    """
    declared = {each.name: each for each in fields(settings)}  # type: ignore[arg-type]

    def decorate(constructor: Callable[[Any, T], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(constructor)
        def construct(self: Any, *positional: Any, **arguments: Any) -> None:
            if positional:
                raise TypeError(f"{construct.__qualname__} takes keyword arguments only, but got {positional[0]!r}.")
            refuse_unknown(arguments, list(declared))
            constructor(self, settings(**arguments))  # type: ignore[call-arg]

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [own, *inspect.signature(settings).parameters.values()]
        construct.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        lines = [f"    {name}: {each.metadata['documentation']}" for name, each in declared.items()]
        construct.__doc__ = f"{constructor.__doc__}\n\nArgs:\n" + "\n".join(lines)
        return cast("Callable[Concatenate[Any, P], None]", construct)

    return decorate


def refuse_unknown(arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse arguments that are not among the known ones.

    Raises:
        ConfigurationError: an argument is unknown; the message names the closest known one, or where it belongs.
    """
    for name, value in arguments.items():
        if name in known:
            continue
        given = f"Trainer({name}={value!r}): there is no such argument"
        if name in _ELSEWHERE:
            raise ConfigurationError(f"{given}; {_ELSEWHERE[name]}.")
        hint = f" Did you mean {_OTHER_NAMES[name]!r}?" if name in _OTHER_NAMES else did_you_mean(name, known)
        raise ConfigurationError(f"{given}.{hint} Known: {', '.join(known)}.")
