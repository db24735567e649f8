"""``TrainerArgumentParser``: the arguments of modules, data modules, Trainers and optimizers, on jsonargparse."""

from __future__ import annotations

import inspect
import json
import re
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..api.callback import Callback
from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError
from ..core.intervals import parse_duration
from ..metrics.logger import Logger
from ..trainer.trainer import Trainer
from .class_paths import PLUGINS, load_plugins, plugins, translate
from .optimizers import ReduceLROnPlateau
from .refusals import refusal

try:
    import jsonargparse
    import yaml
    from jsonargparse import (  # type: ignore[attr-defined]
        ActionConfigFile,
        ArgumentParser,
        Namespace as Namespace,
        class_from_function,
        get_loader,
        set_dumper,
        set_loader,
    )
    from jsonargparse.typing import register_type
except ImportError as error:
    raise ConfigurationError(f"Configuring needs {error.name}: pip install 'jsonargparse[signatures]>=4.49'.") from None

_MODE = "phalanx"
_DESCRIPTION = "Create a model, its data and a Trainer from configuration files and arguments, and run a stage."
_LIBRARIES = (__file__, str(Path(jsonargparse.__file__).parent))
_Duration = timedelta | dict[str, float] | str
_PRINTED = re.compile(r"(?:(?P<days>\d+) days?, )?(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+(?:\.\d+)?)")
# The types of a Trainer's arguments in a configuration, where its own signature accepts more.
_TYPES: dict[str, Any] = {
    "callbacks": Sequence[Callback] | Callback | None,
    "logger": Sequence[Logger] | Logger | bool | None,
    "max_time": _Duration | None,
    "time_limit_margin": _Duration,
    "val_check_interval": int | float | _Duration | None,
}


class TrainerArgumentParser(ArgumentParser):
    """A parser of jsonargparse for the parts of a program: YAML in which Lightning's class paths are those of phalanx.

    Args:
        arguments: those of jsonargparse's ``ArgumentParser``.
        description: shown by ``--help``.
        env_prefix: the first part of the names of environment variables.
        default_env: whether arguments are read from environment variables, such as ``PHALANX_TRAINER__MAX_EPOCHS``.
        options: further arguments of jsonargparse's ``ArgumentParser``.
    """

    def __init__(
        self,
        *arguments: Any,
        description: str = _DESCRIPTION,
        env_prefix: str = "PHALANX",
        default_env: bool = False,
        **options: Any,
    ) -> None:
        settings = {"exit_on_error": False, "allow_abbrev": False, "parser_mode": _MODE, **options}
        super().__init__(
            *arguments, description=description, env_prefix=env_prefix, default_env=default_env, **settings
        )
        self.callback_keys: list[str] = []
        """The keys of callbacks that were added with ``add_component_args``."""
        self.optimizer_keys: dict[str, str] = {}
        """The keys of optimizers, and what each is linked to: ``"AUTOMATIC"`` or an argument."""
        self.lr_scheduler_keys: dict[str, str] = {}
        """The same for schedulers."""
        self._class_paths: dict[str, str] = {}

    def add_component_args(
        self, component: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a Trainer, a module, a data module or a callback under a key.

        Args:
            component: the class, or a function that is annotated with the class of its result.
            nested_key: the key.
            subclass_mode: whether the configuration names the class, which may be a subclass, by ``class_path``.
            required: whether the key must be given; for ``subclass_mode``.

        Returns:
            The names of the arguments.

        Raises:
            ConfigurationError: the class is not one of these.
        """
        kind = component if isinstance(component, type) else class_from_function(component)
        if not issubclass(kind, (Trainer, TrainModule, DataModule, Callback)):
            raise ConfigurationError(
                f"{component!r} was given for {nested_key!r}: give the class of a Trainer, TrainModule, DataModule or "
                "Callback, or a function that is annotated to return one."
            )
        if issubclass(kind, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return list(self.add_subclass_arguments(kind, nested_key, fail_untyped=False, required=required) or [])
        if issubclass(kind, Trainer):
            return self._add_trainer(kind, nested_key)
        return list(self.add_class_arguments(kind, nested_key, fail_untyped=False, sub_configs=True))

    # Lightning's name.
    add_lightning_class_args = add_component_args

    def _add_trainer(self, kind: type[Trainer], nested_key: str) -> list[str]:
        load_plugins()
        own = {name: each for name, each in inspect.signature(kind).parameters.items() if name in _TYPES}
        names = self.add_class_arguments(
            kind, nested_key, instantiate=False, fail_untyped=False, sub_configs=True, skip=set(own)
        )
        for name, parameter in own.items():
            self.add_argument(f"--{nested_key}.{name}", type=_TYPES[name], default=parameter.default)
        return [*names, *own]

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: the class; in a tuple, any subclass can be given by ``class_path``.
            nested_key: the key.
            link_to: an argument that receives ``class_path`` and ``init_args``; ``"AUTOMATIC"`` makes
                ``configure_optimizers`` of the module return the optimizer.
        """
        self._add_class(optimizer_class, nested_key, skipped="params")
        self.optimizer_keys[nested_key] = link_to

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: type[LRScheduler] | tuple[type[LRScheduler], ...] = (ReduceLROnPlateau, LRScheduler),
        nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of a learning rate scheduler, as ``add_optimizer_args`` does those of an optimizer.

        A name without a module is looked up in the classes of a tuple one after the other.
        """
        self._add_class(lr_scheduler_class, nested_key, skipped="optimizer")
        self.lr_scheduler_keys[nested_key] = link_to

    def _add_class(self, kind: Any, nested_key: str, skipped: str) -> None:
        options: Any = {"instantiate": False, "fail_untyped": False, "skip": {skipped}}
        if isinstance(kind, tuple):
            self.add_subclass_arguments(kind, nested_key, **options)
        else:
            self.add_class_arguments(kind, nested_key, sub_configs=True, **options)
            self._class_paths[nested_key] = f"{kind.__module__}.{kind.__qualname__}"

    def link_optimizers(self) -> None:
        """Link the optimizers and schedulers that were added with an argument to link to."""
        for key, target in {**self.optimizer_keys, **self.lr_scheduler_keys}.items():
            if target == "AUTOMATIC":
                continue
            if (path := self._class_paths.get(key)) is None:
                self.link_arguments(key, target)
            else:
                self.link_arguments(key, target, compute_fn=lambda given, path=path: _class_spec(path, given))

    def class_spec(self, key: str, given: Any) -> dict[str, Any] | None:
        """Return ``class_path`` and ``init_args`` of an optimizer or a scheduler in a configuration, or None."""
        if (path := self._class_paths.get(key)) is not None:
            return _class_spec(path, given)
        return None if given is None else _plain(given)

    def text_of(self, config: Namespace) -> str:
        """Return a configuration as YAML, which can be read again."""
        return str(self.dump(config, format="yaml", skip_unset=False))


def create_parser(kind: type[Any] | None, **options: Any) -> TrainerArgumentParser:
    """Return a parser with an option for configuration files.

    Args:
        kind: the class of the parser; None for ``TrainerArgumentParser``.
        options: the arguments of the class.
    """
    parser: TrainerArgumentParser = (kind or TrainerArgumentParser)(**options)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="a file in YAML or JSON; may be repeated")
    return parser


def parse_configuration(
    parser: TrainerArgumentParser, given: Sequence[str] | Mapping[str, Any] | Namespace
) -> Namespace:
    """Parse arguments, or a configuration.

    Raises:
        ConfigurationError: an argument is unknown, or its value is not of its type.
    """
    try:
        parsed: Namespace
        if isinstance(given, Mapping):
            parsed = parser.parse_object(translate(dict(given)))
        elif isinstance(given, Namespace):
            parsed = parser.parse_object(given)
        else:
            parsed = parser.parse_args(_translated(given))
        return parsed
    except ArgumentError as error:
        raise refusal(error.message, parser) from None


def instantiate(parser: TrainerArgumentParser, config: Namespace) -> Namespace:
    """Return a configuration with the objects that it describes. Errors of their code lack jsonargparse's frames."""
    try:
        objects: Namespace = parser.instantiate(config)
        return objects
    except Exception as error:
        failure = _own_error(error)
    # Outside the handler, where the error that jsonargparse made of it would become its context.
    raise failure.with_traceback(_own_trace(failure))


def _own_error(error: BaseException) -> BaseException:
    """Return the error that the code of a class has raised, which jsonargparse may have made one about types of."""
    while error.__cause__ is not None and _own_trace(error) is None:
        error = error.__cause__
    return error


def _own_trace(error: BaseException) -> TracebackType | None:
    """Return the part of a traceback below jsonargparse's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
        trace = trace.tb_next
    return trace


def _translated(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which plug-ins that are given by name are class paths, in one word or in two."""
    translated, option = [], ""
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if argument.startswith("--") and separator:
            translated.append(f"{name}={_translated_value(name, value)}")
        else:
            translated.append(_translated_value(option, argument))
        option = argument if argument.startswith("--") else ""
    return translated


def _translated_value(option: str, text: str) -> str:
    registry = PLUGINS.get(option.removeprefix("--trainer.").removesuffix("+")) if "trainer." in option else None
    structured = text.startswith(("{", "["))
    try:
        before = get_loader("yaml")(text) if structured else text
    except yaml.YAMLError:
        # A string that begins with a bracket, or a mistake: the type of the argument decides.
        return text
    after = translate(before) if registry is None else plugins(translate(before), registry)
    if after == before:
        return text
    if isinstance(after, dict) and not structured and not after["init_args"]:
        # Alone, the name can be followed by arguments of the class.
        after = after["class_path"]
    return after if isinstance(after, str) else json.dumps(after)


def _class_spec(path: str, given: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": _plain(given) or {}}


def _plain(given: Any) -> Any:
    return given.as_dict() if isinstance(given, Namespace) else given


def _load(text: str) -> Any:
    return translate(get_loader("yaml")(text))


def _dump(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def _duration_of(text: str) -> timedelta:
    """Return the duration that a text describes, as a Trainer takes it, or as Python prints one.

    Raises:
        ValueError: the text is of neither form.
    """
    if match := _PRINTED.fullmatch(text):
        return timedelta(**{unit: float(number) for unit, number in match.groupdict(default="0").items()})
    return parse_duration(text, "duration")


set_loader(_MODE, _load, exceptions=(yaml.YAMLError,))
set_dumper(_MODE, _dump)
# jsonargparse's own function takes the first three numbers of DD:HH:MM:SS for hours, minutes and seconds.
register_type(timedelta, deserializer=_duration_of)
