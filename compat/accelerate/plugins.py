"""The strategies that Accelerate's plug-ins describe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...framework.core.arguments import names_fields
from ...framework.core.errors import ConfigurationError, unknown
from ...framework.parallel.strategy import Strategy
from ...strategies import DeepSpeedStrategy, FSDPStrategy

_SHARDING: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "HYBRID_SHARD": {"replicas": "node"},
}
_PLACES = ("none", "cpu", "nvme")


@names_fields
@dataclass
class FullyShardedDataParallelPlugin:
    """The arguments of ``FSDPStrategy`` that Accelerate has.

    Attributes:
        sharding_strategy: ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"`` or ``"HYBRID_SHARD"``.
        transformer_cls_names_to_wrap: the names of the classes that are gathered and freed together.
        min_num_params: the least number of parameters of such a unit, instead of names.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = None
    limit_all_gathers: bool = True

    @property
    def strategy(self) -> Strategy:
        """The strategy.

        Raises:
            UnknownNameError: ``sharding_strategy`` is not known.
        """
        sharding = getattr(self.sharding_strategy, "name", self.sharding_strategy) or "FULL_SHARD"
        if sharding not in _SHARDING:
            raise unknown("sharding_strategy", str(sharding), _SHARDING)
        names = self.transformer_cls_names_to_wrap

        def is_unit(module: nn.Module) -> bool:
            return type(module).__name__ in (names or ())

        arguments = {
            "units": is_unit if names else self.min_num_params or None,
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
            "activation_checkpointing": self.activation_checkpointing,
        }
        return FSDPStrategy(**{**arguments, **_SHARDING[sharding]})


@names_fields
@dataclass
class DeepSpeedPlugin:
    """The stage of ZeRO, and the places of its state.

    Attributes:
        zero_stage: 1, 2 or 3.
        offload_optimizer_device: ``"none"``, ``"cpu"`` or ``"nvme"``.
        offload_param_device: the same.
        offload_optimizer_nvme_path: the directory for ``"nvme"``.
        hf_ds_config: DeepSpeed's settings, a dict or the path of a JSON file, instead of the other fields.
    """

    zero_stage: int = 2
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | os.PathLike[str] | None = None
    offload_param_nvme_path: str | os.PathLike[str] | None = None
    hf_ds_config: Mapping[str, Any] | str | os.PathLike[str] | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy.

        Raises:
            UnknownNameError: a device is not known.
            ConfigurationError: the two directories differ.
        """
        if self.hf_ds_config is not None:
            return DeepSpeedStrategy(config=self.hf_ds_config)
        paths = {path for path in (self.offload_optimizer_nvme_path, self.offload_param_nvme_path) if path is not None}
        if len(paths) > 1:
            raise ConfigurationError(
                f"DeepSpeedPlugin was given the directories {', '.join(sorted(map(str, paths)))}: give one for both."
            )
        return DeepSpeedStrategy(
            stage=self.zero_stage,
            offload_optimizer=_place("offload_optimizer_device", self.offload_optimizer_device),
            offload_parameters=_place("offload_param_device", self.offload_param_device),
            nvme_path=next(iter(paths), None),
        )


def _place(name: str, device: str | None) -> Any:
    if device is not None and device not in _PLACES:
        raise unknown(name, device, _PLACES)
    return None if device in (None, "none") else device
