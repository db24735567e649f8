"""Public names of Lightning's Trainer, module and data module that phalanx lacks, with what to use instead.

Of the names of ``LightningModule`` only methods and keys are listed, whose use raises: an ``nn.Module`` replaces the
message of every missing attribute by its own, and another look-up would slow down each access to a layer.
"""

from __future__ import annotations

_LOOPS = "there are no loop objects: read trainer.progress, or write your own loop with phalanx.Fabric"
_KEYS = "checkpoints have other keys: read hyperparameters with phalanx.checkpoint"

TRAINER = {
    "accelerator": "read the device from trainer.world.device",
    "distributed_sampler_kwargs": "read trainer.world.data_rank and trainer.world.data_size",
    "fit_loop": _LOOPS,
    "init_module": "build large layers in the module's configure_model, which runs under the strategy",
    "precision_plugin": "read the precision's name from trainer.precision",
    "predict_loop": _LOOPS,
    "test_loop": _LOOPS,
    "val_check_batch": "read trainer.val_check_interval and trainer.num_training_batches",
    "validate_loop": _LOOPS,
}
CHECKPOINT_KEYS = {
    "CHECKPOINT_HYPER_PARAMS_KEY": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_NAME": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_TYPE": _KEYS,
}
DATA_MODULE = {
    **CHECKPOINT_KEYS,
    "load_from_checkpoint": "create the DataModule yourself and pass it to fit, which restores its state",
    "name": "read type(datamodule).__name__",
}
MODULE = {
    **CHECKPOINT_KEYS,
    "configure_sharded_model": "build large layers in configure_model",
    "to_onnx": "call torch.onnx.export(module, ...)",
    "to_tensorrt": "export with torch.export, and compile with torch_tensorrt",
    "to_torchscript": "call torch.jit.script or torch.jit.trace with the network inside the module, such as module.net",
}
