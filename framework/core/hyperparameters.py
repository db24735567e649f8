"""Hyperparameters: the arguments that an object was built with, recorded so that it can be rebuilt."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import FrameType
from typing import Any

from .arguments import names_arguments, outside
from .errors import ConfigurationError, UnknownNameError, closest_or_known, did_you_mean
from .torch_internals import tree_map
from .wording import a_type


class AttributeDict(dict[str, Any]):
    """A dict whose string keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(_missing(name, self)) from None

    def __missing__(self, name: str) -> Any:
        raise UnknownNameError(_missing(name, self))

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperparametersMixin:
    """Gives a class ``save_hyperparameters`` and ``hparams``."""

    @names_arguments
    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of ``__init__`` as ``self.hparams``. Call it in ``__init__``, or a dataclass's
        ``__post_init__``.

        Args:
            args: names of the arguments to keep (default: all), or one mapping or ``Namespace`` to keep as it is.
            ignore: names to leave out, and to remove if the ``__init__`` of a base class has kept them.
            frame: the frame of ``__init__``, where it is not the caller's.
            logger: whether they are sent to the loggers.

        Raises:
            ConfigurationError: a name is not an argument of ``__init__``.
        """
        if frame is None and (current := inspect.currentframe()) is not None:
            frame = outside(current.f_back)
        arguments, container = _init_arguments(self, frame), None
        if len(args) == 1 and not isinstance(args[0], str):
            found = _items_of(args[0])
            container = next((name for name, value in arguments.items() if value is args[0]), None)
        else:
            found = _chosen(arguments, args)
        skipped = {ignore} if isinstance(ignore, str) else set(ignore or ())
        kept = {name: value for name, value in {**self.hparams, **found}.items() if name not in skipped}
        # Called before ``nn.Module.__init__``, and perhaps in a class with a ``__setattr__`` of its own.
        object.__setattr__(self, "_hparams", AttributeDict(kept))
        # Containers are copied, but not a tensor or a module in them.
        object.__setattr__(self, "_hparams_initial", tree_map(lambda leaf: leaf, kept))
        object.__setattr__(self, "_log_hparams", logger)
        object.__setattr__(self, "_hparams_container", container and (container, isinstance(args[0], Namespace)))

    @property
    def hparams(self) -> AttributeDict:
        """The recorded hyperparameters; empty before ``save_hyperparameters``."""
        if "_hparams" not in self.__dict__:
            object.__setattr__(self, "_hparams", AttributeDict())
        kept: AttributeDict = self.__dict__["_hparams"]
        return kept

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyperparameters as the last ``save_hyperparameters`` recorded them, without changes made since."""
        return AttributeDict(tree_map(lambda leaf: leaf, self.__dict__.get("_hparams_initial", {})))

    @names_arguments
    def remove_ignored_hparams(self, ignore_list: Iterable[str]) -> None:
        """Remove recorded hyperparameters by name, such as those that a base class recorded."""
        for name in ignore_list:
            self.hparams.pop(name, None)

    @property
    def hparams_container(self) -> tuple[str, bool] | None:
        """The argument of ``__init__`` that held all hyperparameters, and whether it was a ``Namespace``; or None."""
        kept: tuple[str, bool] | None = self.__dict__.get("_hparams_container")
        return kept

    @property
    def hparams_at_default(self) -> list[str]:
        """The names of the hyperparameters that are the defaults of ``__init__``."""
        parameters = inspect.signature(type(self).__init__).parameters
        return [
            name for name, value in self.hparams.items() if name in parameters and value is parameters[name].default
        ]

    @property
    def hparams_to_log(self) -> dict[str, Any]:
        """The hyperparameters that are sent to the loggers."""
        return dict(self.hparams) if self.__dict__.get("_log_hparams", False) else {}


def _items_of(given: Any) -> dict[str, Any]:
    """Return the items of a mapping or a ``Namespace``.

    Raises:
        ConfigurationError: it is neither.
    """
    items = vars(given) if isinstance(given, Namespace) else given
    if not isinstance(items, Mapping):
        raise ConfigurationError(f"save_hyperparameters got {a_type(items)}; it takes names, a dict or a Namespace.")
    return dict(items)


def _chosen(found: dict[str, Any], names: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of these names; all without names.

    Raises:
        ConfigurationError: a name is not that of an argument.
    """
    for name in names:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"save_hyperparameters got {len(names)} values, of which one is {a_type(name)}; it takes "
                "names of arguments, or one dict or Namespace: put the values into a dict."
            )
        if name not in found:
            raise ConfigurationError(
                f"save_hyperparameters({name!r}): __init__ has no such argument."
                f"{did_you_mean(name, found)} It has: {', '.join(sorted(found)) or 'none'}."
            )
    return {name: value for name, value in found.items() if not names or name in names}


def _missing(name: str, known: Mapping[str, Any]) -> str:
    """Return the sentence for a hyperparameter that was not recorded."""
    if not known:
        return (
            f"there is no hyperparameter {name!r}, since none were saved: call self.save_hyperparameters() in "
            "__init__, after super().__init__()."
        )
    return (
        f"there is no hyperparameter {name!r} among those that save_hyperparameters recorded."
        f"{closest_or_known(name, sorted(known))}"
    )


def _init_arguments(instance: Any, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments of the chain of ``__init__`` frames of ``instance``; the outermost class wins.

    Of a dataclass whose ``__post_init__`` is in the chain they are the values of its fields: its ``__init__`` has
    placeholders for those with a ``default_factory``.
    """
    arguments: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name in ("__init__", "__post_init__"):
        names, _, keywords, values = inspect.getargvalues(frame)
        if not names or values.get(names[0]) is not instance:
            break
        arguments.update({name: values[name] for name in names[1:]})
        arguments.update(values.get(keywords, {}) if keywords else {})
        if frame.f_code.co_name == "__post_init__":
            declared: Any = type(instance)
            arguments.update({each.name: getattr(instance, each.name) for each in fields(declared) if each.init})
            frame = frame.f_back
        frame = None if frame is None else outside(frame.f_back)
    return arguments
