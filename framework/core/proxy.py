"""``Proxy``: stands for another object, as set-up optimizers and schedulers do."""

from __future__ import annotations

from typing import Any


class Proxy:
    """Stands for another object: it is an instance of that object's class, and has its attributes.

    Attributes:
        _original: The object that it stands for.
    """

    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "_original", original)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class for ``isinstance``; ``type`` returns the true one."""
        # Before __init__, as in a copy, there is no original.
        return type(self.__dict__["_original"]) if "_original" in self.__dict__ else type(self)

    def __getattr__(self, name: str) -> Any:
        if "_original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_original"], name)
