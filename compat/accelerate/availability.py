"""``is_..._available``: whether a package is installed, or hardware is present."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

# The packages whose name is not that of the function.
_PACKAGES = {
    "bnb": "bitsandbytes",
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "fp8": "torchao",
    "lomo": "lomo_optim",
    "megatron_lm": "megatron",
    "torchdata_stateful_dataloader": "torchdata",
    "transformer_engine_mxfp8": "transformer_engine",
}
# Hardware, and libraries for it, that phalanx does not train on.
_ABSENT = (
    *("hpu", "mlu", "mps", "musa", "neuron", "npu", "rocm", "sdaa", "torch_xla", "xpu", "xccl", "pippy"),
    "bitsandbytes_multi_backend",
)
_PRESENT = ("bf16", "fp16", "weights_only")


def availability(name: str) -> Callable[..., bool]:
    """Return the function of a name such as ``is_wandb_available``."""
    what = name.removeprefix("is_").removesuffix("_available")

    def is_available(*args: object, **kwargs: object) -> bool:
        if what == "cuda":
            return torch.cuda.is_available()
        if what in _PRESENT or what in _ABSENT:
            return what in _PRESENT
        return find_spec(_PACKAGES.get(what, what)) is not None

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = f"Return whether {_PACKAGES.get(what, what)} can be used."
    return is_available


def is_availability(name: str) -> bool:
    """Whether a name is that of such a function."""
    return name.startswith("is_") and name.endswith("_available")
