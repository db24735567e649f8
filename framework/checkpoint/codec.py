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
import pathlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CheckpointError, ConfigurationError
from .manifest import JSON

TAG = "$"
# Each level takes five Python frames, and the caller's stack is already deep.
MAX_DEPTH = 64
_SMALL_BYTES = 4096
_INT64 = 1 << 63

FACTORIES: dict[str, type] = {
    factory.__name__: factory for factory in (bool, int, float, str, bytes, list, tuple, dict, set)
}
PATHS: dict[str, type[pathlib.PurePath]] = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
# numpy kinds: bool, signed, unsigned, float, complex; by name, so that a file cannot ask for object arrays.
NUMPY = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


def encode(state: Any) -> tuple[JSON, dict[str, Tensor]]:
    """Encode nested state as ``(document, tensors)``; ``decode`` is the exact inverse. Tensors are not copied.

    Raises:
        ConfigurationError: a value in the state has an unsupported type; the message gives its path.
    """
    tensors: dict[str, Tensor] = {}
    return _Encoder(tensors).value(state, ()), tensors


def encode_inline(state: Any) -> JSON:
    """Encode nested state as a single document that contains the tensors (base64). For small states, such as random
    generators. Raises as ``encode``."""
    return _Encoder(None).value(state, ())


def decode(document: JSON, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Decode ``(document, tensors)`` to the state that was passed to ``encode`` or ``encode_inline``.

    Raises:
        CheckpointError: the document is not one that ``encode`` writes, or a tensor is missing.
    """
    return _Decoder(tensors or {}).value(document, ())


# ---- encoding -------------------------------------------------------------------------------------------------------


class _Encoder:
    """Encodes one state. If ``tensors`` is ``None``, tensors are written into the document."""

    def __init__(self, tensors: dict[str, Tensor] | None) -> None:
        self.tensors = tensors
        self.open: set[int] = set()

    def value(self, value: Any, path: tuple[str, ...]) -> JSON:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -_INT64 <= value < _INT64 else {TAG: "int", "value": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
        if isinstance(value, Tensor):
            return self.tensor(value, path)
        writer = _LEAVES.get(kind)
        if kind is datetime.datetime and type(value.tzinfo) not in (type(None), datetime.timezone):
            raise _refused(value, path)
        if writer is not None:
            return writer(value)
        if kind in (bytes, bytearray):
            return self.bytes(value, path)
        return self.container(value, path)

    def container(self, value: Any, path: tuple[str, ...]) -> JSON:
        if id(value) in self.open:
            raise ConfigurationError(f"state{at(path)} contains itself; save a state without cycles.")
        if len(path) > MAX_DEPTH:
            raise ConfigurationError(f"state{at(path[:5])}... is nested over {MAX_DEPTH} levels; flatten it.")
        self.open.add(id(value))
        try:
            return self.opened(value, path)
        finally:
            self.open.discard(id(value))

    def opened(self, value: Any, path: tuple[str, ...]) -> JSON:
        kind = type(value)
        if kind is list:
            return self.items(value, path)
        if kind is dict and all(type(key) is str for key in value) and TAG not in value:
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self.mapping(value, path)
        if kind in (tuple, torch.Size):
            return {TAG: "tuple" if kind is tuple else "size", "items": self.items(value, path)}
        if kind in (set, frozenset):
            # The order of a set differs between processes; the document must not.
            return {TAG: kind.__name__, "items": sorted(self.items(value, path), key=repr)}
        if kind.__module__ == "numpy":
            return self.numpy(value, path)
        raise _refused(value, path)

    def items(self, values: Any, path: tuple[str, ...]) -> list[JSON]:
        return [self.value(item, (*path, str(index))) for index, item in enumerate(values)]

    def mapping(self, value: dict[Any, Any], path: tuple[str, ...]) -> JSON:
        items = []
        for key, item in value.items():
            inside = (*path, str(key))
            items.append([self.value(key, inside), self.value(item, inside)])
        if type(value) is not defaultdict:
            return {TAG: type(value).__name__, "items": items}
        factory = getattr(value.default_factory, "__name__", "")
        if value.default_factory is not None and FACTORIES.get(factory) is not value.default_factory:
            return {TAG: "dict", "items": items}
        return {TAG: "defaultdict", "factory": factory or None, "items": items}

    def bytes(self, value: bytes | bytearray, path: tuple[str, ...]) -> JSON:
        name = type(value).__name__
        if self.tensors is None or len(value) <= _SMALL_BYTES:
            return {TAG: name, "base64": base64.b64encode(value).decode("ascii")}
        # From a bytearray, since torch warns about read-only memory.
        tensor = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return {TAG: name, "tensor": self.place(tensor, path)}

    def tensor(self, value: Tensor, path: tuple[str, ...]) -> JSON:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise _refused(value, path)
        if value.is_meta or value.is_quantized:
            raise _refused(value, path)
        value = value.detach()
        if value.dim() == 0 and value.device.type == "cpu":
            number = value.item()
            return {TAG: "scalar", "dtype": _dtype_name(value.dtype), "value": self.value(number, path)}
        if self.tensors is None:
            return {TAG: "inline", **_inline(value)}
        return {TAG: "tensor", "key": self.place(value, path)}

    def numpy(self, value: Any, path: tuple[str, ...]) -> JSON:
        import numpy

        name = value.dtype.name if isinstance(value, numpy.generic | numpy.ndarray) else ""
        if name not in NUMPY or not value.dtype.isnative:
            raise _refused(value, path)
        if isinstance(value, numpy.generic):
            return {TAG: "numpy", "dtype": name, "value": self.value(value.item(), path)}
        # Copied: torch warns about read-only arrays, and the caller may change the array before it is saved.
        tensor = torch.from_numpy(numpy.array(value, order="C"))
        return {TAG: "array", "dtype": name, "value": self.tensor(tensor, path)}

    def place(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        assert self.tensors is not None
        name = key = "/".join(path) or "value"
        number = 1
        while key in self.tensors:
            number += 1
            key = f"{name}~{number}"
        self.tensors[key] = tensor
        return key


def _path(value: pathlib.PurePath) -> JSON:
    name = "Path" if isinstance(value, pathlib.Path) else type(value).__name__
    return {TAG: "path", "type": name, "value": str(value)}


_LEAVES: dict[type, Callable[[Any], JSON]] = {
    complex: lambda value: {TAG: "complex", "value": _Encoder(None).items((value.real, value.imag), ())},
    torch.dtype: lambda value: {TAG: "dtype", "value": _dtype_name(value)},
    torch.device: lambda value: {TAG: "device", "value": str(value)},
    range: lambda value: {TAG: "range", "value": [value.start, value.stop, value.step]},
    datetime.datetime: lambda value: {TAG: "datetime", "value": value.isoformat()},
    datetime.date: lambda value: {TAG: "date", "value": value.isoformat()},
    datetime.timedelta: lambda value: {
        TAG: "timedelta",
        "value": [value.days, value.seconds, value.microseconds],
    },
    pathlib.PosixPath: _path,
    pathlib.WindowsPath: _path,
    pathlib.PurePosixPath: _path,
    pathlib.PureWindowsPath: _path,
}


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigurationError(f"tensors of {dtype} cannot be stored in a checkpoint; convert them first.")
    return name


def _inline(value: Tensor) -> dict[str, JSON]:
    data = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": _dtype_name(value.dtype),
        "shape": list(value.shape),
        "base64": base64.b64encode(data.numpy().tobytes()).decode("ascii"),
    }


def at(path: tuple[str, ...]) -> str:
    """Format a path in nested state, for messages."""
    return "".join(f"[{part!r}]" for part in path)


def _refused(value: Any, path: tuple[str, ...]) -> ConfigurationError:
    kind = type(value)
    detail = f" (with the zone {value.tzinfo!r})" if kind is datetime.datetime else ""
    if isinstance(value, Tensor):
        detail = f" (layout {value.layout}, dtype {value.dtype}, device {value.device})"
    return ConfigurationError(
        f"state{at(path)} is a {kind.__module__}.{kind.__qualname__}{detail}, which a checkpoint cannot store:"
        " nothing in it is pickled. Return plain values from state_dict (numbers, strings, lists, dicts, dense"
        " tensors) and rebuild the object in load_state_dict; for an enum its .value, for a named tuple or dataclass"
        " a dict."
    )


# ---- decoding -------------------------------------------------------------------------------------------------------


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
