"""Saving and restoring the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .capture import capture_run as capture_run
    from .export import check_export as check_export
    from .export import export_module as export_module
    from .export import export_run as export_run
    from .restore import agree_on_resumption as agree_on_resumption
    from .restore import load_model as load_model
    from .restore import restore_groups_and_freezing as restore_groups_and_freezing
    from .restore import restore_run as restore_run
    from .save_directory import make_ready as make_ready

_HOMES = {
    "make_ready": ".save_directory",
    "agree_on_resumption": ".restore",
    "capture_run": ".capture",
    "check_export": ".export",
    "export_module": ".export",
    "export_run": ".export",
    "load_model": ".restore",
    "restore_groups_and_freezing": ".restore",
    "restore_run": ".restore",
}

__getattr__ = on_call(__name__, _HOMES)
