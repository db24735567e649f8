"""``SaveRequest``: one save of a run, and the actions that follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import PhalanxError
from .deletion import BackgroundDeletion

if TYPE_CHECKING:
    from .node_folders import NodeFolders


@dataclass
class SaveRequest:
    """One save of a run, and the actions that follow it."""

    path: Path
    weights_only: bool = False
    asynchronous: bool = False
    also: Path | None = None
    """A second name for the same checkpoint."""
    failure_key: str = ""
    """Failures in a row are counted for each key."""
    tolerant: bool = True
    """Whether training continues after a failure."""
    optional: bool = False
    """Whether a failure is only passed to ``on_done``: what is lost is no checkpoint that the user counts on."""
    make_room: Callable[[], object] = lambda: None
    """Called on rank 0, with ``nodes`` on the first rank of each, before anything is written, possibly on another
    thread."""
    nodes: NodeFolders | None = None
    """See ``writer.save``."""
    prune: Callable[[BackgroundDeletion], list[str]] = lambda deletion: []
    """Called on rank 0 once the checkpoint is published, possibly on another thread: deletes older ones. Returns lines
    for the console."""
    on_done: Callable[[PhalanxError | None], None] = lambda error: None
    """Called on every rank, on the training thread, with the error of a failed save or None."""
    step: int = 0
    """The optimizer step at which the run was captured."""
