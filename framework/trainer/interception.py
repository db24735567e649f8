"""The settings of a Trainer, which are not always those that its program gives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.interception import current_interceptor
from ..system.entry_script import return_to_directory
from ..system.environment import script_overrides

if TYPE_CHECKING:
    from .settings import TrainerSettings


def requested_settings(given: TrainerSettings) -> TrainerSettings:
    """Return the settings that a run is to have: those of its program, changed by the command line."""
    return_to_directory()
    overrides = script_overrides()
    return given if overrides is None else replace(given, **overrides.trainer)


def settings_in_use(requested: TrainerSettings) -> TrainerSettings:
    """Return the settings of a Trainer: those requested, changed by the interceptor if there is one."""
    interceptor = current_interceptor()
    settings: TrainerSettings = requested if interceptor is None else interceptor.settings(requested)
    return settings
