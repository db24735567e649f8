"""Configuration files and command lines that create a model, its data and a Trainer: ``TrainerCLI``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .parser import (
        create_parser as create_parser,
        instantiate as instantiate,
        parse_configuration as parse_configuration,
    )

# jsonargparse is an extra: the class TrainerCLI exists without it.
__getattr__ = on_call(__name__, {".parser": "create_parser instantiate parse_configuration"})
