"""Accelerate's plug-ins: the strategies that they describe, and the arguments of ``torch.compile``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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


class DynamoBackend(str, Enum):
    """Backends of ``torch.compile``; any other one is given by its name."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    TVM = "TVM"


@names_fields
@dataclass
class TorchDynamoPlugin:
    """The options of ``torch.compile``.

    Attributes:
        backend: a ``DynamoBackend``, or a name of torch's in any case; ``"no"`` does not compile.
        disable: do not compile.
        use_regional_compilation: compile each repeated block instead of the module as a whole.
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def compilation(self) -> bool | dict[str, Any]:
        """Return the argument ``compile`` of ``Fabric``."""
        backend = str(getattr(self.backend, "value", self.backend) or "no").lower()
        if self.disable or backend == "no":
            return False
        given = {"mode": self.mode, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "options": self.options}
        kept = {name: value for name, value in given.items() if value is not None}
        return {"backend": backend, "blocks": bool(self.use_regional_compilation), **kept}


def compilation_of(backend: str | None, plugin: TorchDynamoPlugin | None) -> bool | dict[str, Any]:
    """Return the argument ``compile`` of ``Fabric`` for those of ``Accelerator``.

    Raises:
        ConfigurationError: both were given.
    """
    if backend is not None and plugin is not None:
        raise ConfigurationError("dynamo_backend and dynamo_plugin were both given: leave one of them out.")
    return (plugin or TorchDynamoPlugin(backend)).compilation()
