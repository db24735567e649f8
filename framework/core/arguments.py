"""Errors for unknown arguments: the message names the closest known argument, or the place where it belongs.

``names_arguments`` decorates functions, and constructors of subclasses of ``NamesArguments``. It costs nothing but a
call where the arguments are right, so it is for constructors and for functions that run a few times in a run.
``NoArguments`` is the base of classes without a constructor.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import FrameType, MappingProxyType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from .errors import UnknownArgumentError, closest_or_known

P = ParamSpec("P")
R = TypeVar("R")

# Names of arguments in other frameworks or their older versions that are too different for a closest match, each with
# the names that functions of phalanx may have for it.
_OTHER_NAMES = {
    "gpus": ("devices",),
    "num_gpus": ("devices",),
    "num_processes": ("devices",),
    "nproc": ("devices",),
    "tpu_cores": ("devices",),
    "backend": ("strategy",),
    "distributed_backend": ("strategy",),
    "epochs": ("max_epochs",),
    "num_epochs": ("max_epochs",),
    "num_train_epochs": ("max_epochs",),
    "accumulate_grad_batches": ("accumulate",),
    "gradient_accumulation_steps": ("accumulate_grad_batches", "accumulate"),
    "max_grad_norm": ("gradient_clip_val", "max_norm"),
    "grad_clip": ("gradient_clip_val",),
    "gradient_clip_val": ("max_norm",),
    "fp16": ("precision",),
    "bf16": ("precision",),
    "mixed_precision": ("precision",),
    "amp_backend": ("precision",),
    "log_with": ("loggers", "logger"),
    "checkpoint_callback": ("enable_checkpointing",),
    "progress_bar_refresh_rate": ("enable_progress_bar",),
    "weights_summary": ("enable_model_summary",),
    "replace_sampler_ddp": ("use_distributed_sampler",),
    "val_percent_check": ("limit_val_batches",),
    "train_percent_check": ("limit_train_batches",),
    "weights_save_path": ("default_root_dir",),
    "output_dir": ("default_root_dir",),
    "train_loader": ("train_dataloaders", "dataloaders"),
    "val_loader": ("val_dataloaders", "dataloaders"),
    "module": ("model",),
    "resume_from_checkpoint": ("ckpt_path",),
    "checkpoint": ("ckpt_path",),
    "ckpt": ("ckpt_path",),
    "period": ("every_n_epochs",),
    "filepath": ("dirpath",),
    "root_dir": ("save_dir", "default_root_dir"),
    "find_unused": ("find_unused_parameters",),
}


def unknown_argument(
    call: str, name: str, value: Any, known: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> UnknownArgumentError:
    """Build the error for an argument that does not exist.

    Args:
        call: the function or class, such as ``"Trainer.fit"``.
        name: the argument.
        value: its value, which the message shows if it is a plain one.
        known: the arguments that exist, the important ones first.
        elsewhere: for names of other frameworks, what to do instead.
    """
    shown = repr(value) if isinstance(value, (str, int, float, type(None), dict, list)) else "..."
    given = f"{call}({name}={shown}): there is no such argument"
    return UnknownArgumentError(given + advice_for(name, known, elsewhere))


def advice_for(
    name: str, known: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({}), prefix: str = ""
) -> str:
    """Return the end of a sentence about an unknown argument.

    ``unknown_argument`` has the parameters; ``prefix`` comes before a name where it is written.
    """
    if name in elsewhere:
        return f"; {elsewhere[name].removesuffix('.')}."
    names = list(known)
    other = other_name(name, names)
    return "." + (f" Did you mean {prefix + other!r}?" if other else closest_or_known(name, names, prefix=prefix))


def other_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known argument that has this name in another framework or an older version; its values may differ."""
    names = list(known)
    return next((each for each in _OTHER_NAMES.get(name, ()) if each in names), None)


def check_names(
    call: str, given: Mapping[str, Any], known: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse keyword arguments that do not exist; ``unknown_argument`` has the parameters.

    Raises:
        UnknownArgumentError: there is one.
    """
    names = list(known)
    for name, value in given.items():
        if name not in names:
            raise unknown_argument(call, name, value, names, elsewhere) from None


def refuse_unknown(call: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that a function does not have.

    Raises:
        UnknownArgumentError: there is one.
    """
    if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values()):
        return
    check_names(call, given, keywords_of(function))


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the names that a function takes as keyword arguments."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in named and each.name not in ("self", "cls")]


def is_from_call(error: TypeError) -> bool:
    """Whether the call itself was refused in the frame that handles ``error``, before the function began.

    A function under ``contextlib.contextmanager`` is called in frames of ``contextlib``.
    """
    last = error.__traceback__
    if last is None:
        return False
    while last.tb_next is not None and last.tb_next.tb_frame.f_globals is vars(contextlib):
        last = last.tb_next
    return last.tb_next is None


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which raises ``UnknownArgumentError`` with the closest match for an unknown argument."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if not is_from_call(error):
                raise
            refuse_unknown(_name_of(function, args), function, kwargs)
            raise

    return call


def outside(frame: FrameType | None) -> FrameType | None:
    """Return the frame; the one below it if it is that of ``names_arguments``, between a function and its caller."""
    return frame.f_back if frame is not None and frame.f_code is _CALL else frame


_CALL = names_arguments(lambda: None).__code__
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


class NoArguments:
    """Base of classes that take no arguments unless they define ``__init__``; the error names the unknown one."""

    # Further classes of a multiple inheritance may take arguments. The types are those of a class that takes none.
    def __init__(self, *args: NoReturn, **kwargs: NoReturn) -> None:
        constructor: Any = super().__init__
        if getattr(constructor, "__objclass__", None) is not object:
            constructor(*args, **kwargs)
            return
        cls: type[Any] = type(self)
        check_names(cls.__name__, {} if _takes_in_new(cls) else kwargs, keywords_of(cls.__init__))
        if args and not _takes_in_new(cls):
            raise TypeError(f"{cls.__name__}() takes no arguments")

    setattr(__init__, "__signature__", inspect.Signature([inspect.Parameter("self", _POSITIONAL)]))  # noqa: B010 (mypy)


def _takes_in_new(cls: type[Any]) -> bool:
    """Whether a class without ``__init__`` takes arguments in ``__new__``, as Python allows."""
    own: Any = cls
    return own.__new__ is not object.__new__ and own.__init__ is NoArguments.__init__


class NamesArguments(NoArguments):
    """Base of classes whose constructors name the closest match for an unknown argument, those of users included."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        own = cls.__dict__.get("__init__")
        if inspect.isfunction(own):
            setattr(cls, "__init__", names_arguments(cast("Callable[..., None]", own)))  # noqa: B010 (mypy)


def _name_of(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return the name of a function as a user writes it.

    That is the class for a constructor, and that of ``self`` where it has no constructor of its own.
    """
    owner, _, name = function.__qualname__.rpartition(".<locals>.")[2].rpartition(".")
    cls = type(args[0]) if owner and args else None
    if name == "__init__":
        return cls.__name__ if cls and inspect.unwrap(inspect.getattr_static(cls, name)) is function else owner
    return f"{cls.__name__}.{name}" if cls else name
