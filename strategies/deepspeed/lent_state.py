"""``optimizer.state`` of the user's optimizer, whose state an engine holds in pieces.

A read gives the full tensors of a parameter, gathered when they are first read. What user code writes, replaces or
removes is in the engine's pieces before the next update or save.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import parameters_of
from ...framework.core.split_optimizer import optimizers_in
from .state_slots import counts_in_ints

_NO_VALUE = object()


class LentState(MutableMapping[Any, Any]):
    """The state of an optimizer by parameter, as full tensors on every rank.

    Reads are collective: all ranks must make the same ones. What was read is valid until the next update.

    Args:
        optimizer: the user's optimizer. The engine gets the state that it has.
        held: the ``EngineState``, which reads and writes the pieces.

    Raises:
        ConfigurationError: the optimizer has the state of an engine that has ended.
    """

    def __init__(self, optimizer: Optimizer, held: Any) -> None:
        before = optimizer.state
        if isinstance(before, LentState):
            before._engine()
        self._optimizer: Optimizer | None = optimizer
        self._held: Any = held
        pieces = [(number, piece) for number, group in enumerate(held.groups.groups) for piece in group]
        self._places = {id(piece.parameter): (number, piece) for number, piece in pieces}
        self._trained = [one for one in parameters_of(optimizer) if id(one) in self._places]
        self._scalars: tuple[Any, Any] | None = None
        # Slots that were read or set, by the id of their parameter; empty ones were removed.
        self._lent: dict[int, dict[str, Any]] = {}
        self._other: dict[Any, Any] = {}
        if before:
            self._adopt(before)
        self._install()

    def _install(self) -> None:
        assert self._optimizer is not None
        for part in {id(one): one for one in (self._optimizer, *optimizers_in(self._optimizer))}.values():
            part.state = self  # type: ignore[assignment]

    def _adopt(self, state: Any) -> None:
        """Take over a state by parameter that replaces all of the present one."""
        self._other = {key: value for key, value in state.items() if id(key) not in self._places}
        self._lent = {id(one): state.get(one, {}) for one in self._trained}

    def _engine(self) -> Any:
        if self._held is None:
            raise ConfigurationError(
                "the state of this optimizer was in DeepSpeed's engine, which has ended: read it in on_fit_end, save a "
                "checkpoint, or create a new optimizer."
            )
        return self._held

    # ---- for the engine -------------------------------------------------------------------------------------------

    def take_back(self) -> None:
        """Write what was lent into the engine. What user code has stays valid."""
        optimizer = self._optimizer
        if optimizer is None or self._held is None:
            return
        if optimizer.state is not self:
            # As load_state_dict does.
            self._adopt(optimizer.state)
            self._install()
        if self._lent:
            self._engine().write_slots(self._lent)

    def forget(self) -> None:
        """Forget what was lent, which an update has changed."""
        self._scalars = None
        self._lent.clear()
        if self._optimizer is not None and self._optimizer.state is not self:
            self._install()

    def close(self) -> None:
        """Release the engine; later reads raise an error."""
        self._held = self._optimizer = self._scalars = None
        self._places.clear()
        self._trained.clear()
        self._lent.clear()

    # ---- for user code --------------------------------------------------------------------------------------------

    def _known(self) -> tuple[Any, Any]:
        if self._scalars is None:
            self._scalars = self._engine().scalars_and_dtypes()
        return self._scalars

    def _is_held(self, parameter: Any) -> bool:
        scalars, _ = self._known()
        if id(parameter) in self._lent:
            return bool(self._lent[id(parameter)])
        return scalars[id(parameter)] is not None

    @torch.no_grad()
    def __getitem__(self, key: Any) -> Any:
        held = self._engine()
        if id(key) not in self._places:
            return self._other.setdefault(key, {})
        if id(key) not in self._lent:
            scalars, flat = self._known()
            own = scalars[id(key)]
            number, piece = self._places[id(key)]
            # Several parameters may have the same object.
            slots = {} if own is None else {**copy.deepcopy(own), **held.full_slots(number, piece, flat[number])}
            assert self._optimizer is not None
            if "step" in slots and not counts_in_ints(self._optimizer):
                slots["step"] = torch.as_tensor(slots["step"], dtype=torch.float32)
            self._lent[id(key)] = slots
        return self._lent[id(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._engine()
        if id(key) in self._places:
            self._lent[id(key)] = value
        else:
            self._other[key] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if id(key) in self._places:
            self._lent[id(key)] = {}
        else:
            del self._other[key]

    def __contains__(self, key: Any) -> bool:
        self._engine()
        return self._is_held(key) if id(key) in self._places else key in self._other

    def __iter__(self) -> Iterator[Any]:
        self._engine()
        yield from [one for one in self._trained if self._is_held(one)]
        yield from list(self._other)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the slots of a parameter, or ``default`` if it has none."""
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, default: Any = _NO_VALUE) -> Any:
        """Remove and return the slots of a parameter."""
        if key not in self:
            if default is _NO_VALUE:
                raise KeyError(key)
            return default
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the slots of a parameter; set them if it has none."""
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """Remove the state of all parameters."""
        self._engine()
        self._other.clear()
        self._lent = {id(one): {} for one in self._trained}

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        return defaultdict(dict, {copy.deepcopy(key, memo): copy.deepcopy(self[key], memo) for key in self})

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def __repr__(self) -> str:
        return "<the state of an optimizer in DeepSpeed's engine>"
