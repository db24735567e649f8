"""Models that Accelerate places or offloads are evaluated where they are; they are neither trained nor sharded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Fabric, TrainModule
from phalanx.compat.accelerate import (
    cpu_offload,
    disk_offload,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    utils,
)
from phalanx.errors import ConfigurationError, RankError
from phalanx.framework.parallel.meta_device import move_others, placed_parts, placed_tensors

pytest.importorskip("accelerate")


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()


def on_disk(folder: Path) -> nn.Module:
    """Return the network without weights in memory, but for the normalization; ranks share the folder."""
    own = folder / str(os.getpid())
    own.mkdir(exist_ok=True)
    torch.save(network().state_dict(), own / "pytorch_model.bin")
    with init_empty_weights():
        empty = network()
    places = {"0": "disk", "1": "cpu", "2": "disk"}
    loaded: nn.Module = load_checkpoint_and_dispatch(
        empty, str(own / "pytorch_model.bin"), device_map=places, offload_folder=str(own / "offload")
    )
    return loaded.eval()


class Scores(TrainModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.scale = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.scale.weight)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.scale(self.net(batch)).detach()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", self.net(batch).mean())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class BuiltLater(Scores):
    """Its part is placed in ``configure_model``, so nothing is known before the ranks start."""

    def __init__(self, folder: Path) -> None:
        super().__init__(nn.Identity())
        self.folder = folder

    def configure_model(self) -> None:
        self.net = on_disk(self.folder)


DATA = torch.randn(10, 4, generator=torch.Generator().manual_seed(5))


def test_a_model_on_the_disk_is_evaluated(tmp_path: Path) -> None:
    expected = network()(DATA).detach()
    module = Scores(on_disk(tmp_path))
    assert [name for name, each in module.named_parameters() if each.is_meta] == [
        "net.0.weight",
        "net.0.bias",
        "net.2.weight",
        "net.2.bias",
    ]
    trainer = silent_trainer(strategy="ddp", devices=2)
    found = trainer.predict(module, DataLoader(DATA, batch_size=3))  # type: ignore[arg-type]
    assert found is not None
    # Batches of another size are multiplied in another order.
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-6)
    (values,) = trainer.validate(module, DataLoader(DATA, batch_size=5))  # type: ignore[arg-type]
    assert values["mean"] == pytest.approx(expected.mean().item(), rel=1e-6)
    assert module.net.get_submodule("0").weight.is_meta


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_a_fabric_evaluates_an_offloaded_model(offload: Any, tmp_path: Path) -> None:
    net = network()
    expected = net(DATA).detach()
    arguments = {"offload_dir": str(tmp_path)} if offload is disk_offload else {}
    offload(net, execution_device=torch.device("cpu"), **arguments)
    fabric = Fabric(accelerator="cpu", devices=1)
    ready = fabric.setup(net)
    assert net.get_submodule("0").weight.is_meta
    assert torch.equal(ready(DATA), expected)
    with refuses(ConfigurationError, "Sequential"):
        fabric.setup_optimizers(torch.optim.SGD(ready.parameters(), 0.1))
    other = Fabric(accelerator="cpu", devices=1)
    with refuses(ConfigurationError, "Sequential"):
        other.setup(net, torch.optim.SGD(net.parameters(), 0.1))


def test_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Accelerate"):
        silent_trainer(max_steps=1).fit(Scores(on_disk(tmp_path)), DataLoader(DATA, 3))  # type: ignore[arg-type]
    with pytest.raises(RankError, match="Accelerate"):
        silent_trainer(strategy="ddp", devices=2, max_steps=1).fit(BuiltLater(tmp_path), DataLoader(DATA, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero3"])
def test_sharding_is_refused(strategy: str, tmp_path: Path) -> None:
    trainer = silent_trainer(strategy=strategy, devices=2)
    with refuses(ConfigurationError, f"strategy='{strategy}'"):
        trainer.predict(Scores(on_disk(tmp_path)), DataLoader(DATA, batch_size=3))  # type: ignore[arg-type]


def test_other_parts_are_moved(tmp_path: Path) -> None:
    module = Scores(on_disk(tmp_path))
    assert list(placed_parts(module)) == ["net"]
    assert placed_tensors(module) == {id(each) for each in (*module.net.parameters(), *module.net.buffers())}
    move_others(module, torch.device("meta"))
    assert module.scale.weight.is_meta
    assert not module.net.get_submodule("1").weight.is_meta
    assert not placed_parts(network())


def evaluate_part_built_without_data(folder: str) -> bool:
    """Evaluate a module of which rank 0 alone has the weights of the other part, as after a sharded fit."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(1)
    module = nn.Sequential(on_disk(Path(folder)), nn.Linear(3, 2))
    expected = module(DATA).detach()
    if fabric.global_rank:
        module[1].to("meta")
    return torch.equal(fabric.setup(module)(DATA), expected)


def test_parts_beside_it_get_the_weights_of_rank_zero(tmp_path: Path) -> None:
    assert run_on_ranks(2, evaluate_part_built_without_data, str(tmp_path)) == [True, True]


def test_device_maps_are_computed_by_accelerate() -> None:
    sizes = utils.compute_module_sizes(network())
    places = infer_auto_device_map(network(), max_memory={"cpu": sizes[""] - 8, "disk": 10**6})
    assert places == {"0": "cpu", "1": "disk", "2": "disk"}
    assert utils.get_max_memory({"cpu": 5}) == {"cpu": 5}
