"""Names of transformers' Trainer, and what takes their place in phalanx."""

from __future__ import annotations

from .counterparts import Counterparts
from .edits import TRANSFORMERS_PAGE

_TRAINER = "write a TrainModule with the model, and give it with its loaders to phalanx.Trainer.fit"
_ARGUMENTS = "its values become arguments of phalanx.Trainer, of the loaders and of the optimizer"
_OPTIMIZERS = "write configure_optimizers of the TrainModule"
_EVALUATION = "write validation_step of the TrainModule, with self.log"
_METHODS = {
    "compute_loss": "write training_step of the TrainModule",
    "training_step": "write training_step of the TrainModule, which returns the loss",
    "prediction_step": _EVALUATION,
    "evaluate": _EVALUATION,
    "evaluation_loop": _EVALUATION,
    "create_optimizer": _OPTIMIZERS,
    "create_scheduler": _OPTIMIZERS,
    "create_optimizer_and_scheduler": _OPTIMIZERS,
    "get_train_dataloader": "write train_dataloader of a DataModule",
    "get_eval_dataloader": "write val_dataloader of a DataModule",
    "get_test_dataloader": "write test_dataloader of a DataModule",
    "log": "use self.log in the steps of the TrainModule, or write a Logger",
}
_CALLBACK_METHODS = {
    "on_train_begin": "write on_train_start of a Callback",
    "on_train_end": "write on_train_end of a Callback, which gets the trainer and the module",
    "on_epoch_begin": "write on_train_epoch_start of a Callback",
    "on_epoch_end": "write on_train_epoch_end of a Callback",
    "on_step_begin": "write on_train_batch_start of a Callback",
    "on_substep_end": "write on_train_batch_end of a Callback",
    "on_step_end": "write on_train_batch_end of a Callback; trainer.global_step counts optimizer steps",
    "on_pre_optimizer_step": "write on_before_optimizer_step of a Callback",
    "on_evaluate": "write on_validation_end of a Callback",
    "on_predict": "write on_predict_end of a Callback",
    "on_save": "write on_save_checkpoint of a Callback",
    "on_log": "write a Logger",
}

TRANSFORMERS = Counterparts(
    root="transformers",
    title="transformers",
    page=TRANSFORMERS_PAGE,
    names={
        "Trainer": _TRAINER,
        "Seq2SeqTrainer": f"{_TRAINER}; predict_step calls model.generate",
        "TrainingArguments": _ARGUMENTS,
        "Seq2SeqTrainingArguments": _ARGUMENTS,
        "HfArgumentParser": "parse the arguments with argparse or jsonargparse, and create the Trainer from them",
        "TrainerCallback": "derive from phalanx.Callback",
        "EarlyStoppingCallback": "use phalanx.callbacks.EarlyStopping(monitor=..., patience=...)",
        "get_last_checkpoint": "fit(..., ckpt_path='auto') resumes from the newest checkpoint",
    },
    methods={
        "Trainer": _METHODS,
        "Seq2SeqTrainer": _METHODS,
        "TrainerCallback": _CALLBACK_METHODS,
    },
)
