"""Names of Composer, and what takes their place in phalanx."""

from __future__ import annotations

from .counterparts import Counterparts
from .edits import COMPOSER_PAGE

_MODEL = "derive from phalanx.TrainModule, with training_step, validation_step and configure_optimizers"

COMPOSER = Counterparts(
    root="composer",
    title="Composer",
    page=COMPOSER_PAGE,
    names={
        "Trainer": "give the module and the loaders to phalanx.Trainer.fit, and the optimizer to configure_optimizers",
        "ComposerModel": _MODEL,
        "ComposerClassifier": _MODEL,
        "HuggingFaceModel": _MODEL,
        "Time": "Trainer takes max_epochs and max_steps, and counts nothing else",
        "DecoupledAdamW": "return torch.optim.AdamW from configure_optimizers; its weight_decay is multiplied by lr",
        "DecoupledSGDW": "return torch.optim.SGD from configure_optimizers; its weight_decay is added to the gradient",
        "optim": "return an optimizer and a scheduler of torch from configure_optimizers",
        "EMA": "use phalanx.callbacks.EMAWeightAveraging",
        "SWA": "use phalanx.callbacks.StochasticWeightAveraging",
        "GradientClipping": "use Trainer(gradient_clip_val=...)",
        "LabelSmoothing": "give label_smoothing to cross_entropy in training_step",
        "ProgressiveResizing": "resize the batch in on_before_batch_transfer or in training_step",
        "algorithms": "write it in training_step or in a Callback",
        "EarlyStopper": "use phalanx.callbacks.EarlyStopping",
        "LRMonitor": "use phalanx.callbacks.LearningRateMonitor",
        "SpeedMonitor": "use phalanx.callbacks.ThroughputMonitor",
        "CheckpointSaver": "use phalanx.callbacks.ModelCheckpoint",
        "Callback": "derive from phalanx.Callback",
        "callbacks": "use one of phalanx.callbacks, or write a Callback",
        "WandBLogger": "use phalanx.loggers.WandbLogger",
        "TensorboardLogger": "use phalanx.loggers.TensorBoardLogger",
        "MLFlowLogger": "use phalanx.loggers.MLFlowLogger",
        "loggers": "use one of phalanx.loggers",
        "Profiler": "use Trainer(profiler='torch')",
        "profiler": "use Trainer(profiler='torch')",
        "get_sampler": "give the DataLoader without a sampler: phalanx shares it out over the ranks",
        "seed_all": "use phalanx.seed_everything",
    },
    methods={
        "ComposerModel": {
            "loss": "call it in training_step, which returns the loss",
            "eval_forward": "call it in validation_step",
            "get_metrics": "log the metrics in validation_step with self.log",
            "update_metric": "log the metrics in validation_step with self.log",
        },
        "Callback": {
            "init": "write setup of a Callback",
            "fit_start": "write on_train_start of a Callback",
            "fit_end": "write on_train_end of a Callback",
            "epoch_start": "write on_train_epoch_start of a Callback",
            "epoch_end": "write on_train_epoch_end of a Callback",
            "batch_start": "write on_train_batch_start of a Callback",
            "batch_end": "write on_train_batch_end of a Callback",
            "before_loss": "write it in training_step",
            "after_backward": "write on_after_backward of a Callback",
            "eval_start": "write on_validation_start of a Callback",
            "eval_end": "write on_validation_end of a Callback",
            "eval_batch_end": "write on_validation_batch_end of a Callback",
        },
    },
)
