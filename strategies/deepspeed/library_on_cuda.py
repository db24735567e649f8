"""Imports DeepSpeed for ranks on CUDA, in the process that they are forked from."""

from __future__ import annotations

from .library import import_deepspeed

import_deepspeed("cuda")
