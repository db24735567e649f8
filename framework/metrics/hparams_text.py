"""The hyperparameters of a run for its loggers, as plain values for YAML files and TensorBoard's table."""

from __future__ import annotations

import json
import math
import reprlib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError
from ..core.hyperparameters import HyperparametersMixin
from ..core.plain_yaml import is_plain_yaml
from ..system.redaction import without_secrets


def as_mapping(params: Any) -> dict[str, Any]:
    """Return the hyperparameters in a mapping, a ``Namespace`` or a dataclass as a dict; None is empty.

    Secret values are masked.
    """
    if params is None:
        return {}
    if isinstance(params, Namespace):
        return without_secrets(vars(params))
    if is_dataclass(params) and not isinstance(params, type):
        return without_secrets(asdict(params))
    return without_secrets({str(key): value for key, value in dict(params).items()})


def hyperparameters_to_log(module: HyperparametersMixin, datamodule: HyperparametersMixin | None) -> dict[str, Any]:
    """Return the hyperparameters of a module and of its data module that are sent to the loggers.

    Secret values are masked.

    Raises:
        ConfigurationError: both have a hyperparameter of the same name, with different values.
    """
    given, more = module.hparams_to_log, {} if datamodule is None else datamodule.hparams_to_log
    for name in given.keys() & more.keys():
        if not _are_equal(given[name], more[name]):
            one, other = (reprlib.repr(without_secrets({name: values[name]})[name]) for values in (given, more))
            raise ConfigurationError(
                f"the hyperparameter {name!r} is {one} in {type(module).__name__} and {other} in "
                f"{type(datamodule).__name__}, and a logger records one value: rename it in one of them, or leave it "
                "out there with save_hyperparameters(ignore=...)."
            )
    return without_secrets({**given, **more})


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        # For example arrays, whose comparison has several elements.
        return False


def flattened(params: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Flatten nested hyperparameters, with ``/`` between the names; values other than scalars become text."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping | Namespace):
            flat.update(flattened(as_mapping(value), f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def as_yaml(params: Mapping[str, Any]) -> str:
    """Return YAML with one line for each hyperparameter; values that YAML cannot represent are written as their
    ``str``."""
    return "".join(f"{_key(str(key))}: {_flow(value)}\n" for key, value in params.items()) or "{}\n"


def _key(key: str) -> str:
    return key if is_plain_yaml(key) else json.dumps(key, ensure_ascii=False)


def _flow(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _float(float(value))
    if isinstance(value, Mapping | Namespace):
        return "{" + ", ".join(f"{_key(str(k))}: {_flow(v)}" for k, v in as_mapping(value).items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False)


def _float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # YAML 1.1 reads "1e-05" as a string; a number needs the decimal point.
    return text.replace("e", ".0e") if "e" in text and "." not in text else text
