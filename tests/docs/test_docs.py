"""Every Python block of the docs and of the README runs; blocks of one page share their names. Links lead somewhere.

A block that cannot run in a test says so and why: ```` ```python no-run (needs two nodes) ````. It must still compile.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ranks import run_script

import phalanx

ROOT = Path(phalanx.__file__).parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)[^)]*\)")
NO_RUN = re.compile(r" no-run \(.+\)")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the info string and the code of each block; line numbers in the code are those of the page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2))
        found.append((match.group(1), "\n" * line + match.group(2)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {"__name__": "__docs__"}
    for info, code in blocks(page):
        compiled = compile(code, str(page), "exec", dont_inherit=True)
        if not info:
            exec(compiled, names)


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_the_blocks_of_the_first_pages_are_a_script(name: str) -> None:
    done = run_script("\n".join(code for _, code in blocks(ROOT / name)))
    assert done.returncode == 0, done.stdout
    assert "ddp, 2 ranks" in done.stdout
    assert "curves " in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_block_that_does_not_run_says_why(page: Path) -> None:
    assert [info for info, _ in blocks(page) if info and not NO_RUN.fullmatch(info)] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_map_names_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page})" not in text} == set()


def test_the_verbs_that_the_page_on_fabric_names_exist() -> None:
    text = (ROOT / "docs" / "fabric.md").read_text(encoding="utf-8")
    verbs = re.findall(r"`(\w+)`", text[text.index("## All methods") :])
    assert len(verbs) > 50
    assert [verb for verb in verbs if not hasattr(phalanx.Fabric, verb)] == []


def test_the_page_on_the_trainer_names_every_argument() -> None:
    text = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    arguments = [
        name for name, each in inspect.signature(phalanx.Trainer).parameters.items() if each.kind is each.KEYWORD_ONLY
    ]
    assert [name for name in arguments if f"`{name}" not in text] == []
