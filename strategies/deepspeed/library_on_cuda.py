"""Imports DeepSpeed for ranks on CUDA: see ``library.py``."""

from __future__ import annotations

from .library import import_deepspeed

import_deepspeed("cuda")
