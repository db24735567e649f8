"""Programs with Composer's Trainer: a model with ``forward`` and ``loss``, an optimizer, loaders and a duration."""

from __future__ import annotations

import re

import libcst as cst

from .composer_counterparts import COMPOSER
from .counterparts import translate_or_list
from .edits import COMPOSER_PAGE, Outcome
from .program import (
    CannotTranslate,
    call_text,
    end_of_line,
    free_name,
    indented,
    is_called,
    method_call,
    replace_imports,
    require_same_block,
    the_call,
    top_level,
    uses_of,
)
from .source import Source, dotted, literal

_TRAINER = ("composer.Trainer", "composer.trainer.Trainer")
_MODEL = ("composer.ComposerModel", "composer.models.ComposerModel", "composer.models.base.ComposerModel")
_OTHER_MODELS = "composer.models."
_PRECISIONS = {"fp32": "32-true", "amp_bf16": "bf16-mixed", "amp_fp16": "16-mixed"}
_DEVICES = {"cpu": "cpu", "gpu": "gpu"}
_TIMES = {
    "max_duration": {"ep": {"max_epochs": "{}"}, "ba": {"max_epochs": "-1", "max_steps": "{}"}},
    "eval_interval": {
        "ep": {"check_val_every_n_epoch": "{}"},
        "ba": {"check_val_every_n_epoch": "None", "val_check_interval": "{}"},
    },
}
_LIMITS = {"train_subset_num_batches": "limit_train_batches", "eval_subset_num_batches": "limit_val_batches"}
_OBJECTS = ("model", "optimizers", "train_dataloader", "eval_dataloader", "seed")
_REQUIRED = ("model", "train_dataloader", "max_duration", "optimizers")
_STEPS = """

    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch), batch)
        self.log("loss/train/total", loss)
        return loss
"""
_METRICS = """
    def validation_step(self, batch, batch_idx):
        outputs = {outputs}
        for name, metric in self.get_metrics(is_train=False).items():
            self.update_metric(batch, outputs, metric)
            self.log(f"metrics/eval/{{name}}", metric)
"""
_LOSS = """
    def validation_step(self, batch, batch_idx):
        self.log("loss/eval/total", self.loss({outputs}, batch))
"""
_OPTIMIZER = """
    def configure_optimizers(self):
        return self.{optimizer}"""


def migrate_composer(source: Source, outcome: Outcome) -> None:
    """Translate the program if all of it has a counterpart; otherwise leave its parts, with what replaces them."""
    whole = [each for each in source.references() if not isinstance(source.parent(each), cst.Attribute)]
    uses = [(each, path) for each in whole for path in source.imported_names(each)]
    own = [(each, path) for each, path in uses if path.startswith("composer.")]
    if not own:
        return
    others = [(each, path) for each, path in own if path not in (*_TRAINER, *_MODEL) and not _is_metric(path)]
    used: list[tuple[cst.CSTNode, str]] = [(each, f"{path} is used") for each, path in others]
    translate_or_list(source, outcome, COMPOSER, lambda translated: _Program(source, used).translate(translated))


def _is_metric(path: str) -> bool:
    """Whether a name is one of Composer's metrics, which are metrics of torchmetrics."""
    return path.startswith("composer.metrics.")


def _is_model(source: Source, definition: cst.ClassDef) -> bool:
    paths = [path for base in definition.bases for path in source.imported_names(base.value)]
    return any(path in _MODEL or path.startswith(_OTHER_MODELS) for path in paths)


class _Program:
    """One script with one model and one Trainer."""

    def __init__(self, source: Source, others: list[tuple[cst.CSTNode, str]]) -> None:
        self._source, self._others = source, others
        models = [each for each in source.walk(cst.ClassDef) if _is_model(source, each)]
        self._trainer = the_call(source, _TRAINER, "Composer's Trainer")
        if len(models) != 1:
            raise CannotTranslate((self._trainer.call, "its model is not a single ComposerModel of this file"))
        self._model = models[0]
        self._methods = {each.name.value for each in self._model.body.body if isinstance(each, cst.FunctionDef)}
        self._optimizer = free_name(source, "given_optimizer")

    def translate(self, outcome: Outcome) -> None:
        self._check_model()
        settings = self._settings()
        self._translate_uses(outcome)
        self._translate_model(outcome)
        self._translate_trainer(outcome, settings)
        if "precision" not in settings and settings.get("accelerator") != '"cpu"':
            reason = "Composer's default precision on a GPU is amp_fp16: add precision='16-mixed' for the same."
            outcome.leave(self._source.line(self._trainer.line), reason, COMPOSER_PAGE)
        first = top_level(self._source, self._model)
        replace_imports(self._source, outcome, {*_TRAINER, *_MODEL}, ["phalanx"], first)

    # ---- checks --------------------------------------------------------------------------------------------------

    def _check_model(self) -> None:
        base = self._model.bases[0].value if len(self._model.bases) == 1 else None
        if base is None or not is_called(self._source, base, _MODEL):
            raise CannotTranslate((self._model, "its model is derived from another class than ComposerModel"))
        if not {"forward", "loss"} <= self._methods:
            raise CannotTranslate((self._model, "its model has no 'forward' or no 'loss'"))
        if {"get_metrics", "update_metric"} & self._methods and not {"get_metrics", "update_metric"} <= self._methods:
            raise CannotTranslate((self._model, "its model has only one of 'get_metrics' and 'update_metric'"))

    def _settings(self) -> dict[str, str]:
        """Return the arguments of phalanx's Trainer as they are written."""
        given = self._trainer.arguments
        parts = [
            *self._others,
            *((self._trainer.call, f"its Trainer has no {n!r}") for n in _REQUIRED if n not in given),
        ]
        found: dict[str, str] = {}
        for name, argument in given.items():
            if name in ("model", "optimizers") and dotted(argument.value) is None:
                parts.append((argument, f"{name!r} of its Trainer is not a variable"))
            elif name not in _OBJECTS and (setting := self._setting(name, argument.value)) is None:
                text = self._source.code(argument)
                parts.append((argument, f"Trainer({text}) has no counterpart that certainly means the same"))
            elif name not in _OBJECTS and setting is not None:
                found |= setting
        if parts:
            raise CannotTranslate(*parts)
        return found

    def _setting(self, name: str, node: cst.BaseExpression) -> dict[str, str] | None:
        """Return the arguments of phalanx's Trainer for one of Composer's; None if there are none."""
        value = literal(node)
        time = re.fullmatch(r"(\d+)(ep|ba)", f"{value}ep" if isinstance(value, int) else str(value))
        if name in _TIMES and time:
            return {setting: text.format(time[1]) for setting, text in _TIMES[name][time[2]].items()}
        if name == "precision" and value in _PRECISIONS:
            return {"precision": f'"{_PRECISIONS[value]}"'}
        if name == "device" and value in _DEVICES:
            return {"accelerator": f'"{_DEVICES[value]}"'}
        if name == "progress_bar" and isinstance(value, bool):
            return {"enable_progress_bar": str(value)}
        if name in _LIMITS and isinstance(value, int) and value > 0:
            return {_LIMITS[name]: str(value)}
        return None

    # ---- edits ---------------------------------------------------------------------------------------------------

    def _translate_uses(self, outcome: Outcome) -> None:
        loaders = self._arguments_of_fit()
        for use in uses_of(self._source, self._trainer.name):
            called = method_call(self._source, use)
            if called is None or called[0] not in ("fit", "eval") or called[1].args:
                raise CannotTranslate((use, f"{self._trainer.name!r} is used in another way than fit() and eval()"))
            method, call = called
            require_same_block(self._source, self._trainer.line, call)
            text = f"fit({loaders})" if method == "fit" else f"validate({self._evaluation()})"
            outcome.replace(self._source.span(call), f"{self._trainer.name}.{text}", self._source.line(call))

    def _arguments_of_fit(self) -> str:
        names = [name for name in ("model", "train_dataloader", "eval_dataloader") if name in self._trainer.arguments]
        return ", ".join(self._value(name) for name in names)

    def _evaluation(self) -> str:
        if "eval_dataloader" not in self._trainer.arguments:
            raise CannotTranslate((self._trainer.call, "eval() has no loader"))
        return f"{self._value('model')}, {self._value('eval_dataloader')}"

    def _value(self, name: str) -> str:
        return self._source.code(self._trainer.arguments[name].value)

    def _translate_model(self, outcome: Outcome) -> None:
        source, line = self._source, self._source.line(self._model)
        outcome.replace(source.span(self._model.bases[0].value), "phalanx.TrainModule", line)
        outputs = "self.eval_forward(batch)" if "eval_forward" in self._methods else "self(batch)"
        evaluation = _METRICS if "get_metrics" in self._methods else _LOSS
        text = _STEPS + evaluation.format(outputs=outputs) + _OPTIMIZER.format(optimizer=self._optimizer)
        end = end_of_line(source, self._model.body.body[-1])
        indentation = source.indentation(self._model)
        outcome.replace((end, end), indented(text, indentation, source.tree.default_newline), line)

    def _translate_trainer(self, outcome: Outcome, settings: dict[str, str]) -> None:
        trainer, source = self._trainer, self._source
        lines = [
            f"{self._value('model')}.{self._optimizer} = {self._value('optimizers')}",
            call_text(f"{trainer.name} = phalanx.Trainer", [], dict(sorted(settings.items()))),
        ]
        if "seed" in trainer.arguments:
            lines.insert(0, f"phalanx.seed_everything({self._value('seed')})")
        text = indented("\n".join(lines), source.indentation(trainer.line), source.tree.default_newline)
        outcome.replace(source.span(trainer.line.body[0]), text, source.line(trainer.line))
