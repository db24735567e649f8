"""The API as plain Markdown for ``llms-full.txt``: signatures and docstrings of the objects that mkdocstrings read."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc

import griffe

# A directive of a page of the API.
DIRECTIVE = re.compile(r"^::: (?P<target>\S+)$", re.MULTILINE)


def api_text(page: str, collect: Callable[[str], griffe.Object]) -> str:
    """Return a page of the API with each directive replaced by the text of its object.

    Args:
        collect: returns the object of a full name.
    """
    return DIRECTIVE.sub(lambda directive: object_text(collect(directive["target"])), page)


def object_text(described: griffe.Object) -> str:
    """Return the signature and the docstring of a class or function, and those of the public methods of a class."""
    parts = [f"## {described.name}", f"`{signature(described)}`", _documentation(described)]
    for name, member in described.all_members.items() if isinstance(described, griffe.Class) else ():
        if not name.startswith("_") and member.is_function:
            parts += [f"### {described.name}.{name}", f"`{signature(_target(member))}`", _documentation(member)]
    return "\n\n".join(part for part in parts if part)


def signature(described: griffe.Object) -> str:
    """Return the name of an object with the parameters that it takes."""
    if isinstance(described, griffe.Function):
        return str(described.signature())
    if isinstance(described, griffe.Class):
        names = [parameter.name for parameter in described.parameters if parameter.name != "self"]
        return f"class {described.name}({', '.join(names)})"
    return described.name


def _target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


def _documentation(described: griffe.Object | griffe.Alias) -> str:
    return cleandoc(described.docstring.value) if described.docstring else ""
