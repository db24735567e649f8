"""``TrainingArguments``: their values in arguments of phalanx's Trainer, of loaders, and of the optimizer.

The defaults that change numbers are those of transformers, and are written into the program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst

from .edits import TRANSFORMERS_PAGE, Outcome
from .source import Source, literal

# Trainer settings whose values are taken as they are written.
_SETTINGS = {
    "output_dir": "default_root_dir",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "logging_steps": "log_every_n_steps",
}
_LOGGERS = {"none": "False", "tensorboard": '"tensorboard"', "wandb": '"wandb"', "mlflow": '"mlflow"'}
_TRAIN_LOADER = {"per_device_train_batch_size": "batch_size", "dataloader_drop_last": "drop_last"}
_LOADERS = {"dataloader_num_workers": "num_workers", "dataloader_pin_memory": "pin_memory"}
_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
# Arguments without effect on the weights, which are left out and listed.
_LEFT_OUT = frozenset(
    (
        *("overwrite_output_dir", "logging_dir", "run_name", "do_train", "do_eval", "do_predict", "push_to_hub"),
        *("hub_model_id", "hub_token", "save_steps", "save_total_limit", "load_best_model_at_end"),
        *("metric_for_best_model", "greater_is_better", "save_safetensors", "ddp_find_unused_parameters"),
        *("logging_strategy", "logging_first_step"),
    )
)


@dataclass
class Translated:
    """The settings of one program, as they are written in it.

    Attributes:
        settings: arguments of phalanx's Trainer.
        train_loader: arguments of the training loader.
        eval_loader: arguments of the loader for evaluation.
        optimizer: the arguments of AdamW, and of the schedule.
        schedule: the name of the schedule.
        warmup_steps: the steps of the warm-up.
        warmup_ratio: their share of all steps, if that is given instead; empty if it is not.
        seed: the seed.
        evaluates: whether the program evaluates while it trains.
        filters_columns: whether rows keep only the columns that the model takes.
        metrics: the function that computes metrics of all predictions; empty if there is none.
    """

    settings: dict[str, str]
    train_loader: dict[str, str]
    eval_loader: dict[str, str]
    optimizer: dict[str, str]
    schedule: str
    warmup_steps: int
    warmup_ratio: str
    seed: str
    evaluates: bool
    filters_columns: bool
    metrics: str = ""


class Arguments:
    """The arguments of one call of ``TrainingArguments``; those in ``used`` are translated by the caller."""

    def __init__(
        self, source: Source, call: cst.Call, given: Mapping[str, cst.Arg], outcome: Outcome, used: Collection[str] = ()
    ) -> None:
        self._source, self._call, self._given, self._outcome = source, call, given, outcome
        self._read: set[str] = {*used}
        self.unclear: list[tuple[cst.CSTNode, str]] = []

    def translated(self) -> Translated:
        """Return the settings; ``unclear`` has the arguments without a counterpart that certainly means the same."""
        self._plain("optim", "adamw_torch", _OPTIMIZERS)
        warmup_steps = int(self._plain("warmup_steps", 0, range(1 << 62)))
        warmup_ratio = self._text("warmup_ratio", "0.0")
        found = Translated(
            settings=self._settings(),
            train_loader={"batch_size": "8", "shuffle": "True", **self._named(_TRAIN_LOADER), **self._named(_LOADERS)},
            eval_loader={"batch_size": self._text("per_device_eval_batch_size", "8"), **self._named(_LOADERS)},
            optimizer={name: self._text(name, "") for name in _OPTIMIZER if name in self._given},
            schedule=self._plain("lr_scheduler_type", "linear", _SCHEDULES),
            warmup_steps=warmup_steps,
            warmup_ratio="" if warmup_steps or warmup_ratio in ("0", "0.0") else warmup_ratio,
            seed=self._text("seed", "42"),
            evaluates=self._strategy("eval_strategy", "evaluation_strategy", default="no") != "no",
            filters_columns=self._plain("remove_unused_columns", True, (True, False)),
        )
        for name, argument in self._given.items():
            if name in _LEFT_OUT and name not in self._read:
                text = f"TrainingArguments({name}=...) was left out: see the table of arguments."
                self._outcome.leave(self._source.line(argument), text, TRANSFORMERS_PAGE)
            elif name not in self._read:
                self._refuse(argument)
        return found

    def _settings(self) -> dict[str, str]:
        found = {"log_every_n_steps": "500", **self._named(_SETTINGS), **self._length(), **self._precision()}
        found["gradient_clip_val"] = self._text("max_grad_norm", "1.0")
        if self._plain("use_cpu", False, (True, False)):
            found["accelerator"] = '"cpu"'
        if self._plain("disable_tqdm", False, (True, False)):
            found["enable_progress_bar"] = "False"
        if self._strategy("save_strategy", default="steps") == "no":
            found["enable_checkpointing"] = "False"
        if "report_to" in self._given:
            found["logger"] = _LOGGERS[self._plain("report_to", "none", _LOGGERS)]
        if self._strategy("eval_strategy", "evaluation_strategy", default="no") == "steps":
            steps = self._text("eval_steps", found["log_every_n_steps"])
            window = found.get("accumulate_grad_batches", "1")
            found["val_check_interval"] = steps if window == "1" else f"({steps}) * ({window})"
            found["check_val_every_n_epoch"] = "None"
        self._read.add("eval_steps")
        return found

    def _length(self) -> dict[str, str]:
        """Return the limit of the training; a positive number of steps takes precedence over epochs."""
        steps = self._plain("max_steps", -1, range(-1, 1 << 62))
        epochs = self._given.get("num_train_epochs")
        if steps > 0:
            self._read.add("num_train_epochs")
            return {"max_epochs": "-1", "max_steps": str(int(steps))}
        if epochs is not None and literal(epochs.value) is ...:
            return {"max_epochs": self._text("num_train_epochs", "")}
        return {"max_epochs": str(int(self._plain("num_train_epochs", 3, range(1, 1 << 62))))}

    def _precision(self) -> dict[str, str]:
        """Return the precision; a condition, such as whether there is a GPU, stays one."""
        text = ""
        for name, precision in (("bf16", "bf16-mixed"), ("fp16", "16-mixed")):
            given = self._text(name, "False")
            if given == "True":
                text += f'"{precision}"'
                return {"precision": text}
            if given not in ("False", "None"):
                text += f'"{precision}" if {given} else '
        return {"precision": f'{text}"32-true"'} if text else {}

    def _strategy(self, *names: str, default: str) -> str:
        given = next((name for name in names if name in self._given), names[0])
        found: str = self._plain(given, default, ("no", "steps", "epoch"))
        return found

    def _named(self, names: Mapping[str, str]) -> dict[str, str]:
        return {new: self._text(old, "") for old, new in names.items() if old in self._given}

    def _text(self, name: str, default: str) -> str:
        """Return an argument as it is written."""
        self._read.add(name)
        return self._source.code(self._given[name].value) if name in self._given else default

    def _plain(self, name: str, default: Any, allowed: Any) -> Any:
        """Return the value of an argument that is a literal of the allowed ones."""
        self._read.add(name)
        if name not in self._given:
            return default
        node = self._given[name].value
        if isinstance(node, cst.List) and len(node.elements) < 2:
            # report_to may be a list of names.
            value = literal(node.elements[0].value) if node.elements else "none"
        else:
            value = literal(node)
        if value is ... or value not in allowed:
            self._refuse(self._given[name])
            return default
        return value

    def _refuse(self, argument: cst.Arg) -> None:
        text = f"TrainingArguments({self._source.code(argument)}) has no counterpart that certainly means the same"
        self.unclear.append((argument, text))
