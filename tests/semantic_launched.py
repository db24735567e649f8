"""A cell of the table of semantics as a user starts it: a script, whose ranks a launcher watches.

Run with a strategy, a number of ranks, an action and a moment.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace

STALL_SECONDS = 4.0
"""After how long without progress the launcher ends the ranks and says where they wait."""


def main() -> None:
    """Train a cell."""
    from semantic_cells import ACTIONS, Layout, given_strategy
    from semantic_program import run

    strategy, ranks, name, moment = sys.argv[1:5]
    action = ACTIONS[name]
    action = replace(action, settings={**action.settings, "stall_timeout": STALL_SECONDS})
    with tempfile.TemporaryDirectory() as folder:
        given, parallel = given_strategy(Layout(strategy, int(ranks)), folder)
        run(action, moment, given, int(ranks), parallel, folder)


if __name__ == "__main__":
    main()
