"""The step of one rank among many that are not there: its memory and its communication, without data or devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .one_rank import Part as Part, TimeLimit as TimeLimit, rehearse as rehearse

__getattr__ = on_call(__name__, {".one_rank": "Part TimeLimit rehearse"})
