"""Pickles of other libraries, read without running what they name.

torch's weights-only unpickler looks up every name of a pickle in a table and refuses the others. The table here holds
stand-ins for classes of other libraries: their objects become dicts, numbers and paths, and no library is imported.
"""

from __future__ import annotations

import datetime
import enum
import pathlib
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ...core.errors import CheckpointError, ConfigurationError
from ..codec import NUMPY, encode


class _Attributes(dict[str, Any]):
    """The attributes of an object, for which it stands."""

    def __setstate__(self, state: Any) -> None:
        self.update(state if isinstance(state, dict) else {})


class _Mapping:
    """Stands for a subclass of dict: torch's unpickler fills dicts alone."""

    def __new__(cls, *arguments: Any) -> Any:
        return {}


class _LeftOut:
    """Stands for an object that is left out. It has the name of the object's class."""

    def __new__(cls, *arguments: Any) -> _LeftOut:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None: ...


class _DType:
    """Stands for a dtype of numpy. Only plain numbers are read: numpy trusts the state of any other dtype."""

    def __init__(self, kind: str, *_: Any) -> None:
        found = numpy.dtype(kind)
        if found.name not in NUMPY:
            raise ValueError(f"values of the numpy dtype {kind!r} are not read")
        self.dtype = found

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.dtype = self.dtype.newbyteorder(">" if state[1] == ">" else "<")


class _Array:
    """Stands for an array of numpy, whose contents come after its creation."""

    array: Any = None

    def __new__(cls, *_: Any) -> _Array:
        return object.__new__(cls)

    def __setstate__(self, state: Sequence[Any]) -> None:
        _, shape, kind, is_fortran, data = state
        array = numpy.frombuffer(data, kind.dtype).reshape(shape, order="F" if is_fortran else "C")
        self.array = numpy.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _scalar(kind: _DType, data: bytes) -> Any:
    return numpy.frombuffer(data, kind.dtype)[0].item()


def _only(value: Any) -> Any:
    return value


_PATHS = {
    **dict.fromkeys(("", "Posix"), pathlib.Path),
    **dict.fromkeys(("Pure", "PurePosix"), pathlib.PurePosixPath),
    **dict.fromkeys(("Windows", "PureWindows"), pathlib.PureWindowsPath),
}
_GETATTR = "builtins.getattr"
_ZERO_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""The members of DeepSpeed's ``ZeroStageEnum``, by value."""
_STAND_INS: dict[str, Any] = {
    "argparse.Namespace": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Attributes,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _only,
    "deepspeed.utils.tensor_fragment.fragment_address": _Attributes,
    "lightning_fabric.utilities.types.AttributeDict": _Attributes,
    **dict.fromkeys(
        (
            "collections.defaultdict",
            "lightning.fabric.utilities.data.AttributeDict",
            "lightning.pytorch.utilities.parsing.AttributeDict",
            "lightning_fabric.utilities.data.AttributeDict",
            "phalanx.framework.core.hyperparameters.AttributeDict",
            "pytorch_lightning.utilities.parsing.AttributeDict",
        ),
        _Mapping,
    ),
    "numpy.dtype": _DType,
    "numpy.ndarray": _Array,
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    **{f"{module}.{kind}Path": path for module in ("pathlib", "pathlib._local") for kind, path in _PATHS.items()},
    **{f"builtins.{kind.__name__}": kind for kind in (int, float, str, list, dict, frozenset)},
    **{f"datetime.{kind.__name__}": kind for kind in (datetime.datetime, datetime.date, datetime.timedelta)},
}
_DCP = "torch.distributed.checkpoint"
# Names in the index of a folder of torch.distributed.checkpoint, all of them of plain data classes.
_IN_INDEX = {
    *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_DCP}.metadata.{name}Metadata" for name in ("BytesStorage", "ChunkStorage", "TensorStorage")),
    *(f"{_DCP}.metadata._MEM_FORMAT_ENCODING", f"{_DCP}.filesystem._StorageInfo"),
    *("torch.Size", "torch.serialization._get_layout"),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
}


class _Trusting(pickle.Unpickler):
    """Imports what a pickle names, with the stand-ins for classes of other libraries."""

    def find_class(self, module: str, name: str, /) -> Any:
        return _STAND_INS.get(f"{module}.{name}") or super().find_class(module, name)


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration. Python 3.11 before 3.11.4 pickles one as a call of ``getattr``."""
    if kind is _only and name in _ZERO_STAGES:
        return _ZERO_STAGES.index(name)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"GLOBAL {_GETATTR}")


class _Index(pickle.Unpickler):
    """Reads an index of torch.distributed.checkpoint, and refuses what is not in one."""

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        if full.startswith("pathlib"):
            return lambda *parts: "/".join(map(str, parts))
        if full == _GETATTR:
            return _member
        if full not in _IN_INDEX:
            raise pickle.UnpicklingError(f"GLOBAL {full}")
        return super().find_class(module, name)


class Pickles:
    """Reads pickles for one conversion.

    Args:
        trust: whether to import and run what a pickle names, where it names what is not known to be harmless.
        leave_out: names of classes whose objects are left out, without being imported.
    """

    def __init__(self, trust: bool, leave_out: Sequence[str]) -> None:
        self._trust, self._leave_out = trust, list(leave_out)
        self.left: dict[tuple[str, ...], str] = {}
        """The class of each object that was left out, by its place."""

    def load(self, path: Path) -> dict[str, Any]:
        """Read a file of ``torch.save`` as plain values and tensors, which are mapped from the file.

        Raises:
            CheckpointError: the file is damaged, holds no dict, or names what is not read.
        """
        content = self.loaded(path, path, mmap=zipfile.is_zipfile(path))
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds no dict, which a checkpoint is.")
        return content

    def loaded(self, path: Path, file: Path | BinaryIO, place: tuple[str, ...] = (), mmap: bool = False) -> Any:
        """Return the plain contents of the file ``path``, or of an opened ``file`` from it, which is at ``place``."""
        with _reading(path), safe_globals(self._table()):
            try:
                value = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
            except pickle.UnpicklingError as error:
                if not self._trust:
                    raise _refused(path, _names(file, error), can_leave_out=True) from None
                if not isinstance(file, Path):
                    file.seek(0)
                value = torch.load(file, map_location="cpu", weights_only=False, mmap=mmap, pickle_module=_TRUSTING)
            return _plain(value, place, self.left)

    def index(self, path: Path) -> Any:
        """Read an index of torch.distributed.checkpoint.

        Raises:
            CheckpointError: it is damaged, or names what does not belong into one.
        """
        with _reading(path), path.open("rb") as file:
            try:
                return _Index(file).load()
            except pickle.UnpicklingError as error:
                if not self._trust:
                    raise _refused(path, _names(path, error), can_leave_out=False) from None
                file.seek(0)
                return pickle.Unpickler(file).load()

    def _table(self) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
        left_out = {name: _left_out(name) for name in self._leave_out}
        return [(stand_in, name) for name, stand_in in {**_STAND_INS, **left_out, _GETATTR: _member}.items()]


_TRUSTING = SimpleNamespace(
    __name__="pickle", Unpickler=_Trusting, load=lambda file, **options: _Trusting(file, **options).load()
)


def _left_out(name: str) -> type[_LeftOut]:
    module, _, kind = name.rpartition(".")
    return type(kind, (_LeftOut,), {"__module__": module})


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {lines[0][:300]}).") from error


def _names(file: Path | BinaryIO, error: Exception) -> list[str]:
    """Return what a pickle names that is not read."""
    # Files written before torch 1.6 are not archives.
    with suppress(Exception):
        return sorted(get_unsafe_globals_in_checkpoint(file))
    return re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]


def _refused(path: Path, names: list[str], can_leave_out: bool) -> CheckpointError:
    # Without names, it has operations that only a pickle of another program than torch has.
    what = f"{path} names {', '.join(names[:10])}" if names else f"the pickle in {path} is not as torch writes it"
    other = f", or leave_out={names!r} to leave these objects out" if names and can_leave_out else ""
    return CheckpointError(
        f"{what}, which is not read, since a pickle can run any code: if you know who wrote it, pass trust=True "
        f"(--trust){other}."
    )


def _plain(value: Any, place: tuple[str, ...], left: dict[tuple[str, ...], str]) -> Any:
    """Return a value without stand-ins and tensor subclasses; what a checkpoint cannot hold is listed in ``left``."""
    if isinstance(value, dict):
        items = {key: _plain(item, (*place, str(key)), left) for key, item in value.items()}
        kept = {key: item for key, item in items.items() if item is not _LeftOut}
        return Counter(kept) if type(value) is Counter else kept
    if type(value) in (list, tuple, set, frozenset):
        parts = [_plain(item, (*place, str(index)), left) for index, item in enumerate(value)]
        return type(value)(None if part is _LeftOut else part for part in parts)
    if isinstance(value, Tensor):
        value = value.detach().as_subclass(Tensor)
    if isinstance(value, _Array):
        value = value.array
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        encode(value)
    except ConfigurationError:
        kind = value if isinstance(value, type) else type(value)
        detail = f" of layout {value.layout}" if isinstance(value, Tensor) else ""
        left[place] = f"{kind.__module__}.{kind.__qualname__}{detail}"
        return _LeftOut
    return value
