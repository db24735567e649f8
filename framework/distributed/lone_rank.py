"""Work that rank 0 does alone while the other ranks skip it, and the handover of its result to them."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ..core.errors import RankError
from ..system.environment import variables_set
from ..system.launcher_env import Placement
from .rendezvous import default_group_aside, pauses, rank_store

# Of one value in the store, whose messages are limited in size.
_PART_BYTES = 2**26
_FIRST_LOOK_SECONDS = 0.002
_LONGEST_LOOK_SECONDS = 0.25
# How often this process has arrived at a place of the script.
_arrivals: Counter[str] = Counter()


@contextlib.contextmanager
def as_only_rank() -> Iterator[None]:
    """Context in which this process is the only rank, for phalanx, for libraries and for the user's code."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with default_group_aside(), variables_set(variables):
        yield


class Handover:
    """The result of one call of rank 0, for the other ranks that make the same call.

    Rank 0 does not wait for them: they may leave the call out, as below ``if trainer.is_global_zero``.

    Args:
        place: this process among the ranks.
        what: the name of the call.
        stack: the lines of the script that led to it, which tell calls of different places apart.
    """

    def __init__(self, place: Placement, what: str, stack: list[str]) -> None:
        self._what = what
        self._size = place.size
        self._store = rank_store(place)
        call = hashlib.sha256("\n".join([what, *stack]).encode()).hexdigest()
        _arrivals[call] += 1
        self._key = f"{call}/{_arrivals[call]}"

    def give(self, value: Any) -> None:
        """Publish the result; an exception is raised on the other ranks."""
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        parts = [payload[start : start + _PART_BYTES] for start in range(0, len(payload), _PART_BYTES)]
        for number, part in enumerate(parts):
            self._store.set(f"{self._key}/{number}", part)
        self._store.set(self._key, str(len(parts)))

    def take(self) -> Any:
        """Wait for the result of rank 0, however long it takes.

        Raises:
            RankError: rank 0 failed in the call, or ended without it.
        """
        waits = pauses(_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS, self._size)
        try:
            while not self._store.check([self._key]):
                time.sleep(next(waits))
            parts = [self._store.get(f"{self._key}/{number}") for number in range(int(self._store.get(self._key)))]
            if self._store.add(f"{self._key}/read", 1) == self._size - 1:
                for name in [self._key, *(f"{self._key}/{number}" for number in range(len(parts)))]:
                    self._store.delete_key(name)
        except dist.DistError as error:
            raise RankError(f"rank 0 ended without the result of {self._what}, for which this rank waits.") from error
        value = pickle.loads(b"".join(parts))
        if isinstance(value, RankError):
            raise value
        return value
