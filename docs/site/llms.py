"""``llms.txt`` and ``llms-full.txt``: the site as text for language models, in the format of llmstxt.org."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from page_index import Section

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def llms_index(name: str, description: str, sections: Iterable[Section], addresses: Mapping[str, str]) -> str:
    """Return ``llms.txt``: a list of the pages as Markdown, with the contents of each.

    Args:
        addresses: the address of each page in the site, by that of its source.
    """
    lines = [f"# {name}", "", f"> {description}"]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        lines += [f"- [{each.title}]({addresses[each.path]}): {_plain(each.contents)}" for each in section.entries]
    return "\n".join(lines) + "\n"


def llms_full(name: str, description: str, sections: Iterable[Section], texts: Mapping[str, str]) -> str:
    """Return ``llms-full.txt``: the texts of all pages in the order of the navigation.

    Args:
        texts: the Markdown of each page, by the address of its source.
    """
    parts = [f"# {name}\n\n> {description}\n"]
    parts += [f"<!-- {each.path} -->\n\n{texts[each.path].strip()}\n" for part in sections for each in part.entries]
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Return Markdown with the text of its links alone."""
    return _LINK.sub(r"\1", text)
