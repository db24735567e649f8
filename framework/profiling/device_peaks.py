"""Peak FLOPs per second of known GPUs, by the dtype of their matrix products.

The numbers are those of the vendors' data sheets for dense matrices, without sparsity, with accumulation in fp32.
"""

from __future__ import annotations

import re

import torch

# In TFLOPs per second: fp32 without and with TF32, and bf16 and fp16, which are equal.
# Names are compared as they are listed, so a longer name precedes a shorter one that it contains.
_TERAFLOPS: tuple[tuple[str, float, float, float], ...] = (
    ("GB200", 80.0, 1250.0, 2500.0),
    ("B200", 80.0, 1125.0, 2250.0),
    ("H200 NVL", 60.0, 417.5, 835.5),
    ("H200", 66.9, 494.7, 989.4),
    ("GH200", 66.9, 494.7, 989.4),
    ("H100 NVL", 60.0, 417.5, 835.5),
    ("H100 PCIe", 51.2, 378.0, 756.0),
    ("H100", 66.9, 494.7, 989.4),
    ("H800 PCIe", 51.2, 378.0, 756.0),
    ("H800", 66.9, 494.7, 989.4),
    ("H20", 44.0, 74.0, 148.0),
    ("A100", 19.5, 156.0, 312.0),
    ("A800", 19.5, 156.0, 312.0),
    ("A30", 10.3, 82.5, 165.0),
    ("A40", 37.4, 74.8, 149.7),
    ("A10G", 31.5, 35.0, 70.0),
    ("A10", 31.2, 62.5, 125.0),
    ("L40S", 91.6, 183.0, 362.1),
    ("L40", 90.5, 90.5, 181.1),
    ("L4", 30.3, 60.0, 121.0),
    ("RTX 6000 Ada", 91.1, 182.1, 364.2),
    ("RTX A6000", 38.7, 77.4, 154.8),
    ("RTX 4090", 82.6, 82.6, 165.2),
    ("RTX 3090", 35.6, 35.6, 71.2),
)
# Without TF32 and bf16: fp32 and fp16.
_OLDER: tuple[tuple[str, float, float], ...] = (
    ("V100-PCIE", 14.0, 112.0),
    ("V100", 15.7, 125.0),
    ("T4", 8.1, 65.0),
)
# A slice of a device, and a device with less power than another one of the same name.
_PARTIAL = ("MIG", "Laptop", "Max-Q")


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a CUDA device for matrix products in ``dtype``; None for an unknown device or dtype.

    For fp32 it is that of TF32 where torch may use it.
    """
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), dtype, tf32)


def peak_flops(name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """Return the peak of the device of this name, as ``torch.cuda.get_device_name`` gives it."""
    if any(_is_named(part, name) for part in _PARTIAL):
        return None
    for known, single, tensor_float, half in _TERAFLOPS:
        if _is_named(known, name):
            by_dtype = {torch.float32: tensor_float if tf32 else single, torch.bfloat16: half, torch.float16: half}
            return _flops(by_dtype.get(dtype))
    for known, single, half in _OLDER:
        if _is_named(known, name):
            return _flops({torch.float32: single, torch.float16: half}.get(dtype))
    return None


def _is_named(known: str, name: str) -> bool:
    """Whether a device's name contains a known one as whole words: "A10" is not in "A100"."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(known)}(?![A-Za-z0-9])", name) is not None


def _flops(teraflops: float | None) -> float | None:
    return None if teraflops is None else teraflops * 1e12
