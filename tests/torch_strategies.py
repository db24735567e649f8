"""The strategies that leave layers and optimizers to torch: fp8 and quantized optimizers train under them."""

from __future__ import annotations

from typing import Any

from phalanx.strategies import FSDPStrategy

CHECKPOINTING = "fsdp+checkpointing"
RANKS = {
    "single": 1,
    "ddp": 2,
    "ddp_find_unused_parameters_true": 2,
    "fsdp": 2,
    CHECKPOINTING: 2,
    "hsdp": 2,
    "fsdp-offload": 2,
}
"""The number of ranks that each is tested with."""


def strategy_named(name: str) -> Any:
    """Return the argument ``strategy`` for one of the names."""
    return FSDPStrategy(activation_checkpointing=True) if name == CHECKPOINTING else name
