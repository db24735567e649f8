"""Precisions with one dtype for parameters and computation."""

from __future__ import annotations

import torch

from ..framework.core.precision import Precision


class Float32True(Precision):
    """``"32-true"``, the default: torch's own dtypes everywhere."""

    name = "32-true"


class Float64True(Precision):
    """``"64-true"``: parameters, batches and computation in fp64."""

    name = "64-true"
    parameter_dtype = torch.float64


class BFloat16True(Precision):
    """``"bf16-true"``: parameters, batches and computation in bf16."""

    name = "bf16-true"
    parameter_dtype = torch.bfloat16


class Float16True(Precision):
    """``"16-true"``: parameters, batches and computation in fp16, without a loss scale."""

    name = "16-true"
    parameter_dtype = torch.float16
