"""The site builds without a warning, holds every page, and loads nothing from elsewhere. Its hooks by themselves."""

from __future__ import annotations

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import hooks
import pytest
from error_page import ErrorSite, error_classes, error_page, sites_of
from page_index import WIDE, read_sections, table_row
from ranks import run_command, run_script
from searches import QUERIES, missed
from source_pages import linked_pages, page_of, source_page, whole_code

import phalanx

ROOT = Path(phalanx.__file__).parent
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


class Loaded(HTMLParser):
    """Collects the addresses that a browser loads with a page; links that a reader follows are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(given.get("src") or "")
        if tag == "link" and given.get("rel") != "canonical":
            self.addresses.append(given.get("href") or "")


def loaded_from_elsewhere(page: str) -> list[str]:
    """Return the addresses of other hosts that a page loads."""
    parser = Loaded()
    parser.feed(page)
    return [address for address in parser.addresses if "//" in address]


def test_the_site_builds(tmp_path: Path) -> None:
    """One test: with the tests spread over processes, a shared build would be one for each of them."""
    # As on a fresh clone: the links to the package are made in time for mkdocstrings.
    shutil.rmtree(ROOT / "build" / "package", ignore_errors=True)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = run_command(command, ROOT, env={"NO_MKDOCS_2_WARNING": "1"}, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "")

    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    listed = {Path(entry.path).with_suffix("").as_posix() for part in hooks.site_sections() for entry in part.entries}
    assert listed <= built
    assert {
        "quickstart",
        "errors",
        "api/phalanx",
        "api/phalanx.callbacks.EarlyStopping",
        "examples/cookbook/gan",
        "examples/digits",
    } <= built
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {path.name: found for path, page in pages.items() if (found := loaded_from_elsewhere(page))} == {}

    # Search works without a server: the page loads the index as a script, and a stand-in for a worker.
    assert (site / "search" / "search_index.js").is_file()
    assert (site / "assets" / "iframe-worker.js").is_file()

    assert len(QUERIES) >= 40
    assert missed(site) == {}

    quickstart = pages[site / "quickstart.html"]
    assert '<script src="assets/iframe-worker.js">' in quickstart
    assert 'href="errors.html"' in quickstart
    assert "no-run" not in quickstart
    trainer = pages[site / "api" / "phalanx.Trainer.html"]
    assert "gradient_clip_val" in trainer
    assert "Raises" in trainer

    index, full = ((site / name).read_text(encoding="utf-8") for name in ("llms.txt", "llms-full.txt"))
    assert index.startswith("# phalanx\n\n> ")
    linked = set(re.findall(r"^- \[[^\]]+\]\(([^)]+)\): .", index, re.MULTILINE))
    assert {path.removesuffix(".html") for path in linked} == listed
    assert [address for address in linked if not (site / address).is_file()] == []
    assert "class Regressor(TrainModule)" in full
    assert "class GAN(TrainModule)" in full
    assert "def fit" in full


def test_a_resource_of_another_host_is_found() -> None:
    page = '<a href="https://a.org">a</a><script src="x.js"></script><link rel="stylesheet" href="//b.org/c.css">'
    assert loaded_from_elsewhere(page) == ["//b.org/c.css"]
    assert loaded_from_elsewhere('<script src="https://unpkg.com/a"></script>') == ["https://unpkg.com/a"]


def test_every_page_is_listed_once() -> None:
    paths = [entry.path for section in read_sections(INDEX) for entry in section.entries]
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(path for path in paths if "/" not in path) == sorted(pages)


def test_sections_are_read_from_tables() -> None:
    row = "| [One](one.md) | a page with `a | b` |"
    [section] = read_sections(f"# T\n\n## Guides\n\n| page | contents |\n|---|---|\n{row}\n\n## Empty\n\ntext\n")
    assert (section.title, [tuple(entry) for entry in section.entries]) == (
        "Guides",
        [("One", "one.md", "a page with `a | b`")],
    )
    assert table_row(section.entries[0]) == row


def test_links_out_of_the_folder_lead_to_pages() -> None:
    text = (
        "[a](../examples/gpt.py) [b](../examples/cookbook) [c](../tests/x/README.md#d) [e](data.md) [f](https://g/../h)"
    )
    assert linked_pages(text) == (
        "[a](examples/gpt.md) [b](examples/cookbook/index.md) [c](tests/x/README.md#d) [e](data.md) [f](https://g/../h)"
    )
    assert page_of("examples/gpt.py") == "examples/gpt.md"


def test_links_of_files_elsewhere_lead_to_pages(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("[a](docs/gpus.md#x) [b](../../docs/data.md) [c](https://g/docs/d.md)")
    assert source_page(file, tmp_path) == "[a](gpus.md#x) [b](../../data.md) [c](https://g/docs/d.md)"


def test_the_page_of_a_recipe_has_the_code_that_it_shares(tmp_path: Path) -> None:
    shared = '"""The shared part."""\n\nimport os\nimport sys\n\n# Why.\nX = sys.argv\n\n\ndef x():\n    return os, X\n'
    (tmp_path / "shared.py").write_text(f"{shared}\n\ndef unused():\n    pass\n")
    file = tmp_path / "one.py"
    file.write_text('"""Own loop: train ``x``.\n\nMore.\n"""\n\nimport os\nfrom shared import x\n\nprint(x(), os)\n')
    code = "import os\nimport sys\n\n\n# Why.\nX = sys.argv\n\n\ndef x():\n    return os, X\n\nprint(x(), os)"
    page = source_page(file, tmp_path)
    assert page.startswith(
        f'{WIDE}# Own loop\n\nOwn loop: train `x`.\n\nMore.\n\n```python title="one.py"\n{code}\n```\n'
    )
    assert page.endswith("are in [The shared part](shared.md).\n")


def test_recipes_can_be_pasted(tmp_path: Path) -> None:
    recipes = [file for file in hooks.COOKBOOK.glob("*.py") if file.stem != "tasks"]
    for file in recipes:
        (tmp_path / file.name).write_text(whole_code(file) + "\n")
    assert "from tasks" not in "".join(file.read_text() for file in tmp_path.glob("*.py"))
    undefined = ["-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,F811,F823,E9", str(tmp_path)]
    checked = run_command([sys.executable, *undefined], tmp_path, timeout=60)
    assert checked.returncode == 0, checked.stdout
    done = run_script(tmp_path / "early_stopping.py", "--short", "--out", str(tmp_path / "runs"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout


ERRORS = '''
class PhalanxError(Exception):
    """Root."""
    exit_code: int = 1
class Wrong(PhalanxError, ValueError):
    """Broken."""
    exit_code = 78
class Closer(Wrong):
    """Closer."""
'''
RAISING = """
def check(value, names):
    if value < 0:
        raise Wrong(f"size={value!r}: give {len(names)} or {names.size}." + hint(value))
    try:
        work()
    except OSError as error:
        message = "a" if value else "b | c"
        raise errors.Closer(message) from error
    raise Wrong(described(value))
    raise ValueError("of another class")

def described(value):
    return f"described {value}"
"""


def test_messages_are_found_with_cause_and_exit_code(tmp_path: Path) -> None:
    for name, source in (("framework/core/errors.py", ERRORS), ("loggers/one.py", RAISING)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    classes = error_classes(ERRORS)
    assert [(each.name, each.exit_code) for each in classes] == [("PhalanxError", 1), ("Wrong", 78), ("Closer", 78)]

    sites = set(sites_of(tmp_path / "loggers/one.py", tmp_path, {each.name for each in classes}))
    module = "phalanx.loggers.one"
    assert sites == {
        ErrorSite("size={value}: give … or {size}.…", "value < 0", module, "Wrong"),
        ErrorSite("a", "except OSError", module, "Closer"),
        ErrorSite("b | c", "except OSError", module, "Closer"),
        ErrorSite("described {value}", "", module, "Wrong"),
    }
    page = error_page(tmp_path, [tmp_path / "loggers/one.py"])
    assert "| [`Wrong`](#wrong) | 78 | Broken. | 2 |" in page
    assert "| b \\| c | `except OSError` | `phalanx.loggers.one` |" in page


@pytest.fixture(scope="module")
def errors() -> str:
    """Return the page of all error messages."""
    files = [file for folder in hooks.package_folders() for file in folder.rglob("*.py")]
    return error_page(ROOT, [*ROOT.glob("*.py"), *files])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("phalanx.framework.trainer", "there is no run with files"),
        ("phalanx.strategies", "DeepSpeed"),
        ("phalanx.callbacks", "BackboneFinetuning"),
    ],
)
def test_the_page_of_errors_covers_each_part(errors: str, module: str, message: str) -> None:
    rows = [row for row in errors.splitlines() if f"`{module}" in row]
    assert len(rows) > 5
    assert [row for row in rows if message in row]


def test_no_message_is_lost(errors: str) -> None:
    """Each call of an exception's class in the source is on the page, or has no text of its own."""
    calls = sum(
        len(re.findall(r"raise (?:Configuration|Checkpoint)Error\(\s*f?[\"']", file.read_text(encoding="utf-8")))
        for folder in ("framework", "strategies", "callbacks", "loggers")
        for file in (ROOT / folder).rglob("*.py")
    )
    assert calls > 300
    assert errors.count("| `phalanx.") > calls
