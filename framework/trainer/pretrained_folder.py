"""``write_pretrained``: the model of a run, or of an ended one, as a folder of Hugging Face's libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..checkpoint.consolidate import AVERAGES
from ..checkpoint.manifest import MODEL
from ..core.errors import ConfigurationError
from ..pretrained import save_folder, save_held
from ..resume.capture import live_weights
from .late_save import with_all_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ..pretrained.saving import FolderOrder
    from .session import Session


def write_pretrained(session: Session, order: FolderOrder) -> Path:
    """Write the model of the run in progress, of the last fit, or of the last module; return the folder. Collective.

    Raises:
        ConfigurationError: there is no such model or average, or this process does not hold the weights.
        StorageError: the folder cannot be written.
    """
    run, ended = session.run, session.records.ended_fit
    if run is not None:
        run.check_together("save_pretrained")
        sections = {MODEL: live_weights(run), AVERAGES: run.averages.shards()}
        folder: Path = save_folder(run.world, run.module, sections, not run.traits.replicates, order)
        return folder
    if ended is not None and ended.is_usable:
        with with_all_ranks(session):
            return ended.save_pretrained(order)
    if session.module is None:
        raise ConfigurationError("save_pretrained writes a module that was fitted or evaluated: call fit first.")
    if session.view.is_global_zero:
        save_held(session.module, order)
    return order.directory
