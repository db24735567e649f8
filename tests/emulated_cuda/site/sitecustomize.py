"""Gives an interpreter that has this folder on its PYTHONPATH two emulated CUDA devices, and all that it starts too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import cuda_emulation

cuda_emulation.enable()
