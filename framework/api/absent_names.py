"""Public names of Lightning that phalanx lacks, and for each one sentence that states what to use instead.

Of the names of ``LightningModule`` only methods are listed, which raise when they are called: an ``nn.Module`` replaces
the message of every missing attribute by its own, and another look-up would slow down each access to a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from ..core.errors import ConfigurationError

T = TypeVar("T", bound=type)

_LOOPS = "there are no loop objects: read trainer.progress, or write your own loop with phalanx.Fabric"
_KEYS = "checkpoints have other keys: read hyperparameters with phalanx.checkpoint"

TRAINER = {
    "accelerator": "read the device from trainer.world.device",
    "distributed_sampler_kwargs": "read trainer.world.data_rank and trainer.world.data_size",
    "enable_autolog_hparams": "call save_hyperparameters(logger=False) in the module to leave its hyperparameters out",
    "fit_loop": _LOOPS,
    "init_module": "build large layers in the module's configure_model, which runs under the strategy",
    "precision_plugin": "read the precision's name from trainer.precision",
    "predict_loop": _LOOPS,
    "profiler": "run fit under torch.profiler",
    "test_loop": _LOOPS,
    "val_check_batch": "read trainer.val_check_interval and trainer.num_training_batches",
    "validate_loop": _LOOPS,
}
DATA_MODULE = {
    "CHECKPOINT_HYPER_PARAMS_KEY": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_NAME": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_TYPE": _KEYS,
    "allow_zero_length_dataloader_with_multiple_devices": "leave it out: a rank without data takes part with weight 0",
    "load_from_checkpoint": "create the DataModule yourself and pass it to fit, which restores its state",
    "name": "read type(datamodule).__name__",
    "prepare_data_per_node": "leave it out: prepare_data runs on one rank of each node",
    "remove_ignored_hparams": "call save_hyperparameters(ignore=...)",
}

MODULE_METHODS = {
    "to_onnx": "call torch.onnx.export(module, ...)",
    "to_tensorrt": "export with torch.export, and compile with torch_tensorrt",
    "to_torchscript": "call torch.jit.script(module) or torch.jit.trace(module, inputs)",
}


class Absent:
    """A class attribute whose access raises ``AttributeError`` with the sentence of a table."""

    def __init__(self, owner: str, name: str, sentence: str) -> None:
        self._message = f"{owner} has no {name!r}: {sentence}."

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._message)


class AbsentMethod:
    """A class attribute that raises ``ConfigurationError`` with the sentence of a table when it is called."""

    def __init__(self, owner: str, name: str, sentence: str) -> None:
        self._message = f"{owner} has no {name!r}: {sentence}."

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise the error."""
        raise ConfigurationError(self._message)


def lacks(table: Mapping[str, str], kind: type[Absent | AbsentMethod] = Absent) -> Callable[[T], T]:
    """Return a class decorator: access to the names of a table, or a call of its methods, raises with their sentences.

    The names are class attributes, so that existing ones cost nothing and subclasses may define their own.
    """

    def decorate(cls: T) -> T:
        for name, sentence in table.items():
            setattr(cls, name, kind(cls.__name__, name, sentence))
        return cls

    return decorate
