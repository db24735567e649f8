"""Where each rank stands in its training, in a file that outlives it: what a rank that was killed cannot tell itself.

A rank writes three numbers into memory that is mapped from the file, before every optimizer step: a fraction of a
microsecond, and the system keeps them whatever becomes of the rank.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqq")
_NOWHERE = -1


@dataclass(frozen=True)
class Whereabouts:
    """The optimizer step that was under way, and the epoch and the micro-batch in it that it began with."""

    step: int
    epoch: int
    batch: int

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, batch {self.batch})"


class WhereaboutsFile:
    """A rank's own file. It stays when it is let go of.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, directory: str, rank: int) -> None:
        path = _path(directory, rank)
        path.write_bytes(_LAYOUT.pack(_NOWHERE, _NOWHERE, _NOWHERE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def tell(self, step: int, epoch: int, batch: int) -> None:
        """Note that an optimizer step begins."""
        _LAYOUT.pack_into(self._memory, 0, step, epoch, batch)


def read_whereabouts(directory: str, rank: int) -> Whereabouts | None:
    """Return where ``rank`` stood last, or None where its training had not begun."""
    try:
        step, epoch, batch = _LAYOUT.unpack(_path(directory, rank).read_bytes())
    except (OSError, struct.error):
        return None
    return None if step == _NOWHERE else Whereabouts(step, epoch, batch)


def _path(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank_{rank}.step"
