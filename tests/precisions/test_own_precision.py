"""A precision that the user wrote: in Trainer and Fabric, under every strategy, by object and by name."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from messages import refuses
from models import Regressor, loader, network, plain_steps, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric
from phalanx.framework.core import registry
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.precision import DefaultDtype, resolve_precision
from phalanx.precisions import BFloat16Mixed, LossScaler, Precision

STEPS = 6
SCALE = 1024.0


def rounded(tensor: Tensor) -> Tensor:
    """Return a tensor with the digits of bf16 in fp64, so that a conversion that is left out shows."""
    return tensor.bfloat16().double()


class Counted(DefaultDtype):
    """A context that counts how often it was entered."""

    entered = 0

    def __enter__(self) -> None:
        self.entered += 1
        super().__enter__()


class Quantized(Precision):
    """Uses everything that the contract offers: fp64, rounded weights and batches, a fixed loss scale, a context."""

    name = "64-quantized"
    parameter_dtype = torch.float64

    def __init__(self) -> None:
        self.context = Counted(torch.float64)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return self.context

    def loss_scaler(self) -> LossScaler:
        return LossScaler(SCALE, growth_factor=1.0)

    def convert_module(self, module: nn.Module) -> None:
        super().convert_module(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(rounded(parameter))

    def convert_batch(self, batch: Any) -> Any:
        return apply_to_collection(batch, Tensor, rounded)


def by_hand() -> list[float]:
    """Return the losses of the same run in plain torch, on batches of 8."""
    net = network().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(rounded(parameter))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return plain_steps(
        optimizer, lambda batch: nn.functional.mse_loss(net(rounded(batch[0])), rounded(batch[1])), loader(8 * STEPS, 8)
    )


def trained(ranks: int, strategy: str) -> list[float]:
    precision, module = Quantized(), Regressor(lr=0.1, optimizer="sgd")
    trainer = silent_trainer(devices=ranks, strategy=strategy, max_steps=STEPS, precision=precision)
    trainer.fit(module, loader(8 * STEPS, 8 // ranks))
    assert trainer.precision == "64-quantized"
    assert trainer.fabric.scaler is not None
    assert trainer.fabric.scaler.scale == SCALE
    assert precision.context.entered == STEPS
    return module.losses


def trained_by_loop(ranks: int, strategy: str) -> list[float]:
    precision, net, losses = Quantized(), network(), []
    fabric = Fabric("cpu", strategy, ranks, precision=precision)
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    for x, y in fabric.setup_dataloaders(loader(8 * STEPS, 8 // ranks)):
        loss = nn.functional.mse_loss(model(x), rounded(y))
        losses.append(loss.item())
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    assert fabric.scaler is not None
    assert precision.context.entered == STEPS
    return losses


@pytest.mark.parametrize(
    ("run", "ranks", "strategy"),
    [(trained, 2, "ddp"), (trained, 2, "fsdp"), (trained_by_loop, 1, "single"), (trained_by_loop, 2, "fsdp")],
)
def test_an_own_precision_trains_as_plain_torch_does(run: Any, ranks: int, strategy: str) -> None:
    each = [run(1, strategy)] if ranks == 1 else run_on_ranks(ranks, run, ranks, strategy)
    means = torch.tensor(each, dtype=torch.float64).mean(dim=0)
    torch.testing.assert_close(means, torch.tensor(by_hand(), dtype=torch.float64), rtol=1e-12, atol=1e-12)


class Twin(Precision):
    """Sets one dtype and leaves the rest to the defaults: what ``bf16-mixed`` is."""

    name = "twin"
    compute_dtype = torch.bfloat16


def losses_of(ranks: int, strategy: str, precision: Precision) -> list[float]:
    module = Regressor(lr=0.1, optimizer="sgd")
    silent_trainer(devices=ranks, strategy=strategy, max_steps=3, precision=precision).fit(module, loader(24, 4))
    return module.losses


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
def test_a_precision_with_the_same_attributes_gives_the_same_losses(strategy: str) -> None:
    built_in, own = (run_on_ranks(2, losses_of, 2, strategy, one) for one in (BFloat16Mixed(), Twin()))
    assert own == built_in


def test_the_dtypes_that_are_not_given_follow_from_those_that_are() -> None:
    class Half(Precision):
        name = "half"
        parameter_dtype = torch.bfloat16

    half, twin = Half(), Twin()
    assert (half.compute_dtype, half.reduction_dtype, half.is_mixed) == (torch.bfloat16, torch.float32, False)
    assert (twin.parameter_dtype, twin.reduction_dtype, twin.is_mixed) == (torch.float32, torch.float32, True)
    assert (half.converts_batch, twin.converts_batch, Quantized().converts_batch) == (True, False, True)


# ---- names --------------------------------------------------------------------------------------------------------


def test_a_registered_name_is_found_and_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.PRECISIONS, "_table", dict(registry.PRECISIONS._table))
    registry.PRECISIONS.register("quantized", f"{__name__}:Quantized")
    assert Fabric(accelerator="cpu", devices=1, precision="quantized").precision.name == "64-quantized"
    with refuses(ConfigurationError, "'quantised'", "'quantized'"):
        resolve_precision("quantised")
    with refuses(ConfigurationError, "'bf16'"):
        registry.PRECISIONS.register("bf16", f"{__name__}:Quantized")


def test_a_package_adds_a_name_through_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("quantized", f"{__name__}:Quantized", "phalanx.precisions")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    assert silent_trainer(devices=1, precision="quantized").precision == "64-quantized"


def test_an_entry_point_that_an_alias_would_hide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("fp16", f"{__name__}:Quantized", "phalanx.precisions")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(registry.PRECISIONS, "_entry_points", None)
    with refuses(ConfigurationError, "precision='fp16'", "'16-mixed'", f"{__name__}:Quantized"):
        resolve_precision("fp16")
    assert resolve_precision("bf16").name == "bf16-mixed"


def test_a_class_instead_of_an_object_is_refused() -> None:
    with refuses(ConfigurationError, "precision=", "Quantized()"):
        silent_trainer(devices=1, precision=Quantized)


class ScaledBFloat16(Twin):
    name = "scaled"

    def loss_scaler(self) -> LossScaler:
        return LossScaler()


@pytest.mark.parametrize(
    ("precision", "name"), [(Quantized(), "'64-quantized'"), (ScaledBFloat16(), "precision='scaled'")]
)
def test_deepspeed_refuses_what_its_engine_lacks(precision: Precision, name: str) -> None:
    with refuses(ConfigurationError, name):
        silent_trainer(devices=2, strategy="zero2", precision=precision)
