"""Methods and attributes of Lightning and Accelerate that phalanx never calls, lacks, or gives another meaning."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import libcst as cst

from ...callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging
from ...compat.accelerate.accelerator import Accelerator
from ...framework.api.callback import Callback
from ...framework.api.data_module import DataModule
from ...framework.api.train_module import TrainModule
from ...framework.core.absent_names import sentence_for
from ...framework.trainer.hook_names import FORMER
from ...framework.trainer.trainer import Trainer
from .edits import ACCELERATE_PAGE, LIGHTNING_PAGE, Outcome
from .names import Framework, Target, counterpart
from .source import Source

_BASES = (TrainModule, DataModule, Callback)
# Overridden methods that exist, and whose contract is another one.
_OTHER_CONTRACT = {
    "backward": "it is called with the weighted loss, and strategies that shard the state refuse it",
    "optimizer_step": "the backward pass has run before it, and the closure only returns the loss",
}
_STAGES = ("validate", "test", "predict")


def check_methods(source: Source, frameworks: Collection[Framework], outcome: Outcome) -> None:
    """Leave the methods and attributes of classes and Trainers that the user has to look at.

    Args:
        source: the file.
        frameworks: those that it imports.
        outcome: gets the lines that are left.
    """
    if not any(each.page == LIGHTNING_PAGE for each in frameworks):
        return
    for definition in source.walk(cst.ClassDef):
        if (base := _base_of(source, definition)) is not None:
            _check_class(source, outcome, definition, base)
    trainers = {"trainer", *_bound_to(source, Trainer)}
    for attribute in source.walk(cst.Attribute):
        if _is_trainer(attribute.value, trainers):
            _check_name(Trainer, attribute.attr.value, source.line(attribute), outcome, LIGHTNING_PAGE)
    for call in source.walk(cst.Call):
        _check_weights(source, outcome, call, trainers)
    _check_averages(source, outcome)
    for string in source.walk(cst.SimpleString):
        if "lightning_logs" in string.value:
            reason = "runs are in phalanx_logs, and their checkpoints are directories."
            outcome.leave(source.line(string), reason, LIGHTNING_PAGE)


def check_accelerators(source: Source, outcome: Outcome) -> None:
    """Leave the attributes of an ``Accelerator`` that have no counterpart."""
    names = set(_bound_to(source, Accelerator))
    for attribute in source.walk(cst.Attribute):
        if isinstance(attribute.value, cst.Name) and attribute.value.value in names:
            _check_name(Accelerator, attribute.attr.value, source.line(attribute), outcome, ACCELERATE_PAGE)


def _check_name(kind: type, name: str, line: int, outcome: Outcome, page: str) -> None:
    if sentence := sentence_for(kind, name):
        outcome.leave(line, f"{kind.__name__} has no {name!r}: {sentence}.", page)


def _base_of(source: Source, definition: cst.ClassDef) -> type | None:
    for base in definition.bases:
        for path in source.imported_names(base.value):
            target = counterpart(path)
            if isinstance(target, Target) and isinstance(target.value, type) and issubclass(target.value, _BASES):
                return target.value
    return None


def _check_class(source: Source, outcome: Outcome, definition: cst.ClassDef, base: type) -> None:
    for method in definition.body.body:
        if not isinstance(method, cst.FunctionDef):
            continue
        name, line = method.name.value, source.line(method)
        method_name = f"{definition.name.value}.{name}"
        if (meant := FORMER.get(name)) and hasattr(base, meant):
            outcome.leave(line, f"phalanx never calls {method_name}: use {meant!r}.", LIGHTNING_PAGE)
        elif issubclass(base, TrainModule) and (sentence := _OTHER_CONTRACT.get(name)):
            outcome.leave(line, f"{method_name} has another contract: {sentence}.", LIGHTNING_PAGE)
        else:
            _check_name(base, name, line, outcome, LIGHTNING_PAGE)


def _bound_to(source: Source, kind: type) -> Iterator[str]:
    """Yield the names that are bound to an object of a class by its call."""
    for assignment in source.walk(cst.Assign):
        if isinstance(assignment.value, cst.Call):
            for path in source.imported_names(assignment.value.func):
                target = counterpart(path)
                if isinstance(target, Target) and target.value is kind:
                    names = (each.target for each in assignment.targets)
                    yield from (name.value for name in names if isinstance(name, cst.Name))


def _is_trainer(node: cst.BaseExpression, names: set[str]) -> bool:
    if isinstance(node, cst.Name):
        return node.value in names
    return isinstance(node, cst.Attribute) and node.attr.value == "trainer"


def _check_weights(source: Source, outcome: Outcome, call: cst.Call, trainers: set[str]) -> None:
    """Leave an evaluation without a model, which has the best weights in Lightning."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in _STAGES:
        return
    if not _is_trainer(call.func.value, trainers):
        return
    given = {each.keyword.value if each.keyword else "model" for each in call.args}
    if not given & {"model", "ckpt_path"}:
        name = f"trainer.{call.func.attr.value}()"
        reason = (
            f"{name} has the weights of the end of the fit: add ckpt_path='best' for the best ones, as in Lightning."
        )
        outcome.leave(source.line(call), reason, LIGHTNING_PAGE)


def _check_averages(source: Source, outcome: Outcome) -> None:
    """Leave the loads of trained weights in a program that averages them, which are the averages in Lightning."""
    used = {path for node in source.references() for path in source.imported_names(node)}
    targets = [target.value for target in map(counterpart, used) if isinstance(target, Target)]
    names = [kind().name for kind in (EMAWeightAveraging, WeightAveraging) if any(each is kind for each in targets)]
    if not names:
        return
    for call in source.walk(cst.Call):
        is_load = isinstance(call.func, cst.Attribute) and call.func.attr.value == "load_from_checkpoint"
        if is_load and not any(each.keyword and each.keyword.value == "average" for each in call.args):
            reason = (
                f"load_from_checkpoint has the trained weights: add average={names[0]!r} for the averaged ones, as "
            )
            outcome.leave(source.line(call), f"{reason}in Lightning.", LIGHTNING_PAGE)
