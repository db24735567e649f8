"""`Fabric`: the verbs for a training loop that the user writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .state import compare as compare
    from .state import contents_of as contents_of
    from .state import is_stateful as is_stateful
    from .state import parameter_names as parameter_names
    from .state import restore as restore
    from .state import snapshot_of as snapshot_of

_HOMES = {
    "compare": ".state",
    "contents_of": ".state",
    "is_stateful": ".state",
    "parameter_names": ".state",
    "restore": ".state",
    "snapshot_of": ".state",
}

__getattr__ = on_call(__name__, _HOMES)
