"""`Fabric`: the verbs for a training loop that the user writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .contents import contents_of as contents_of
    from .contents import is_stateful as is_stateful
    from .contents import parameter_names as parameter_names
    from .contents import snapshot_of as snapshot_of
    from .loading import compare as compare
    from .loading import restore as restore
    from .weight_files import publish_weights as publish_weights
    from .weight_files import read_weights as read_weights

_HOMES = {
    "read_weights": ".weight_files",
    "publish_weights": ".weight_files",
    "compare": ".loading",
    "contents_of": ".contents",
    "is_stateful": ".contents",
    "parameter_names": ".contents",
    "restore": ".loading",
    "snapshot_of": ".contents",
}

__getattr__ = on_call(__name__, _HOMES)
