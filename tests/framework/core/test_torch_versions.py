"""Differences between the versions of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import refuses
from torch import nn
from torch.distributed.fsdp import FSDPModule

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.torch_versions import (
    can_abandon_fsdp_passes,
    drop_unsharded_gradient,
    existing_dtypes,
    fsdp_groups,
)
from phalanx.framework.loop.recovering_step import check_strategy
from phalanx.strategies import FSDPStrategy


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        ({"_fsdp_param_group": "one"}, ["one"]),
        ({"_fsdp_param_group": None}, []),
        ({"_fsdp_param_groups": ["one", "two"]}, ["one", "two"]),
        ({"_fsdp_param_groups": [], "_fsdp_param_group": None}, []),
    ],
    ids=["torch 2.11", "torch 2.11 without parameters", "torch 2.12", "torch 2.12 without parameters"],
)
def test_the_groups_of_a_sharded_module_are_found_in_every_version(state: dict[str, Any], groups: list[str]) -> None:
    assert fsdp_groups(SimpleNamespace(**state)) == groups


def test_an_older_torch_is_the_reason_why_fsdp_cannot_repeat_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    assert not can_abandon_fsdp_passes(FSDPModule)
    with refuses(ConfigurationError, "'fsdp'", "2.13"):
        check_strategy(FSDPStrategy())
    with refuses(ConfigurationError, "'fsdp'"):
        check_strategy(FSDPStrategy(tensor_parallel=2))


def test_dtypes_that_torch_lacks_are_left_out() -> None:
    assert existing_dtypes(["float32", "float3"]) == {"float32": torch.float32}


class OneGradient:
    """A record of a parameter as torch 2.15 has it: the accumulated gradient is that of the parameter."""

    def __init__(self) -> None:
        self.unsharded_param = nn.Parameter(torch.zeros(1))

    @property
    def unsharded_accumulated_grad(self) -> Any:
        return self.unsharded_param.grad


def test_gradients_that_were_not_reduced_are_dropped_in_every_version() -> None:
    two = SimpleNamespace(unsharded_param=nn.Parameter(torch.zeros(1)), unsharded_accumulated_grad=torch.ones(1))
    for record in (two, OneGradient()):
        record.unsharded_param.grad = torch.ones(1)
        drop_unsharded_gradient(record)
        assert record.unsharded_param.grad is None
        assert record.unsharded_accumulated_grad is None
