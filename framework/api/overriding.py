"""Detection of overridden methods of the base classes that users subclass."""

from __future__ import annotations


def is_overridden(name: str, owner: object, base: type) -> bool:
    """Whether ``name`` differs from the base class's, in the class of an object or on the object itself.

    An attribute None switches a step, a hook or a loader off: it counts as not overridden.
    """
    attributes = vars(owner)
    if name in attributes:
        return attributes[name] is not None
    own = getattr(type(owner), name, None)
    return own is not None and own is not getattr(base, name, None)
