"""``accelerate.logging``: a logger of Python's ``logging`` that writes on rank 0 alone, or rank by rank."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ...framework.distributed.world import placement

__all__ = ["get_logger"]


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # not generic in Python 3.10


class _RankLogger(_Adapter):
    """Drops records of ranks other than 0, unless a call has ``main_process_only=False``."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        main_only = kwargs.pop("main_process_only", True)
        kwargs.pop("in_order", None)
        if self.isEnabledFor(level) and (not main_only or placement().rank == 0):
            kwargs.setdefault("stacklevel", 2)
            self.logger.log(level, msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> _RankLogger:
    """Return a logger whose calls take ``main_process_only``, True by default.

    Args:
        name: the logger's name.
        log_level: its level, such as ``"INFO"``.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return _RankLogger(logger, {})
