"""Saving and restoring the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .capture import capture_run as capture_run
    from .export import check_export as check_export, export_module as export_module, export_run as export_run
    from .restore import (
        agree_on_resumption as agree_on_resumption,
        load_model as load_model,
        restore_groups_and_freezing as restore_groups_and_freezing,
        restore_run as restore_run,
    )
    from .rewind import go_back as go_back
    from .save_directory import make_ready as make_ready

_HOMES = {
    ".capture": "capture_run",
    ".export": "check_export export_module export_run",
    ".restore": "agree_on_resumption load_model restore_groups_and_freezing restore_run",
    ".rewind": "go_back",
    ".save_directory": "make_ready",
}

__getattr__ = on_call(__name__, _HOMES)
