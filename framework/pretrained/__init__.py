"""Weights in the folders of Hugging Face's libraries: read in slices, compared with a module, loaded, written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .loading import (
        given_at_once as given_at_once,
        load_alone as load_alone,
        load_into as load_into,
        plan_loading as plan_loading,
    )
    from .saving import folder_order as folder_order, save_folder as save_folder, save_held as save_held

_HOMES = {
    ".loading": "given_at_once load_alone load_into plan_loading",
    ".saving": "folder_order save_folder save_held",
}

__getattr__ = on_call(__name__, _HOMES)
