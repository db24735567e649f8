"""The base of an adapter, of which peft reads the config to see whether the vocabulary was resized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FILE = "config.json"


@contextmanager
def offline_base(config: Any) -> Iterator[None]:
    """Let a ``PeftConfig`` name the base's folder on this machine, or none, so that peft uses no network."""
    given = config.base_model_name_or_path
    config.base_model_name_or_path = _folder_of(given)
    try:
        yield
    finally:
        config.base_model_name_or_path = given


def _folder_of(name: str | None) -> str | None:
    if not name or (Path(name) / _FILE).is_file():
        return name
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, _FILE)
    except HFValidationError:  # a folder that is no longer there
        return None
    return str(Path(cached).parent) if isinstance(cached, str) else None
