"""Run a script, and every process that it starts, with two emulated CUDA devices: ``run.py SCRIPT ARGUMENTS``."""

from __future__ import annotations

import os
import sys

import cuda_emulation
import emulation_build

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    emulation_build.libraries()
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **cuda_emulation.variables()})
