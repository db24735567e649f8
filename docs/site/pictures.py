"""Draw ``docs/pictures/run.svg`` and ``report.svg`` from a real run of ``examples/digits.py``: ``make pictures``.

The first one is the terminal after the run, exported by rich. The second one is the upper part of ``report.html`` in an
SVG, so that it has the page's own style, in light and dark.
"""

from __future__ import annotations

import re
import sys
import tempfile
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group
from rich.padding import Padding
from rich.terminal_theme import MONOKAI
from rich.text import Text
from terminal import last_screen

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
COLUMNS = 122
# Empty rows and columns around the text: top, right, bottom and left. Without them rich cuts the last row.
MARGINS = (0, 2, 1, 2)
COMMAND = ["examples/digits.py", "--strategy", "ddp", "--devices", "2"]
# In pixels. The height shows the summary and the curves.
REPORT_SIZE = (1200, 893)
# The fonts that rich would load from another host.
_FONT_FACE = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


def main() -> None:
    """Run the example, and write both pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "examples").symlink_to(ROOT / "examples")
        # The terminal shows commands as a user with an active environment sees them.
        variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PHALANX_PROGRESS": "rich"}
        variables |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        screen = last_screen([sys.executable, *COMMAND], directory, variables, COLUMNS)
        text = screen.ansi().replace(f"{directory}/", "")
        page = next(directory.glob("runs/digits/*/report.html")).read_text(encoding="utf-8")
    (PICTURES / "run.svg").write_text(terminal_picture(text, f"python {' '.join(COMMAND)}"), encoding="utf-8")
    (PICTURES / "report.svg").write_text(report_picture(page), encoding="utf-8")
    for path in sorted(PICTURES.glob("*.svg")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.1f} kB")


def terminal_picture(text: str, command: str) -> str:
    """Return an SVG of a terminal that shows a command and its output."""
    _, right, _, left = MARGINS
    console = Console(record=True, width=COLUMNS + left + right, file=StringIO())
    console.print(Padding(Group(Text(f"$ {command}", style="bold"), Text.from_ansi(text)), MARGINS))
    code_format = _FONT_FACE.sub("", CONSOLE_SVG_FORMAT)
    return console.export_svg(title="phalanx", theme=MONOKAI, code_format=code_format, unique_id="run")


def report_picture(page: str) -> str:
    """Return an SVG that shows the summary and the curves of a report's page."""
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    [main] = re.findall(r"<main>.*</main>", page, re.DOTALL)
    body = ElementTree.fromstring(main)
    # The sections after the curves name the machine and its folders.
    for part in list(body):
        if part.tag in ("section", "footer") or part.get("class") in ("cols", "cmd"):
            body.remove(part)
    for chart in body.iter("svg"):
        chart.set("xmlns", "http://www.w3.org/2000/svg")
        # For the page's script, which a picture does not have.
        chart.attrib.pop("data-chart", None)
    width, height = REPORT_SIZE
    content = ElementTree.tostring(body, encoding="unicode")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<title>The report of a run</title><style>{style}</style>"
        f'<foreignObject width="{width}" height="{height}"><body xmlns="http://www.w3.org/1999/xhtml" '
        f'style="height:{height}px">{content}</body></foreignObject></svg>\n'
    )


if __name__ == "__main__":
    main()
