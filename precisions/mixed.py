"""Mixed precisions: fp32 parameters, forward passes under ``torch.autocast`` in a half precision."""

from __future__ import annotations

import torch

from ..framework.core.precision import LossScaler, Precision


class BFloat16Mixed(Precision):
    """``"bf16-mixed"``: fp32 parameters, autocast to bf16. bf16 has fp32's range, so losses need no scale."""

    name = "bf16-mixed"
    compute_dtype = torch.bfloat16


class Float16Mixed(Precision):
    """``"16-mixed"``: fp32 parameters, autocast to fp16, dynamic loss scaling."""

    name = "16-mixed"
    compute_dtype = torch.float16

    def loss_scaler(self) -> LossScaler:
        """Return a new scaler with an initial scale of 2**16, which doubles after 2000 good updates in a row."""
        return LossScaler()
