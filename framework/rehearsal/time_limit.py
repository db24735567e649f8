"""``TimeLimit``: ends a rehearsal that takes too long."""

from __future__ import annotations

import time
from typing import Any

from torch.overrides import TorchFunctionMode


class TimeLimit(TorchFunctionMode):
    """Context in which functions of torch raise ``TimeoutError`` once a number of seconds have passed.

    A loop that waits for a value may never end in a rehearsal, where all values are 1.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"it takes more than {self._seconds:.0f} seconds")
        return func(*args, **(kwargs or {}))
