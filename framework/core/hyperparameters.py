"""Hyperparameters: the arguments that an object was built with, recorded so that it can be rebuilt."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from .errors import ConfigurationError, UnknownNameError, closest_or_known, did_you_mean


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

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of ``__init__`` as ``self.hparams``. Call it inside ``__init__``.

        Args:
            args: names of the arguments to keep (default: all), or one mapping or ``Namespace`` to keep as it is.
            ignore: names to leave out.
            frame: the frame of ``__init__``, where it is not the caller's.
            logger: whether they are sent to the loggers.

        Raises:
            ConfigurationError: a name is not an argument of ``__init__``.
        """
        if len(args) == 1 and not isinstance(args[0], str):
            given = vars(args[0]) if isinstance(args[0], Namespace) else args[0]
            if not isinstance(given, Mapping):
                raise ConfigurationError(
                    f"save_hyperparameters got a {type(given).__name__}; it takes names, a dict or a Namespace."
                )
            found = dict(given)
        else:
            current = frame or inspect.currentframe()
            found = _init_arguments(self, current if frame else current.f_back if current else None)
            for name in args:
                if name not in found:
                    raise ConfigurationError(
                        f"save_hyperparameters({name!r}): __init__ has no such argument."
                        f"{did_you_mean(name, found)} It has: {', '.join(sorted(found)) or 'none'}."
                    )
            found = {name: value for name, value in found.items() if not args or name in args}
        skipped = {ignore} if isinstance(ignore, str) else set(ignore or ())
        kept = {name: value for name, value in found.items() if name not in skipped}
        # Called before ``nn.Module.__init__``, and perhaps in a class with a ``__setattr__`` of its own.
        object.__setattr__(self, "_hparams", AttributeDict({**self.hparams, **kept}))
        object.__setattr__(self, "_log_hparams", logger)

    @property
    def hparams(self) -> AttributeDict:
        """The recorded hyperparameters; empty before ``save_hyperparameters``."""
        if "_hparams" not in self.__dict__:
            object.__setattr__(self, "_hparams", AttributeDict())
        kept: AttributeDict = self.__dict__["_hparams"]
        return kept

    @property
    def hparams_to_log(self) -> dict[str, Any]:
        """The hyperparameters that are sent to the loggers."""
        return dict(self.hparams) if self.__dict__.get("_log_hparams", False) else {}


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
    """Return the arguments of the chain of ``__init__`` frames of ``instance``; the outermost class wins."""
    arguments: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        names, _, keywords, values = inspect.getargvalues(frame)
        if not names or values.get(names[0]) is not instance:
            break
        arguments.update({name: values[name] for name in names[1:]})
        arguments.update(values.get(keywords, {}) if keywords else {})
        frame = frame.f_back
    return arguments
