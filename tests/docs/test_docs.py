"""Every Python block of the docs and of the README runs; blocks of one page share their names. Links lead somewhere.

A block that cannot run in a test says so and why: ```` ```python no-run (needs two nodes) ````. It must still compile.
"""

from __future__ import annotations

import argparse
import inspect
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ranks import run_script

import phalanx
from phalanx.cli.main import build_parser

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


# Their code is below ``if __name__ == "__main__":``, so blocks alone do not run it.
SCRIPTS = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("quickstart", "several-gpus", "resume", "custom-loop", "slurm", "weights-and-biases")
    ),
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_blocks_of_a_page_are_a_script(name: str) -> None:
    done = run_script("\n".join(code for _, code in blocks(ROOT / name)))
    assert done.returncode == 0, done.stdout


def test_the_block_on_an_evaluation_aside_is_a_script(tmp_path: Path) -> None:
    # Its process imports the script, so it is run alone: the block before it trains where it is imported.
    _, code = blocks(ROOT / "docs/evaluation.md")[1]
    (tmp_path / "train.py").write_text(code)
    result = run_script(tmp_path / "train.py", cwd=tmp_path, timeout=120.0)
    assert result.returncode == 0, result.stdout


def unknown_commands(text: str) -> set[str]:
    """Return the commands on a page that neither the Makefile nor ``phalanx`` has."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE))
    # In blocks alone: in a sentence, it may be the command of another tool, which is answered with phalanx's own.
    pasted = set(re.findall(r"^    (?:\$ )?phalanx ([a-z][a-z-]*)", text, re.MULTILINE))
    return (named - targets) | (pasted - set(re.findall(r"[a-z-]+", build_parser().format_help())))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_commands_exist_and_a_block_that_does_not_run_says_why(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
    assert unknown_commands(text) == set()
    assert [info for info, _ in blocks(page) if info and not NO_RUN.fullmatch(info)] == []


def test_a_planted_command_is_found() -> None:
    assert unknown_commands("`make test` and `make tea`\n\n    $ phalanx why\n    phalanx wherefore\n") == {
        "tea",
        "wherefore",
    }


def test_the_verbs_that_the_page_on_fabric_names_exist() -> None:
    text = (ROOT / "docs" / "fabric.md").read_text(encoding="utf-8")
    verbs = [verb for verb in re.findall(r"`(\w+)`", text[text.index("## All methods") :]) if verb != "Fabric"]
    assert len(verbs) > 50
    assert [verb for verb in verbs if not hasattr(phalanx.Fabric, verb)] == []


def test_the_page_on_the_trainer_names_every_argument() -> None:
    text = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    arguments = [
        name for name, each in inspect.signature(phalanx.Trainer).parameters.items() if each.kind is each.KEYWORD_ONLY
    ]
    assert [name for name in arguments if f"`{name}" not in text] == []


def test_the_page_of_the_command_explains_each_command_and_option() -> None:
    sections = re.split(r"(?m)^## (?=`)", (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8"))
    explained = {name: text for text in sections[1:] for name in re.findall("`([a-z]+)`", text.splitlines()[0])}
    commands = next(action for action in build_parser()._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    assert set(explained) == set(commands.choices) - {"checkpoint"}
    missing = [
        (name, option)
        for name, text in explained.items()
        for action in commands.choices[name]._actions
        for option in action.option_strings
        if action.help != argparse.SUPPRESS and option not in ("-h", "--help", "--json") and option not in text
    ]
    assert missing == []
