"""The hooks of mkdocs that add the navigation, the generated pages and the files for language models to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from api_pages import api_pages, class_entries, link_package, module_entries
from api_text import api_text
from error_page import error_page
from llms import llms_full, llms_index
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from page_index import Entry, Section, read_sections, table_row
from source_pages import LINK_OUT, entry_of, folder_page, linked_pages, page_of, source_page

ROOT = Path(__file__).parents[2]
COOKBOOK = ROOT / "examples" / "cookbook"
# A block that the tests do not run gives the reason behind its language, which the highlighter would not accept.
NO_RUN = re.compile(r"^```python no-run \(.*\)$", re.MULTILINE)
FOLDERS = {
    "examples": "Complete scripts, each on real data.",
    "examples/cookbook": "One-page scripts on one subject each. They run as they are, and end with a check.",
}
# The search shows tasks first, then guides; the names of the API, measured tables and specifications last.
API_BOOST = 0.2
BOOSTS = {"Start": 2.0, "How to": 4.0, "Scaling and proofs": 0.2}
ERRORS = Entry("Error messages", "errors.md", "every message with its cause, its exception and its exit code")


def site_sections() -> list[Section]:
    """Return the sections of the site: those of ``index.md``, with the recipes and the pages made from the source."""
    sections = read_sections((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    found = []
    for title, entries in sections:
        if title == "Cookbook":
            entries = [each._replace(path=page_of(each.path[3:])) for each in entries] + scripts_in(COOKBOOK)
        if title == "Reference":
            modules = [(each, *class_entries(each.title, ROOT)) for each in module_entries()]
            entries = [*entries, ERRORS, *(entry for module in modules for entry in module)]
        found.append(Section(title, entries))
    return found


def scripts_in(folder: Path) -> list[Entry]:
    """Return the entries of the scripts in a folder, in the order of their titles."""
    return sorted(entry_of(file, ROOT) for file in folder.glob("*.py"))


def package_folders() -> list[Path]:
    """Return the folders of the package, which is the repository itself."""
    return sorted(file.parent for file in ROOT.glob("*/__init__.py"))


def generated_pages() -> dict[str, str]:
    """Return the Markdown of the pages that no file in ``docs/`` holds, by the address of their source."""
    code = [*ROOT.glob("*.py"), *(file for folder in package_folders() for file in folder.rglob("*.py"))]
    pages = {ERRORS.path: error_page(ROOT, code)}
    pages |= api_pages(ROOT)
    for file in [*(ROOT / "examples").glob("*.py"), *COOKBOOK.glob("*.py")]:
        pages[page_of(file.relative_to(ROOT).as_posix())] = source_page(file, ROOT)
    for folder, text in FOLDERS.items():
        pages[page_of(folder)] = folder_page(Path(folder).name.capitalize(), text, scripts_in(ROOT / folder))
    for page in (ROOT / "docs").glob("*.md"):
        for link in LINK_OUT.finditer(page.read_text(encoding="utf-8")):
            if page_of(link["path"]) not in pages:
                pages[page_of(link["path"])] = source_page(ROOT / link["path"], ROOT)
    return pages


def on_startup(command: str, dirty: bool) -> None:
    """Make the package findable for mkdocstrings, which leaves out folders that do not exist when it is configured.

    It would search the whole checkout instead, with the environments in it.
    """
    link_package(ROOT, [*ROOT.glob("*.py"), *package_folders()])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = [{"Home": "index.md"}] + [{title: _nav(entries)} for title, entries in site_sections()]
    return config


def _nav(entries: list[Entry]) -> list[Any]:
    """Return the navigation of a section, in which the classes of a module are below it."""
    modules = {each.title: each.path for each in module_entries()}
    found: list[Any] = []
    below = found
    for each in entries:
        if each.title in modules:
            # Without a title of its own the page is the index of the group.
            found.append({each.title: (below := [each.path])})
        else:
            below.append({each.title: each.path})
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages. Those that are linked only are not in the navigation."""
    listed = {each.path for section in site_sections() for each in section.entries}
    for path, text in generated_pages().items():
        place = InclusionLevel.INCLUDED if path in listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, path, content=text, inclusion=place))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt a page of ``docs/``: links out of the folder, blocks that do not run, and rows of generated pages."""
    part = next((part for part in site_sections() if page.file.src_path in {each.path for each in part.entries}), None)
    boost = API_BOOST if page.file.src_path.startswith("api/") else BOOSTS.get(part.title if part else "", 1.0)
    page.meta["search"] = {"boost": boost}
    if page.file.generated_by:
        return markdown
    if page.file.src_path == "index.md":
        reference = next(part for part in read_sections(markdown) if part.title == "Reference")
        last = table_row(reference.entries[-1])
        markdown = markdown.replace(last, "\n".join([last, *map(table_row, [ERRORS, *module_entries()])]))
    return NO_RUN.sub("```python", linked_pages(markdown))


def on_env(env: Any, config: MkDocsConfig, files: Files) -> Any:
    """Add the files for language models, once the text of every page is known."""
    plugin: Any = config.plugins["mkdocstrings"]
    python = plugin.get_handler("python")
    options = python.get_options({})
    texts = {
        file.src_path: api_text(file.page.markdown or "", lambda target: python.collect(target, options))
        for file in files.documentation_pages()
        if file.page
    }
    addresses = {file.src_path: file.url for file in files.documentation_pages()}
    about = (config.site_name, config.site_description or "")
    sections = site_sections()
    files.append(File.generated(config, "llms.txt", content=llms_index(*about, sections, addresses)))
    files.append(File.generated(config, "llms-full.txt", content=llms_full(*about, sections, texts)))
    return env
