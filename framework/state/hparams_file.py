"""Hyperparameters in a YAML or CSV file, as loggers write them, for a checkpoint without hyperparameters."""

from __future__ import annotations

import ast
import csv
from pathlib import Path
from typing import Any

from ..core.errors import ConfigurationError
from ..core.wording import a_type


def read_hparams(path: str | Path) -> dict[str, Any]:
    """Return the hyperparameters in a ``.yaml`` or ``.yml`` file, or in a ``.csv`` file with columns key and value.

    No Python objects are constructed. Values of a CSV file are Python literals; others are strings.

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
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{given} cannot be read: {type(error).__name__}: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{given} holds {a_type(found)}, but must hold a mapping of names to values.")
    return {str(name): value for name, value in found.items()}


def _from_yaml(path: Path) -> Any:
    # Not a dependency of phalanx: only this file format needs it.
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _from_csv(path: Path) -> dict[str, Any]:
    with path.open(newline="", encoding="utf-8") as file:
        return {row["key"]: _literal(row["value"]) for row in csv.DictReader(file)}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
