"""Names that only the example programs of Lightning use."""

from __future__ import annotations

__all__ = ["cli_lightning_logo"]


def cli_lightning_logo() -> None:
    """Print nothing: the logo is Lightning's."""
