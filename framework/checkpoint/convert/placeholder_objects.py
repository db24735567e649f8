"""Inert placeholders for the classes that foreign checkpoints name, and their contents as plain values.

The unpickler is handed these in the place of the foreign classes, so nothing of a foreign library is imported or run.
Each keeps what it was given and does nothing with it.
"""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

Plain = Callable[["Placeholder"], Any]


class Placeholder:
    """Holds what a foreign object was built from."""

    foreign: ClassVar[str]
    plain: ClassVar[Plain]
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Placeholder:
        self = object.__new__(cls)
        self.arguments = arguments
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Left:
    """Marks a value that is left out."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Mapping:
    """Builds a plain dict: torch's unpickler fills no other kinds of mappings."""

    def __new__(cls, *arguments: Any) -> Any:
        return {}


def _argument(value: Placeholder) -> Any:
    return value.arguments[0]


def _attributes(value: Placeholder) -> Any:
    return dict(value.state) if isinstance(value.state, dict) else {}


def _path(value: Placeholder) -> Any:
    return pathlib.PurePosixPath(*[str(part) for part in value.arguments])


# What numpy calls the kinds that are plain numbers.
_NUMPY_KINDS = {"b1": "bool", **{f"{kind}{size}": f"{name}{8 * size}"
    for kind, name in (("i", "int"), ("u", "uint"), ("f", "float"), ("c", "complex"))
    for size in (1, 2, 4, 8, 16)}}  # fmt: skip


def _dtype(value: Any) -> Any:
    import numpy

    if not (isinstance(value, Placeholder) and value.foreign == "numpy.dtype"):
        raise ValueError("a numpy value without a dtype")
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "<"
    dtype = numpy.dtype(_NUMPY_KINDS[str(value.arguments[0])])
    return dtype.newbyteorder(">") if order == ">" else dtype


def _bytes(value: Any) -> bytes:
    return value.encode("latin-1") if isinstance(value, str) else bytes(value)


def _numpy_scalar(value: Placeholder) -> Any:
    import numpy

    dtype, data = value.arguments
    return numpy.frombuffer(_bytes(data), _dtype(dtype))[0].item()


def _numpy_array(value: Placeholder) -> Any:
    import numpy

    _, shape, dtype, fortran, data = value.state
    array = numpy.frombuffer(_bytes(data), _dtype(dtype)).reshape(shape, order="F" if fortran else "C")
    return numpy.array(array, dtype=array.dtype.newbyteorder("="), order="C")


_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
# Foreign name -> how a placeholder of it becomes a plain value.
_KNOWN: dict[str, Plain] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _attributes,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _argument,
    "deepspeed.utils.tensor_fragment.fragment_address": _attributes,
    "argparse.Namespace": _attributes,
    "lightning_fabric.utilities.types.AttributeDict": _attributes,
    "numpy.dtype": lambda value: str(value.arguments[0]),
    **{f"{module}.scalar": _numpy_scalar for module in _NUMPY},
    **{f"{module}._reconstruct": _numpy_array for module in _NUMPY},
    "numpy.ndarray": lambda value: None,
    **{f"{module}.{kind}Path": _path for module in ("pathlib", "pathlib._local") for kind in
       ("", "Pure", "Posix", "PurePosix", "Windows", "PureWindows")},
    "datetime.timedelta": lambda value: [*value.arguments],
}  # fmt: skip
_MAPPINGS = (
    "collections.defaultdict",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "phalanx.framework.core.hyperparameters.AttributeDict",
)
# Factories of a defaultdict. They are named, never called.
_FACTORIES = ("builtins.int", "builtins.float", "builtins.list", "builtins.dict", "builtins.str")


def allowed(leave_out: list[str]) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return the arguments of ``torch.serialization.safe_globals``: the closed list, and what is to be left out."""
    table: dict[str, Any] = {name: _kind(name, plain) for name, plain in _KNOWN.items()}
    table.update(dict.fromkeys(_MAPPINGS, _Mapping))
    table.update({name: _kind(name, lambda value: Left(value.foreign)) for name in (*_FACTORIES, *leave_out)})
    return [(kind, name) for name, kind in table.items()]


def _kind(name: str, plain: Plain) -> type[Placeholder]:
    return type("PlaceholderOf", (Placeholder,), {"foreign": name, "plain": staticmethod(plain)})


def as_plain(value: Any, place: str, left: list[str]) -> Any:
    """Return a value with every placeholder replaced by what it holds; what cannot be kept is listed in ``left``."""
    if isinstance(value, dict):
        items = ((key, as_plain(item, f"{place}[{key!r}]", left)) for key, item in value.items())
        kept = {key: item for key, item in items if not isinstance(item, Left)}
        return kept if type(value) is not Counter else Counter(kept)
    if type(value) in (list, tuple, set, frozenset):
        parts = [as_plain(item, f"{place}[{index}]", left) for index, item in enumerate(value)]
        return type(value)(None if isinstance(part, Left) else part for part in parts)
    if isinstance(value, Placeholder):
        found = type(value).plain(value)
        if not isinstance(found, Left):
            return as_plain(found, place, left)
        value = found
    else:
        value = _leaf(value)
    if isinstance(value, Left) and value.kind not in _FACTORIES:
        left.append(f"{place} ({value.kind})")
    return value


def _leaf(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, Placeholder):
        return Left(value.foreign)
    if isinstance(value, Tensor):
        return _dense(value)
    return value if isinstance(value, _KEPT) else Left(f"{type(value).__module__}.{type(value).__qualname__}")


def _dense(value: Tensor) -> Any:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        return Left(f"a tensor of layout {value.layout} on {value.device}")
    return value.detach().as_subclass(Tensor)


def _kept_types() -> tuple[type, ...]:
    import numpy

    plain = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)
    return (*plain, pathlib.PurePath, numpy.ndarray, Left)


_KEPT = _kept_types()
