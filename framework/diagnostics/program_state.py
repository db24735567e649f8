"""``ProgramState``: the state that a program's own code keeps beside weights, such as counters and lists of outputs.

It is found in attributes and buffers of modules, and in objects of the program's own classes that these refer to:
numbers, texts, tensors, random generators, and lists, dicts and sets of them.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.torch_internals import version_of

_OWN = __name__.partition(".framework.")[0]
_OF_MODULE = frozenset(vars(nn.Module()))
ENGINE_ATTRIBUTES: set[str] = set()
"""Attributes in which the engine of a strategy counts passes: putting them back would make it wait for passes."""
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_LISTS = (list, deque)
# Of longer lists, which are data, only what is appended is seen; longer dicts and sets are left out.
_MOST_ITEMS = 10_000
# Each item is looked at in containers up to this length, in longer ones only whether it is another object.
_FEW_ITEMS = 256
_MOST_ELEMENTS = 1 << 20

Path = tuple[Any, ...]
Taken = list[tuple[Path, Any, Any]]
"""For each object that can change: where it is, the object, and a copy of what it holds."""


class Change(NamedTuple):
    """A difference of an object from an earlier time."""

    path: Path
    """The number of a root, and the keys from there on."""
    kind: str
    """``"set"``, ``"delete"``, ``"tail"`` of a list from an index on, ``"all"`` items, ``"copy"`` of the elements of a
    tensor, or ``"state"`` of a random generator."""
    key: Any
    value: Any

    @property
    def name(self) -> str:
        """The attribute of the program's that is, or holds, what has changed."""
        keys = [str(key) for key in (*self.path[1:], *([self.key] if self.kind in ("set", "delete") else []))]
        return keys[0] if keys else "an attribute"


class Large(NamedTuple):
    """Takes the place of a tensor that is too large to be sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ProgramState:
    """Finds the state of a program, compares it with that of another time, and writes it.

    Args:
        roots: modules, and containers.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = list(roots)

    @classmethod
    def of(cls, module: nn.Module, without: Iterable[nn.Module] = ()) -> ProgramState:
        """Return the state of a module and of its parts of classes of the program's own, without some parts of it."""
        left_out = {part for each in without for part in each.modules()}
        parts = [part for part in module.modules() if part not in left_out]
        buffers = {part for part in parts if part._buffers}
        return cls([part for part in parts if part is module or part in buffers or is_of_program(part)])

    def take(self) -> Taken:
        """Return a record of the state."""
        taken: Taken = []
        seen: set[int] = set()
        for number, root in enumerate(self._roots):
            _visit((number,), root, taken, seen)
        return taken

    def changes(self, taken: Taken) -> list[Change]:
        """Return how the state differs from a record."""
        return [change for path, holder, content in taken for change in _changes(path, holder, content)]

    @staticmethod
    def put_back(taken: Taken) -> None:
        """Write a record back, except buffers, and elements of tensors that were changed in place."""
        for _, holder, content in taken:
            if isinstance(holder, Tensor):
                continue
            if isinstance(holder, nn.Module):
                for change in list(_changes((), holder, content)):
                    if change.key in holder._buffers:
                        continue
                    if change.key in content:
                        setattr(holder, change.key, content[change.key])
                    else:
                        delattr(holder, change.key)
            elif type(holder) in _LISTS:
                _replace_items(holder, content)
            elif isinstance(holder, set | dict):
                holder.clear()
                holder.update(content)
            elif (state := _generator(holder)) is not None:
                state[1](content)
            else:
                # No ordinary way: ``setattr`` would call the code of the program's class.
                attributes: dict[str, Any] = holder.__dict__
                attributes.clear()
                attributes.update(content)

    def apply(self, changes: Iterable[Change], given: Callable[[Any], Any] = lambda value: value) -> None:
        """Write changes of another process, or of another time. ``given`` is called with each value."""
        for change in changes:
            # Another process may not have the object.
            with suppress(KeyError, IndexError, AttributeError, TypeError):
                self._apply(change, given)

    def _apply(self, change: Change, given: Callable[[Any], Any]) -> None:
        holder = self._roots[change.path[0]]
        for key in change.path[1:]:
            holder = holder[key] if type(holder) in (*_DICTS, *_LISTS, tuple) else getattr(holder, key)
        is_table = type(holder) in _DICTS
        if change.kind == "set":
            value = given(change.value)
            holder.__setitem__(change.key, value) if is_table else setattr(holder, change.key, value)
        elif change.kind == "delete":
            holder.__delitem__(change.key) if is_table else delattr(holder, change.key)
        elif change.kind == "tail":
            holder[change.key :] = [given(each) for each in change.value]
        elif change.kind == "all":
            holder.clear()
            (holder.extend if type(holder) is deque else holder.update)([given(each) for each in change.value])
        elif change.kind == "copy":
            value = given(change.value)
            with torch.no_grad():
                holder.copy_(value)
        elif (state := _generator(holder)) is not None:
            state[1](change.value)


def packed(changes: Iterable[Change]) -> list[Change]:
    """Return the changes that can be sent to another process, as it is to get them."""
    return [
        change._replace(value=value) for change in changes if (value := sendable(change.value)) is not NotImplemented
    ]


def sendable(value: Any) -> Any:
    """Return a value as it is sent, with tensors on the CPU; ``NotImplemented`` where it cannot be."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or type(value) is not Tensor or value.is_meta:
            return NotImplemented
        if value.numel() > _MOST_ELEMENTS:
            return Large(tuple(value.shape), value.dtype)
        return value.detach().cpu().clone()
    if isinstance(value, nn.Module):
        return NotImplemented
    if type(value) in (list, tuple, deque, set):
        items = [sendable(each) for each in value]
        return NotImplemented if any(each is NotImplemented for each in items) else type(value)(items)
    if type(value) in _DICTS:
        items = [(key, sendable(each)) for key, each in value.items()]
        if any(each is NotImplemented for _, each in items):
            return NotImplemented
        sent = copy.copy(value)
        sent.clear()
        sent.update(items)
        return sent
    try:
        pickle.dumps(value)
    except Exception:
        # The methods by which a class of the program is pickled may raise anything.
        return NotImplemented
    return value


# ---- what is looked at -----------------------------------------------------------------------------------------------


@cache
def is_own(kind: type) -> bool:
    """Whether a class belongs to the program, and to no library."""
    top = kind.__module__.partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return top not in ("torch", _OWN.partition(".")[0]) and not {"site-packages", "dist-packages"} & set(
        file.split("/")
    )


def is_of_program(value: Any) -> bool:
    """Whether the class of an object belongs to the program, and to no library."""
    kind: Any = type(value)
    return is_own(kind)


def _generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return functions that read and write the state of a random generator; None if it is none."""
    if isinstance(value, torch.Generator):
        write: Any = value.set_state
        return value.get_state, write
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    return None


def _visit(path: Path, value: Any, taken: Taken, seen: set[int]) -> None:
    if isinstance(value, _SCALARS) or id(value) in seen:
        return
    kind: Any = type(value)
    content: Any
    items: Any = ()
    if isinstance(value, nn.Module):
        if len(path) > 1:
            return
        items = content = _attributes(value)
    elif isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or value.is_inference():
            return
        content = version_of(value)
    elif kind in _DICTS or kind is set:
        if len(value) > _MOST_ITEMS:
            return
        content = value.copy()
        items = {} if kind is set else content
    elif kind in _LISTS:
        content = list(value) if len(value) <= _MOST_ITEMS else len(value)
        items = dict(enumerate(value)) if len(value) <= _FEW_ITEMS else {}
    elif kind is tuple and len(value) <= _FEW_ITEMS:
        content, items = None, dict(enumerate(value))
    elif (state := _generator(value)) is not None:
        content = state[0]()
    elif is_own(kind) and kind.__dictoffset__ and not callable(value):
        items = content = dict(vars(value))
    else:
        return
    seen.add(id(value))
    if content is not None:
        taken.append((path, value, content))
    if items and len(items) <= _FEW_ITEMS:
        for key, item in items.items():
            _visit((*path, key), item, taken, seen)


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = {
        name: value for name, value in vars(module).items() if name not in _OF_MODULE and name not in ENGINE_ATTRIBUTES
    }
    found.update(module._buffers)
    return found


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and isinstance(now, _SCALARS) and before == now)


def _is_known(value: Any) -> bool:
    """Whether a value can be part of the state. Others, such as a Trainer, are not looked at."""
    if isinstance(value, (*_SCALARS, Tensor, set, tuple)) or type(value) in (*_DICTS, *_LISTS):
        return not isinstance(value, nn.Parameter)
    kind: Any = type(value)
    return not isinstance(value, nn.Module) and (kind.__module__ == "numpy" or is_own(kind))


def _changes(path: Path, holder: Any, content: Any) -> Iterator[Change]:
    if isinstance(holder, Tensor):
        if version_of(holder) != content:
            yield Change(path, "copy", None, holder)
    elif type(holder) in _LISTS:
        yield from _changed_list(path, holder, content)
    elif type(holder) is set:
        if holder != content:
            yield Change(path, "all", None, list(holder))
    elif isinstance(holder, nn.Module) or type(holder) in _DICTS or _generator(holder) is None:
        now = (
            _attributes(holder) if isinstance(holder, nn.Module) else holder if type(holder) in _DICTS else vars(holder)
        )
        for key, value in now.items():
            if (key not in content or not _same(content[key], value)) and _is_known(value):
                yield Change(path, "set", key, value)
        for key, value in content.items():
            if key not in now and _is_known(value):
                yield Change(path, "delete", key, None)
    else:
        state: Any = _generator(holder)
        now = state[0]()
        if not (torch.equal(now, content) if isinstance(now, Tensor) else repr(now) == repr(content)):
            yield Change(path, "state", None, now)


def _changed_list(path: Path, holder: Any, content: list[Any] | int) -> Iterator[Change]:
    if isinstance(content, int):
        first = min(content, len(holder))
        is_equal = len(holder) == content
    else:
        is_equal = len(holder) == len(content) and all(map(is_, holder, content))
        first = 0
        if not is_equal:
            pairs = enumerate(zip(holder, content, strict=False))
            first = next((at for at, (now, old) in pairs if not _same(old, now)), min(len(holder), len(content)))
            is_equal = first == len(holder) == len(content)
    if is_equal:
        return
    if type(holder) is deque:
        yield Change(path, "all", None, list(holder))
    else:
        yield Change(path, "tail", first, holder[first:])


def _replace_items(holder: Any, content: list[Any] | int) -> None:
    if isinstance(content, int):
        while len(holder) > content:
            holder.pop()
    elif type(holder) is deque:
        holder.clear()
        holder.extend(content)
    else:
        holder[:] = content
