"""Precisions with one dtype for parameters and computation."""

from __future__ import annotations

import torch

from ..framework.core.precision import Precision


class Float32True(Precision):
    """``"32-true"``, the default: parameters in fp32, or in the dtype that the user gave them; nothing is converted."""

    name = "32-true"


class Float64True(Precision):
    """``"64-true"``: parameters, batches and computation in fp64, and in complex128."""

    name = "64-true"
    parameter_dtype = torch.float64


class BFloat16True(Precision):
    """``"bf16-true"``: parameters, batches and computation in bf16."""

    name = "bf16-true"
    parameter_dtype = torch.bfloat16


class Float16True(Precision):
    """``"16-true"``: parameters, batches and computation in fp16. Losses are not scaled, except by ZeRO's engines."""

    name = "16-true"
    parameter_dtype = torch.float16
