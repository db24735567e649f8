"""Class paths in configurations: short names of phalanx's plug-ins, and Lightning's classes that phalanx has too."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..core.errors import ConfigurationError
from ..core.registry import CALLBACKS, LOGGERS, Registry
from ..trainer.plugins import default_arguments

_ALIASES = f"{__name__.partition('.framework')[0]}.compat.lightning"
_LIGHTNING = ("lightning", "pytorch_lightning")
# The arguments of a Trainer that take plug-ins by name.
PLUGINS = {"callbacks": CALLBACKS, "logger": LOGGERS}


def load_plugins() -> None:
    """Import the callbacks and loggers of phalanx, so that a configuration can name their classes without a module."""
    for registry in PLUGINS.values():
        for name in registry:
            registry.load(name)


def translate(tree: Any) -> Any:
    """Return a configuration in which class paths are those of phalanx, and names of plug-ins are class paths.

    Args:
        tree: the content of a configuration file, or a part of it.

    Raises:
        ConfigurationError: phalanx has no counterpart of a class of Lightning.
    """
    if isinstance(tree, list):
        return [translate(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    translated = {key: translate(value) for key, value in tree.items()}
    if isinstance(path := translated.get("class_path"), str):
        translated["class_path"] = own_class_path(path)
    if isinstance(section := translated.get("trainer"), dict):
        named = {name: plugins(value, PLUGINS[name]) for name, value in section.items() if name in PLUGINS}
        translated["trainer"] = {**section, **named}
    return translated


def plugins(given: Any, registry: Registry) -> Any:
    """Return the plug-ins that a configuration gives for an argument, with those given by name as class paths."""
    if isinstance(given, list):
        return [plugins(each, registry) for each in given]
    if isinstance(given, dict) and given.get("class_path") in set(registry):
        return {**given, "class_path": _path_of(registry.load(given["class_path"]))}
    if not isinstance(given, str):
        return given
    if given not in set(registry):
        return own_class_path(given)
    kind = registry.load(given)
    return {"class_path": _path_of(kind), "init_args": default_arguments(kind)}


def own_class_path(path: str) -> str:
    """Return a class path; for a class of Lightning that of its counterpart.

    Raises:
        ConfigurationError: phalanx has no counterpart.
    """
    first, _, rest = path.partition(".")
    if first not in _LIGHTNING or not rest:
        return path
    *modules, name = rest.removeprefix("pytorch.").split(".")
    # A class may be given by a module of Lightning that has no alias, below a package that has one.
    for end in range(len(modules), -1, -1):
        try:
            return _path_of(getattr(import_module(".".join([_ALIASES, *modules[:end]])), name))
        except (ModuleNotFoundError, AttributeError):
            continue
        except ImportError as error:
            raise ConfigurationError(f"class_path {path!r} has no counterpart: {_advice(str(error))}") from None
    raise ConfigurationError(f"class_path {path!r} has no counterpart in phalanx: leave it out, or write the class.")


def _path_of(kind: type[Any]) -> str:
    """Return the path of a class, which is its public one if there is one: ``phalanx.callbacks.EarlyStopping``."""
    public = ".".join(kind.__module__.split(".")[:2])
    if getattr(import_module(public), kind.__qualname__, None) is kind:
        return f"{public}.{kind.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _advice(message: str) -> str:
    """Return the advice in the message of an import that an alias refuses."""
    return message.partition(": ")[2] or message
