"""A fit under the profiler of a Trainer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..loop import profiled

if TYPE_CHECKING:
    from ..loop.fit_loop import FitLoop
    from .session import Session


@contextmanager
def profiled_fit(session: Session, loop: FitLoop) -> Generator[None, None, None]:
    """Measure a fit within the context; show the summary of rank 0 at its end, also after an error."""
    profiler, world = session.settings.profiler, loop.run.world
    profiler.begin(session.directory.path / "profile" if session.writes else None, world.rank)
    try:
        with profiled(loop, profiler):
            yield
    finally:
        try:
            profiler.end()
        except OSError as error:
            session.note(f"The profile of rank {world.rank} was not written: {error}")
        summary = profiler.summary()
        if summary and world.is_global_zero:
            session.note(f"Profile of the fit, rank 0 of {world.size}:\n{summary}")
