"""Errors for unknown arguments: the message names the closest known argument, or the place where it belongs.

``names_arguments`` decorates functions, and constructors of subclasses of ``NamesArguments``. It costs nothing but a
call where the arguments are right, so it is for constructors and for functions that run a few times in a run.
``NoArguments`` is the base of classes without a constructor.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from types import FrameType, MappingProxyType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

from .errors import UnknownArgumentError, closest_or_known
from .foreign_names import ARGUMENTS, SYNONYMS

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type[Any])


def unknown_argument(
    call: str, name: str, value: Any, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> UnknownArgumentError:
    """Build the error for an argument that does not exist.

    Args:
        call: the function or class, such as ``"Trainer.fit"``.
        value: its value, which the message shows if it is a plain one.
        known: the arguments that exist, the important ones first.
        elsewhere: for names of other frameworks, what to do instead; None for those of ``foreign_names.ARGUMENTS``.
    """
    elsewhere = ARGUMENTS.get(call, {}) if elsewhere is None else elsewhere
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
    return next((each for each in SYNONYMS.get(name, ()) if each in names), None)


def check_names(
    call: str, given: Mapping[str, Any], known: Iterable[str], elsewhere: Mapping[str, str] | None = None
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


def names_fields(cls: C) -> C:
    """Return a dataclass whose constructor raises ``UnknownArgumentError`` for an unknown field."""
    setattr(cls, "__init__", names_arguments(cast("Callable[..., None]", vars(cls)["__init__"])))  # noqa: B010 (mypy)
    return cls


def outside(frame: FrameType | None) -> FrameType | None:
    """Return the frame; the one below it if it is that of ``names_arguments``, between a function and its caller."""
    return frame.f_back if frame is not None and frame.f_code is _CALL else frame


def takes(settings: Callable[P, R]) -> Callable[[Callable[[Any, R], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator: the constructor accepts the fields of a dataclass as keyword arguments.

    The signature and the list of arguments in the docstring are those of the dataclass.
    """
    declared = {each.name: each for each in fields(settings)}  # type: ignore[arg-type]

    def decorate(constructor: Callable[[Any, R], None]) -> Callable[Concatenate[Any, P], None]:
        owner = constructor.__qualname__.rpartition(".")[0]

        @wraps(constructor)
        def construct(self: Any, *positional: Any, **arguments: Any) -> None:
            if positional:
                raise TypeError(f"{construct.__qualname__} takes keyword arguments only, but got {positional[0]!r}.")
            for name in arguments:
                if name not in declared:
                    raise unknown_argument(owner, name, arguments[name], declared)
            constructor(self, settings(**arguments))  # type: ignore[call-arg]

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # With types instead of their names, which a reader of the signature could not look up in this module.
        parameters = [own, *inspect.signature(settings, eval_str=True).parameters.values()]
        construct.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        lines = [f"    {name}: {each.metadata['documentation']}" for name, each in declared.items()]
        construct.__doc__ = f"{constructor.__doc__}\n\nArgs:\n" + "\n".join(lines)
        return cast("Callable[Concatenate[Any, P], None]", construct)

    return decorate


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
