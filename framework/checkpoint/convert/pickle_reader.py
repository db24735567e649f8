"""Restricted reader of ``.metadata`` of torch.distributed.checkpoint, which torch's safe unpickler does not read.

A pickle is a list of operations. Here they are taken apart by the standard library's disassembler and carried out on
plain values alone: a name in the pickle stays a name, a call stays what was to be called with what.
"""

from __future__ import annotations

import pickletools
from typing import Any

_MOST_OPERATIONS = 50_000_000
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Any] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_MARK = object()


class Named:
    """A class or function by its name in the pickle."""

    def __init__(self, name: str) -> None:
        self.name = name


class Built:
    """An object as the pickle describes it: of what, from which arguments, and the state put in afterwards."""

    def __init__(self, of: Any, arguments: Any) -> None:
        self.name = of.name if isinstance(of, Named) else ""
        self.arguments = arguments if isinstance(arguments, tuple) else ()
        self.state: Any = None

    def __hash__(self) -> int:
        return id(self)

    def attributes(self) -> dict[str, Any]:
        """Return the state where it is one of attributes."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state if isinstance(state, dict) else {}


def read_inert(data: bytes) -> Any:
    """Return the values that a pickle describes; nothing is imported or called.

    Raises:
        ValueError: it is no pickle, or uses operations that this reader does not know.
    """
    machine = _Machine()
    for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if count > _MOST_OPERATIONS:
            raise ValueError("it has too many operations")
        if operation.name == "STOP":
            return machine.stack.pop()
        machine.run(operation.name, argument)
    raise ValueError("it does not end")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        else:
            step = getattr(self, f"do_{name.lower()}", None)
            if step is None:
                raise ValueError(f"the operation {name} is not read")
            step(argument)

    def marked(self) -> list[Any]:
        """Take all values above the last mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("a mark is missing")
        taken = self.stack[place + 1 :]
        del self.stack[place:]
        return taken

    def do_proto(self, _: Any) -> None: ...

    def do_frame(self, _: Any) -> None: ...

    def do_mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def do_pop(self, _: Any) -> None:
        self.stack.pop()

    def do_memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_binput(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    do_long_binput = do_binput

    def do_binget(self, index: int) -> None:
        self.stack.append(self.memo[index])

    do_long_binget = do_binget

    def do_global(self, argument: str) -> None:
        self.stack.append(Named(argument.replace(" ", ".")))

    def do_stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Named(f"{module}.{name}"))

    def do_reduce(self, _: Any) -> None:
        arguments, of = self.stack.pop(), self.stack.pop()
        self.stack.append(Built(of, arguments))

    do_newobj = do_reduce

    def do_build(self, _: Any) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Built):
            raise ValueError("state is put into something else than an object")
        self.stack[-1].state = state

    def do_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self.marked()))

    def do_tuple1(self, _: Any) -> None:
        self.stack[-1:] = [tuple(self.stack[-1:])]

    def do_tuple2(self, _: Any) -> None:
        self.stack[-2:] = [tuple(self.stack[-2:])]

    def do_tuple3(self, _: Any) -> None:
        self.stack[-3:] = [tuple(self.stack[-3:])]

    def do_append(self, _: Any) -> None:
        item = self.stack.pop()
        self._top(list).append(item)

    def do_appends(self, _: Any) -> None:
        items = self.marked()
        self._top(list).extend(items)

    def do_additems(self, _: Any) -> None:
        items = self.marked()
        self._top(set).update(items)

    def do_setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._top(dict)[key] = value

    def do_setitems(self, _: Any) -> None:
        items = self.marked()
        self._top(dict).update(zip(items[::2], items[1::2], strict=True))

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"items are put into what is no {kind.__name__}")
        return self.stack[-1]
