"""``Recipe``: the recorded operations that give a tensor without data its values."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ..core.errors import ConfigurationError


@dataclass
class Recipe:
    """The recorded operations that give a tensor its values."""

    base: Tensor
    device: torch.device
    steps: list[Step] = field(default_factory=list)

    def value(self, steps: Iterable[Step] | None = None) -> Tensor:
        """Return the tensor with its values."""
        with torch.no_grad(), torch.inference_mode(False):
            whole = torch.empty_like(self.base, device=self.device)
            for step in self.steps if steps is None else steps:
                step.run(whole)
        return whole


@dataclass
class View:
    """A tensor without data, or a view of one, at a certain moment."""

    recipe: Recipe
    steps: tuple[Step, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """Return this view of the tensor with data."""
        return whole.as_strided(self.size, self.stride, self.offset)

    def now(self) -> Tensor:
        """Return the values that the view had at that moment."""
        return self.of(self.recipe.value(self.steps))

    def value(self) -> Tensor:
        """Return the values that the view has in the end."""
        return self.of(self.recipe.value())


def view_of(tensor: Tensor, recipe: Recipe) -> View:
    """Return the view that describes a tensor without data at this moment."""
    return View(recipe, tuple(recipe.steps), tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@dataclass
class Step:
    """One operation that changes a tensor, and the states before it of the random generators that it advances."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: View
    states: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)

    def run(self, whole: Tensor) -> None:
        """Apply the operation to a tensor with data.

        Raises:
            ConfigurationError: the operation changes the tensor's shape.
        """
        target = self.target.of(whole)

        def real(value: Any) -> Any:
            if value is self.target:
                return target
            return value.now() if isinstance(value, View) else value

        # torch does not treat a view as a container, so it arrives here unchanged.
        args, kwargs = tree_map(real, (self.args, self.kwargs))
        with _in_states(self.states):
            self.function(*args, **kwargs)
        if target.shape != self.target.size:
            raise ConfigurationError(
                f"{getattr(self.function, '__name__', self.function)} changes the shape of a parameter from "
                f"{tuple(self.target.size)} to {tuple(target.shape)}, which a model that is built without data cannot "
                "follow: create the parameter in its final shape."
            )

    def record(self, whole: Tensor) -> None:
        """Apply the operation for the first time, which advances the generators; keep their states before it."""
        given = [each for each in tree_flatten((self.args, self.kwargs))[0] if isinstance(each, torch.Generator)]
        before = [(each, each.get_state()) for each in (_default_generator(whole.device), *given)]
        self.run(whole)
        self.states = [(each, state) for each, state in before if not torch.equal(state, each.get_state())]


def kept(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, which takes no memory of its own before the tensor is changed."""
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:
        # The memory is not torch's, such as that of a numpy array, so changes of it would go unnoticed.
        return tensor.detach().clone()


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@contextmanager
def _in_states(states: list[tuple[torch.Generator, Tensor]]) -> Generator[None, None, None]:
    """Return a context in which generators have other states."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
