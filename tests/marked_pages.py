"""Tables that scripts write into pages, between two comments."""

from __future__ import annotations

from pathlib import Path


def write_table(page: Path, name: str, text: str) -> None:
    """Replace what a page has between the comments ``<!-- NAME -->`` and ``<!-- end of the NAME -->``.

    Raises:
        ValueError: the page has no such comments.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of the {name} -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no part between {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
