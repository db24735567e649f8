"""Named DeepSpeed strategies: one function for each stage of ZeRO and place of its state.

Every function also takes the keyword arguments of ``DeepSpeedStrategy``, which take precedence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...framework.system.environment import nvme_path
from .strategy import DeepSpeedStrategy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import ZeroArguments


def zero1(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state."""
    return _named("zero1", arguments, stage=1)


def zero2(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state and gradients."""
    return _named("zero2", arguments, stage=2)


def zero3(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state, gradients and parameters."""
    return _named("zero3", arguments, stage=3)


def zero1_offload(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state, and keep it on the CPU."""
    return _named("zero1-offload", arguments, stage=1, offload_optimizer="cpu")


def zero2_offload(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state and gradients, and keep the state on the CPU."""
    return _named("zero2-offload", arguments, stage=2, offload_optimizer="cpu")


def zero3_offload(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split everything, and keep the optimizer's state and parameters on the CPU."""
    return _named("zero3-offload", arguments, stage=3, offload_optimizer="cpu", offload_parameters="cpu")


def zero3_nvme(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split everything, and keep the optimizer's state and parameters on a disk.

    The folder is ``nvme_path``, or by default the one in the environment variable ``PHALANX_NVME_PATH``.
    """
    return _named(
        "zero3-nvme",
        arguments,
        stage=3,
        offload_optimizer="nvme",
        offload_parameters="nvme",
        nvme_path=nvme_path(),
    )


def _named(name: str, arguments: Any, **preset: Any) -> DeepSpeedStrategy:
    strategy = DeepSpeedStrategy(**{**preset, **arguments})
    strategy.name = name
    return strategy
