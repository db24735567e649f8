"""Arguments of calls: those of older releases, and names of strategies and precisions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Any

import libcst as cst

from ...framework.core.arguments import keywords_of, other_name, unknown_argument
from ...framework.core.errors import ConfigurationError, UnknownNameError
from ...framework.core.foreign_names import ARGUMENTS
from ...framework.core.registry import PRECISIONS, STRATEGIES
from ...framework.fabric.fabric import Fabric
from ...framework.parallel.resources import device_type_of
from ...framework.trainer.settings import TrainerSettings
from ...framework.trainer.trainer import Trainer
from .edits import SHARDED_PAGE, Outcome
from .names import Framework, Target, counterpart, framework_of
from .source import Source, literal

# Arguments of older releases whose values mean the same under the name that phalanx suggests for them.
_SAME_VALUE = frozenset(
    ("checkpoint_callback", "num_processes", "replace_sampler_ddp", "train_percent_check", "val_percent_check")
)
# An argument that is only an object where none is supported.
_SOMETHING = object()


def check_calls(source: Source, outcome: Outcome) -> None:
    """Translate or leave the arguments of calls of known names."""
    for call in source.walk(cst.Call):
        names = [(path, counterpart(path)) for path in source.imported_names(call.func)]
        for path, target in names:
            if isinstance(target, Target) and callable(target.value):
                _check_call(source, outcome, call, path, target.value)
                break
            if target is None and (framework := framework_of(path)) is not None:
                _check_class_attribute(source, outcome, call, path, framework.page)


def _check_class_attribute(source: Source, outcome: Outcome, call: cst.Call, path: str, page: str) -> None:
    """Leave a function of a class that phalanx's class lacks, such as ``Trainer.from_argparse_args``."""
    owner, _, name = path.rpartition(".")
    target = counterpart(owner)
    # The path of a method of what a function returns begins with the function's as well.
    if isinstance(target, Target) and isinstance(target.value, type) and not hasattr(target.value, name):
        outcome.leave(source.line(call), f"{target.dotted} has no {name}.", page)


def _check_call(source: Source, outcome: Outcome, call: cst.Call, path: str, called: Any) -> None:
    framework = framework_of(path)
    assert framework is not None
    name = path.rpartition(".")[2]
    known = _arguments_of(called, name in ARGUMENTS)
    older = _older_arguments(source, call) if called is Trainer and not framework.is_phalanx else {}
    for argument in call.args:
        if argument.star:
            if called is Trainer and argument.star == "**":
                text = "its arguments are not in the text: compare them with those of phalanx.Trainer"
                outcome.leave(source.line(argument), f"{source.code(argument)}: {text}.", framework.page)
        elif argument in older:
            gone = [each for each, text in older.items() if not text]
            span = source.span(argument) if older[argument] else removal(source, call, argument, gone)
            outcome.replace(span, older[argument], source.line(argument))
        elif argument.keyword is not None:
            keyword = argument.keyword.value
            if known is not None and keyword not in known:
                value = literal(argument.value)
                error = unknown_argument(name, keyword, value, known)
                outcome.leave(source.line(argument), str(error), framework.page)
            elif called in (Trainer, Fabric):
                _check_value(source, outcome, argument, framework)


def _arguments_of(called: Any, refuses_others: bool = False) -> list[str] | None:
    """Return the names of a call's arguments; None if it takes any, and does not refuse others itself."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return None
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return None if takes_any and not refuses_others else keywords_of(called)


# ---- arguments with other names --------------------------------------------------------------------------------------


def _older_arguments(source: Source, call: cst.Call) -> dict[cst.Arg, str]:
    """Return the arguments of older releases with their text in phalanx, where that needs no guess."""
    known = _arguments_of(Trainer) or []
    given = {each.keyword.value: each for each in call.args if each.keyword is not None}
    values = {name: literal(each.value) for name, each in given.items()}
    found = {}
    for keyword, argument in given.items():
        if keyword in known:
            continue
        new, value = other_name(keyword, known), values[keyword]
        if keyword in _SAME_VALUE and new and new not in values:
            found[argument] = f"{new}{source.code(argument)[len(keyword) :]}"
            values[new] = value
            continue
        translated = _OLD_ARGUMENTS[keyword](value) if keyword in _OLD_ARGUMENTS else None
        # Another argument may have the same value already, but no other one.
        if translated is not None and all(values.get(name, wanted) == wanted for name, wanted in translated.items()):
            added = {name: repr(wanted) for name, wanted in translated.items() if name not in values}
            found[argument] = ", ".join(f"{name}={text}".replace("'", '"') for name, text in added.items())
            values.update(translated)
    return found


def _gpus(value: Any) -> dict[str, Any] | None:
    if isinstance(value, bool) or not isinstance(value, int | type(None)):
        return None
    # None and 0 meant the CPU, whatever the machine has.
    return {"accelerator": "gpu", "devices": value} if value else {"accelerator": "cpu"}


def _refresh_rate(value: Any) -> dict[str, Any] | None:
    if value is ...:
        return None
    return {"enable_progress_bar": False} if value == 0 else {}


def _summary(value: Any) -> dict[str, Any] | None:
    if value is ...:
        return None
    return {"enable_model_summary": False} if value is None else {}


_OLD_ARGUMENTS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "gpus": _gpus,
    "progress_bar_refresh_rate": _refresh_rate,
    "weights_summary": _summary,
    "amp_backend": lambda value: {} if value == "native" else None,
}


def removal(source: Source, call: cst.Call, argument: cst.Arg, removed: Collection[cst.Arg]) -> tuple[int, int]:
    """Return the span of an argument that goes, with the comma or the lines that go with it.

    Args:
        source: the file.
        call: the call that it is an argument of.
        argument: the argument.
        removed: all arguments of the call that go, this one among them.
    """
    start, end = source.span(argument)
    if (line := _own_line(source.text, start, end)) is not None:
        return line
    index = call.args.index(argument)
    if any(each not in removed for each in call.args[index:]):
        return start, source.span(call.args[index + 1])[0]
    kept = [each for each in call.args if each not in removed]
    return (source.span(kept[-1])[1] if kept else start), end


def _own_line(text: bytes, start: int, end: int) -> tuple[int, int] | None:
    """Return the span of the lines of an argument if nothing else is on them but its comma and a comment."""
    begin = text.rfind(b"\n", 0, start) + 1
    rest = re.compile(rb",[ \t]*(#[^\n]*)?\n").match(text, end)
    return None if text[begin:start].strip() or rest is None else (begin, rest.end())


# ---- values ----------------------------------------------------------------------------------------------------------


def _check_value(source: Source, outcome: Outcome, argument: cst.Arg, framework: Framework) -> None:
    """Replace another framework's name of a strategy or precision, and leave a value that is refused."""
    assert argument.keyword is not None
    keyword, value = argument.keyword.value, literal(argument.value)
    line, span = source.line(argument), source.span(argument.value)
    registry = {"strategy": STRATEGIES, "precision": PRECISIONS}.get(keyword)
    if registry is not None and isinstance(value, str | int) and value != "auto":
        try:
            name = registry.canonical(str(value))
        except UnknownNameError as error:
            outcome.leave(line, str(error), SHARDED_PAGE if keyword == "strategy" else framework.page)
            return
        if name != value and isinstance(value, str) and not framework.is_phalanx:
            quote = source.code(argument.value)[-1]
            outcome.replace(span, f"{quote}{name}{quote}", line)
        return
    for sentence in _refusals(keyword, value):
        outcome.leave(line, sentence, framework.page)


def _refusals(keyword: str, value: Any) -> Iterator[str]:
    """Yield the sentence of the error for a value that ``Trainer`` refuses on every machine."""
    if keyword == "accelerator" and isinstance(value, str):
        try:
            device_type_of(value)
        except UnknownNameError as error:
            yield str(error)
        except ConfigurationError:
            return  # The device is not in this machine.
    declared = {each.name: each for each in fields(TrainerSettings)}.get(keyword)
    rule = declared.metadata["rule"] if declared is not None else None
    if declared is None or rule is None or (value is ... and declared.type != "None"):
        return
    try:
        rule(keyword, _SOMETHING if value is ... else value)
    except ConfigurationError as error:
        yield str(error)
