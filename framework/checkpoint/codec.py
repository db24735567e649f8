"""Lossless encoding of nested state as strict JSON and a flat dict of tensors.

Types of JSON are written directly: None, bool, str, int, finite float, list, and dict with string keys. Any other value
becomes an object with the key ``"$"``, which names its kind. Tensors are stored in a separate dict under their path
(``"callbacks/0/weights"``), except that a 0-d CPU tensor becomes its exact value, so that step counters stay readable
numbers.

Decoding looks kinds up in a fixed table: nothing is imported or called by a name that came from a file.

Not stored: a tensor's device, ``requires_grad`` and strides; the factory of a ``defaultdict`` that is not a builtin
type (it is decoded as a dict); the bits of a NaN.
"""

from __future__ import annotations

import base64
import datetime
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from .codec_encoder import DTYPES, FACTORIES, MAPPINGS, MAX_DEPTH, NUMPY, PATHS, TAG, Encoder, at
from .manifest import JSON


def encode(state: Any) -> tuple[JSON, dict[str, Tensor]]:
    """Encode nested state as ``(document, tensors)``; ``decode`` is the exact inverse. Tensors are not copied.

    Raises:
        ConfigurationError: a value in the state has an unsupported type; the message gives its path.
    """
    tensors: dict[str, Tensor] = {}
    return Encoder(tensors).value(state, ()), tensors


def encode_inline(state: Any) -> JSON:
    """Encode nested state as a single document that contains the tensors (base64). For small states, such as random
    generators. Raises as ``encode``."""
    return Encoder(None).value(state, ())


def decode(document: JSON, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Decode ``(document, tensors)`` to the state that was passed to ``encode`` or ``encode_inline``.

    Raises:
        CheckpointError: the document is not one that ``encode`` writes, or a tensor is missing.
    """
    return _Decoder(tensors or {}).value(document, ())


class _Decoder:
    """Decodes one document."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def value(self, value: JSON, path: tuple[str, ...]) -> Any:
        if len(path) > 2 * MAX_DEPTH:
            raise CheckpointError(f"document{at(path[:5])}... is nested too deep; the checkpoint is damaged.")
        if isinstance(value, list):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        try:
            return self.tagged(value[TAG], value, path)
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"document{at(path)} is not a value that phalanx writes ({type(error).__name__}: {error});"
                " the checkpoint is damaged or of a newer version."
            ) from error

    def tagged(self, kind: str, value: dict[str, JSON], path: tuple[str, ...]) -> Any:
        if kind in ("tuple", "size", "set", "frozenset"):
            build: dict[str, Any] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
            return build[kind](self.value(value["items"], path))
        if kind in MAPPINGS or kind == "defaultdict":
            return self.mapping(kind, value, path)
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(self.bytes(value))
        if kind == "tensor":
            return self.tensors[value["key"]]
        if kind == "scalar":
            return torch.tensor(_number(self.value(value["value"], path)), dtype=DTYPES[value["dtype"]])
        if kind == "array":
            return self.array(value, path)
        if kind == "numpy":
            import numpy

            return numpy.dtype(_known(value["dtype"], NUMPY)).type(_number(self.value(value["value"], path)))
        if kind == "complex":
            real, imaginary = self.value(value["value"], path)
            return complex(real, imaginary)
        return _READERS[kind](value)

    def mapping(self, kind: str, value: dict[str, JSON], path: tuple[str, ...]) -> dict[Any, Any]:
        pairs = [(self.value(key, path), self.value(item, path)) for key, item in value["items"]]
        if kind != "defaultdict":
            # Counter(pairs) would count the pairs.
            return MAPPINGS[kind](dict(pairs))
        factory = value["factory"]
        return defaultdict(None if factory is None else FACTORIES[factory], pairs)

    def bytes(self, value: dict[str, JSON]) -> bytes:
        if "tensor" in value:
            return self.tensors[value["tensor"]].numpy().tobytes()
        return base64.b64decode(value["base64"], validate=True)

    def array(self, value: dict[str, JSON], path: tuple[str, ...]) -> Any:
        array = self.value(value["value"], path).numpy()
        if array.dtype.name != value["dtype"]:
            raise ValueError(f"dtype {array.dtype} where {value['dtype']!r} is recorded")
        return array


def _known(name: str, names: list[str]) -> str:
    if name not in names:
        raise ValueError(f"{name!r} is not one of {', '.join(names)}")
    return name


def _read_inline(value: dict[str, JSON]) -> Tensor:
    data = bytearray(base64.b64decode(value["base64"], validate=True))
    dtype, shape = DTYPES[value["dtype"]], value["shape"]
    # Checked before memory is allocated: the number of bytes is already known.
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data):,} bytes are not a {dtype} tensor of shape {shape}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _number(value: Any) -> Any:
    if type(value) not in (bool, int, float, complex):
        raise TypeError(f"{type(value).__name__} where a number belongs")
    return value


_READERS: dict[str, Callable[[dict[str, JSON]], Any]] = {
    "int": lambda value: int(value["value"], 16),
    "float": lambda value: float(_known(value["value"], ["nan", "inf", "-inf"])),
    "dtype": lambda value: DTYPES[value["value"]],
    "device": lambda value: torch.device(value["value"]),
    "range": lambda value: range(*value["value"]),
    "datetime": lambda value: datetime.datetime.fromisoformat(value["value"]),
    "date": lambda value: datetime.date.fromisoformat(value["value"]),
    "timedelta": lambda value: datetime.timedelta(*value["value"]),
    "path": lambda value: PATHS[value["type"]](value["value"]),
    "inline": _read_inline,
}
