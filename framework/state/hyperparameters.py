"""The hyperparameters of a module in a checkpoint, and in the YAML or CSV file of a logger.

A checkpoint holds the names of hyperparameters that are classes, and only classes that are imported are found again.
Nothing is imported because of a file. As a module's constructor may call what it is given, only modules, optimizers and
schedulers are looked up by name; any other class must be the default of its argument.
"""

from __future__ import annotations

import ast
import csv
import sys
from collections.abc import Mapping
from inspect import Parameter, getattr_static
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint.codec import encode_inline
from ..checkpoint.manifest import JSON
from ..core.errors import ConfigurationError
from ..core.wording import a_type
from ..system.redaction import holds_secret

_KINDS = (nn.Module, Optimizer, LRScheduler)


def encode_known(hparams: Mapping[str, Any]) -> tuple[JSON, list[str]]:
    """Encode the hyperparameters that a checkpoint can hold; return them and the names of the others.

    Secret values are not encoded. Classes are left to ``class_names``.
    """
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in hparams.items():
        if holds_secret(name, value):
            unknown.append(name)
            continue
        if is_named_class(value):
            continue
        try:
            encode_inline({name: value})
            known[name] = value
        except ConfigurationError:
            unknown.append(name)
    return encode_inline(known), unknown


# ---- classes --------------------------------------------------------------------------------------------------------


def is_named_class(value: Any) -> bool:
    """Return whether a hyperparameter is a class that its name identifies."""
    return isinstance(value, type) and issubclass(value, _KINDS) and "<" not in value.__qualname__


def class_names(hparams: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the hyperparameters that are classes, as ``"package.module:Class"``."""
    return {name: _name(value) for name, value in hparams.items() if isinstance(value, type)}


def imported_classes(names: Any, parameters: Mapping[str, Parameter]) -> dict[str, type]:
    """Return the classes of ``class_names`` that this process has imported, or that are the default of their argument.

    Args:
        names: the names in a checkpoint.
        parameters: the parameters of the constructor that takes them.
    """
    found: dict[str, type] = {}
    for argument, name in names.items() if isinstance(names, dict) else ():
        default = parameters[argument].default if argument in parameters else None
        if isinstance(default, type) and name == _name(default):
            found[argument] = default
        elif isinstance(name, str) and (kind := _imported(name)) is not None:
            found[argument] = kind
    return found


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _imported(name: str) -> type | None:
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr, which may import a module or run a property.
        value = getattr_static(value, part, None)
    return value if is_named_class(value) and _name(value) == name else None


# ---- files ----------------------------------------------------------------------------------------------------------


def read_hparams(path: str | Path) -> dict[str, Any]:
    """Return the hyperparameters in a ``.yaml`` or ``.yml`` file, or in a ``.csv`` file with columns key and value.

    No Python objects are constructed. CSV values are parsed as Python literals; a value that is not a literal stays a
    string.

    Raises:
        ConfigurationError: the file does not exist, cannot be read, or has another format.
    """
    given, path = f"hparams_file={str(path)!r}", Path(path)
    if not path.is_file():
        raise ConfigurationError(f"{given} does not exist; give a .yaml or .csv file.")
    kind = path.suffix.lower()
    if kind not in (".yaml", ".yml", ".csv"):
        raise ConfigurationError(f"{given} must be a .yaml, .yml or .csv file.")
    try:
        found = _from_csv(path) if kind == ".csv" else _from_yaml(path)
    except ImportError:
        raise ConfigurationError(
            f"{given} is read with PyYAML, which is not installed: install it, or pass the hyperparameters as "
            "arguments of load_from_checkpoint."
        ) from None
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigurationError(f"{given} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{given} holds {a_type(found)}, but must hold a mapping of names to values.")
    return {str(name): value for name, value in found.items()}


def _from_yaml(path: Path) -> Any:
    # Not a dependency of phalanx: only this file format needs it.
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    # An empty file, as a logger writes it of no hyperparameters.
    return {} if found is None else found


def _from_csv(path: Path) -> dict[str, Any]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        columns = list(rows.fieldnames or ())
        if not {"key", "value"} <= set(columns):
            raise ValueError(
                f"the first line must name the columns key and value, and names {', '.join(columns) or 'none'}"
            )
        return {row["key"]: _literal(row["value"] or "") for row in rows}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text
