"""Plain tables, readable in a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table under its title; floats with one decimal."""
    text = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(head), *text]) for column in range(len(head))]
    lines = [f"\n### {title}\n"]
    for line in [list(head), ["-" * width for width in widths], *text]:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    print(table(title, head, rows), flush=True)
