"""Objects that have the attributes of another one: ``Wrapper``, and ``Proxy``, which also has its class."""

from __future__ import annotations

from typing import Any


class Wrapper:
    """Has the attributes of another object, beside its own."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        # A copy has no original before its state is set.
        if name.startswith("__") or "_original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._original, name)


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
