"""Misspelled names of hooks in the user's modules, callbacks and data modules: phalanx would never call them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from types import CodeType

from ..api.callback import Callback
from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError

_NOT_HOOKS = {"log", "print", "freeze", "unfreeze", "optimizers", "lr_schedulers", "all_gather"}


def _names_of(cls: type) -> list[str]:
    """Return the public methods of a class that users subclass, and of its bases in the same sub-package."""
    package = cls.__module__.rpartition(".")[0]
    own = [vars(base) for base in cls.__mro__ if base.__module__.rpartition(".")[0] == package]
    methods = [name for table in own for name, value in table.items() if inspect.isfunction(value)]
    return sorted({name for name in methods if not name.startswith("_")} - _NOT_HOOKS)


_HOOKS: dict[type, list[str]] = {
    Callback: _names_of(Callback),
    DataModule: _names_of(DataModule),
    TrainModule: [*_names_of(TrainModule), "forward"],
}
# Hook names of older frameworks, which would never be called.
FORMER = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "train_step": "training_step",
    "val_step": "validation_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_val_epoch_start": "on_validation_epoch_start",
    "on_val_epoch_end": "on_validation_epoch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "configure_sharded_model": "configure_model",
    "tng_dataloader": "train_dataloader",
    "valid_dataloader": "val_dataloader",
    "validation_dataloader": "val_dataloader",
}
# Words that are used in place of others in names of hooks that do not exist, such as on_training_step_end.
_WORDS = {
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "testing": "test",
    "prediction": "predict",
    "begin": "start",
    "finish": "end",
    "finished": "end",
    "step": "batch",
}


def check_names(cls: type, base: type[Callback | DataModule | TrainModule]) -> None:
    """Refuse methods with a name similar to a hook's, which phalanx never calls.

    If the class has the hook as well, the method may be a helper of it: it is refused only if nothing in the class
    uses it and its name is not the hook's followed by further words.

    Args:
        cls: the user's class.
        base: the class of phalanx that it derives from.

    Raises:
        ConfigurationError: there is such a method; the message names the most similar hook.
    """
    hooks = _HOOKS[base]
    inherited = set(dir(base)) - set(FORMER)
    owners = [owner for owner in cls.__mro__ if _is_users(owner)]
    for owner in owners:
        for name, value in vars(owner).items():
            if not inspect.isfunction(value) or name.startswith("_") or name in inherited:
                continue
            meant = FORMER.get(name) if name in FORMER else _similar(name, hooks)
            if meant is None or meant not in hooks:
                continue
            is_missing = getattr(cls, meant) is getattr(base, meant) and meant != "forward"
            if is_missing or not (name.startswith(f"{meant}_") or _is_used(owners, name)):
                raise ConfigurationError(
                    f"phalanx never calls {cls.__name__}.{name}. Did you mean {meant!r}? "
                    "If it is your own helper, give it a name less similar to a hook's."
                )


def _is_users(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in (__name__.partition(".")[0], "torch", "builtins")


def _similar(name: str, hooks: Iterable[str]) -> str | None:
    """Return the hook whose name differs from ``name`` by a few letters, or by the order or choice of words."""
    if not name.startswith("on_"):
        return next(iter(get_close_matches(name, hooks, n=1, cutoff=0.88)), None)
    hooks = [hook for hook in hooks if hook.startswith("on_")]
    by_words = {_words_of(hook): hook for hook in hooks}
    same = by_words.get(_words_of(name)) or by_words.get(_words_of(f"{name}_end"))
    return same or next(iter(get_close_matches(name, hooks, n=1, cutoff=0.88)), None)


def _words_of(name: str) -> tuple[str, ...]:
    return tuple(sorted(_WORDS.get(word, word) for word in name.split("_")))


def _is_used(owners: Iterable[type], name: str) -> bool:
    """Whether a method of these classes with another name refers to ``name``."""
    return any(name in names for owner in owners for names in _names_used(owner, name))


def _names_used(owner: type, but: str) -> Iterator[set[str]]:
    """Yield the names that each method of a class refers to, except for the method ``but``."""
    for name, value in vars(owner).items():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if name != but and callable(function):
            code = getattr(inspect.unwrap(function), "__code__", None)
            if code is not None:
                yield _names_in(code)


def _names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for each in inner for name in _names_in(each))}
