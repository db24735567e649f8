"""The pictures of the README: the terminal that they are drawn from, their text, and the files that are checked in."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pictures import COLUMNS, MARGINS, PICTURES, report_picture, terminal_picture
from terminal import Screen, last_screen

PAGE = (
    "<html><head><style>h1{color:red}</style></head><body><main><header><h1>Run</h1></header>"
    '<div class="cols">host</div><div class="cmd">resume</div><div><svg data-chart="{}"><path d="M0 0" /></svg></div>'
    "<section>the machine</section><footer>folder</footer></main><script>x()</script></body></html>"
)


def shown(*parts: str) -> list[str]:
    """Return the lines of a screen after some output, without colors."""
    screen = Screen()
    for part in parts:
        screen.write(part)
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.ansi()).splitlines()


def texts_of(picture: str) -> list[str]:
    """Return the rows of text in a picture of a terminal, from top to bottom."""
    rows: dict[str, str] = {}
    for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        rows[node.get("y", "")] = rows.get(node.get("y", ""), "") + (node.text or "")
    return [text.replace("\xa0", " ").strip() for text in rows.values()]


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ("one\r\ntwo\n", ["one", "two"]),
        ("12 %\r100 %", ["100 %"]),
        ("progress\n\x1b[1A\x1b[2K\rdone\n", ["done"]),
        ("abc\r\x1b[1mX\x1b[0m", ["Xbc"]),
        ("abc\r\x1b[Kd", ["d"]),
        ("\x1b]0;title\x07x\x1b[?25l", ["x"]),
    ],
)
def test_the_screen_follows_control_sequences(output: str, lines: list[str]) -> None:
    assert shown(output) == lines


def test_colors_stay_with_their_letters() -> None:
    screen = Screen()
    screen.write("\x1b[32mgreen\x1b[0m plain")
    assert screen.ansi() == "\x1b[32mgreen\x1b[0m plain\x1b[0m"


def test_a_command_runs_in_a_terminal_of_the_given_width(tmp_path: Path) -> None:
    program = "import os, sys; print(os.get_terminal_size().columns, sys.stdout.isatty(), os.environ['GIVEN'])"
    screen = last_screen([sys.executable, "-S", "-c", program], tmp_path, {"GIVEN": "x"}, 77)
    assert shown(screen.ansi()) == ["77 True x"]


def test_a_command_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 3:\nno"):
        last_screen([sys.executable, "-S", "-c", "print('no'); raise SystemExit(3)"], tmp_path, {}, 80)


def test_the_picture_of_a_terminal_has_every_row() -> None:
    picture = terminal_picture("\x1b[32mepoch 1\x1b[0m\nlast_row", "python x.py")
    assert [text for text in texts_of(picture) if text] == ["phalanx", "$ python x.py", "epoch 1", "last_row"]
    assert "@font-face" not in picture
    # The picture ends below the descenders of the last row.
    [height] = re.findall(r'run-clip-terminal">\s*<rect[^>]* height="([\d.]+)"', picture)
    [baseline] = re.findall(r'y="([\d.]+)"[^>]*>last_row<', picture)
    assert float(baseline) + 5 < float(height)


def test_the_picture_of_a_report_ends_with_its_curves() -> None:
    picture = report_picture(PAGE)
    ElementTree.fromstring(picture)
    assert "<h1>Run</h1>" in picture
    assert '<path d="M0 0"' in picture
    assert "h1{color:red}" in picture
    for left_out in ("host", "resume", "the machine", "folder", "data-chart", "script"):
        assert left_out not in picture


@pytest.mark.parametrize("name", ["run.svg", "report.svg"])
def test_the_files_load_nothing(name: str) -> None:
    text = (PICTURES / name).read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert re.findall(r"(?:href|src)=|url\((?!#)|@import|/tmp/|/home/|/root", text) == []


def test_no_row_of_the_picture_is_wider_than_the_terminal() -> None:
    rows = texts_of((PICTURES / "run.svg").read_text(encoding="utf-8"))
    assert rows[1].startswith("$ python examples/digits.py")
    assert max(map(len, rows)) <= COLUMNS + MARGINS[1]
    assert any("version_0/report.html" in row for row in rows)
