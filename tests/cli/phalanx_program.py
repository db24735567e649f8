"""The command ``phalanx``, for a process that has its libraries imported: ``phalanx_program.py ARGUMENTS``."""

from __future__ import annotations

import sys

from phalanx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
