"""``Reading``: the loaders that the user's loop is iterating over."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


class Pass(Protocol):
    """The current pass over a loader; see ``FabricLoader``."""

    epoch: int
    end: bool
    filler: bool
    share: float
    count: int
    is_along: bool


@dataclass
class Reading:
    """The loaders of a Fabric that are being iterated over, the innermost last."""

    loaders: list[Pass] = field(default_factory=list)
    joined: bool = False

    @property
    def current(self) -> Pass | None:
        """The innermost loader, if any."""
        return self.loaders[-1] if self.loaders else None

    @property
    def together(self) -> list[Pass]:
        """The innermost loader, and those whose batches are read along with its own, as by ``zip(first, second)``."""
        if len(self.loaders) < 2:
            return self.loaders
        inner = self.loaders[-1]
        return [*(one for one in self.loaders[:-1] if one.is_along and one.count == inner.count), inner]

    @property
    def end(self) -> bool:
        """Whether one of them has yielded its last batch, so that the loop ends after this round."""
        return any(one.end for one in self.together)

    @property
    def filler(self) -> bool:
        """Whether one of them has no more data for this rank: on one process the loop would have ended before."""
        return any(one.filler for one in self.together)

    @property
    def share(self) -> float:
        """The weight of a loss of this round in the mean over ranks."""
        return 0.0 if self.filler else max((one.share for one in self.together), default=1.0)

    @contextmanager
    def evened(self) -> Generator[None, None, None]:
        """Make all loaders even inside, so that ranks without data continue with filler batches."""
        before, self.joined = self.joined, True
        try:
            yield
        finally:
            self.joined = before
