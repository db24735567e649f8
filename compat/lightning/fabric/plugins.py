"""``lightning.fabric.plugins``, which has no counterpart: its import says what to use instead."""

from __future__ import annotations

from ..absent import refuse

refuse(__name__)
