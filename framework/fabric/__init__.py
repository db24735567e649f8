"""Parts of ``Fabric`` (fabric.py), for a loop that the user writes, that are imported when they are first called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .contents import contents_of as contents_of, parameter_names as parameter_names, snapshot_of as snapshot_of
    from .loading import compare as compare, restore as restore
    from .weight_files import publish_weights as publish_weights, read_weights as read_weights

_HOMES = {
    ".contents": "contents_of parameter_names snapshot_of",
    ".loading": "compare restore",
    ".weight_files": "publish_weights read_weights",
}

__getattr__ = on_call(__name__, _HOMES)
