"""The memory of a rank until pretrained weights are loaded: its share of the model, and the largest tensor.

Three tensors are allowed: gloo runs collectives on two threads, each of which may still hold the tensors of one that
has returned, and the next one is read meanwhile.

What a strategy keeps beside the weights is counted apart: ddp its gradient buckets; zero3 the master weights and the
gradients of its share, and a reduction bucket, here of the size of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_memory import LiveMemory
from models import silent_trainer
from pretrained_table import counted_until_loaded
from ranks import run_on_ranks
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.framework.parallel.full_tensors import whole_tensors
from phalanx.framework.state.module_state import model_state
from phalanx.strategies import FSDPStrategy

WIDTH, LAYERS = 128, 12
LARGEST = WIDTH * WIDTH * 4
TOTAL = LAYERS * LARGEST
SLACK = LARGEST // 8
PASSING = 3 * LARGEST + SLACK


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


class Stack(TrainModule):
    memory: LiveMemory | None = None

    def __init__(self, path: Path | None, built_on: str) -> None:
        super().__init__()
        self.path, self.built_on, self.net = path, built_on, nn.Module()

    def configure_model(self) -> None:
        with torch.device(self.built_on):
            self.net = nn.Sequential(*(Block() for _ in range(LAYERS)))
        if self.path is not None:
            self.load_pretrained(self.path, into="net")

    def on_predict_start(self) -> None:
        if self.memory is not None:
            self.memory.stop()

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        return {"net.*.layer": ColwiseParallel(output_layouts=Replicate())}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).sum()
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def rows() -> DataLoader[Any]:
    """Return a batch for each rank."""
    return DataLoader(torch.ones(2, WIDTH))  # type: ignore[arg-type]


def counted(strategy: str, path: Path, built_on: str, trains: bool) -> tuple[int, int, int]:
    """Return the bytes that are kept, the peak of those that are freed again, and the peak of all."""
    chosen: Any = {
        "fsdp": lambda: FSDPStrategy(units=Block),
        "tensor parallel": lambda: FSDPStrategy(units=Block, tensor_parallel=2),
    }.get(strategy, lambda: strategy)()
    module, data = Stack(path, built_on), rows()
    trainer = silent_trainer(strategy=chosen, devices=2, max_steps=1)
    with counted_until_loaded() as memory:
        if trains:
            trainer.fit(module, data)
        else:
            trainer.predict(module, data)
    return memory.kept, memory.passing, memory.peak


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "weights.safetensors"
    save_file({f"{number}.layer.weight": torch.ones(WIDTH, WIDTH) for number in range(LAYERS)}, path)
    return path


@pytest.mark.parametrize(
    ("strategy", "built_on", "share", "beside"),
    [
        # Its buckets are fixed from the beginning. Those of ddp are allocated twice, one after the other.
        ("ddp_find_unused_parameters_true", "cpu", TOTAL, TOTAL),
        ("fsdp", "cpu", TOTAL // 2, 0),
        ("fsdp", "meta", TOTAL // 2, 0),
        ("pipeline", "meta", TOTAL // 2, 0),
        ("tensor parallel", "cpu", TOTAL // 2, 0),
    ],
)
def test_set_up_frees_at_most_three_tensors(strategy: str, built_on: str, share: int, beside: int, file: Path) -> None:
    for kept, passing, _ in run_on_ranks(2, counted, strategy, file, built_on, True):
        assert abs(kept - share - beside) < SLACK
        assert passing < PASSING


@pytest.mark.parametrize(
    ("strategy", "built_on", "share", "beside", "freed"),
    [
        # torch's first buckets, which take no memory together with the second ones.
        ("ddp", "meta", TOTAL, TOTAL, TOTAL),
        # The shards, before DeepSpeed has moved them into its flat buffer.
        ("zero3", "cpu", TOTAL // 2, 2 * TOTAL, TOTAL // 2 + 3 * LARGEST),
        ("zero3", "meta", TOTAL // 2, 2 * TOTAL, TOTAL // 2 + 3 * LARGEST),
    ],
)
def test_the_peak_is_the_memory_of_training_and_few_tensors(
    strategy: str, built_on: str, share: int, beside: int, freed: int, file: Path
) -> None:
    for kept, passing, peak in run_on_ranks(2, counted, strategy, file, built_on, True):
        assert abs(kept - share - beside) < SLACK
        assert peak < kept + PASSING
        assert passing < freed + SLACK


@pytest.mark.parametrize(("strategy", "share"), [("ddp", TOTAL), ("fsdp", TOTAL // 2), ("zero3", TOTAL // 2)])
def test_an_evaluation_takes_its_share_and_three_tensors(strategy: str, share: int, file: Path) -> None:
    for kept, _, peak in run_on_ranks(2, counted, strategy, file, "cpu", False):
        assert abs(kept - share) < SLACK
        assert peak < share + PASSING


def counted_without_file(strategy: str) -> tuple[int, int]:
    """Return the bytes that are kept, and the peak, when weights are initialized and sharded."""
    module = Stack(None, "cpu")
    chosen: Any = FSDPStrategy(units=Block) if strategy == "fsdp" else strategy
    with LiveMemory() as module.memory:
        silent_trainer(strategy=chosen, devices=2).predict(module, rows())
    return module.memory.kept, module.memory.peak


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_sharding_of_new_weights_takes_the_share_and_three_tensors(strategy: str) -> None:
    for kept, peak in run_on_ranks(2, counted_without_file, strategy):
        assert abs(kept - TOTAL // 2) < SLACK
        assert peak < TOTAL // 2 + PASSING


class Boxes(Stack):
    """Splits the rows of one layer over ranks and the columns of another, and gathers them when they are loaded."""

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        return {
            "net.0.layer": ColwiseParallel(output_layouts=Replicate()),
            "net.1.layer": RowwiseParallel(input_layouts=Replicate()),
        }

    def on_predict_start(self) -> None:
        state = model_state(self.trainer.strategy, self)
        self.started = {name: tensor.clone() for name, tensor in whole_tensors(state, self.fabric.world)}


def loaded_in_boxes(path: Path, built_on: str) -> dict[str, Tensor]:
    module = Boxes(path, built_on)
    strategy = FSDPStrategy(units=Block, tensor_parallel=2)
    silent_trainer(strategy=strategy, devices=4).predict(module, rows())
    return module.started


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_layers_that_are_split_and_sharded_are_read_in_boxes(built_on: str, tmp_path: Path) -> None:
    weights = torch.arange(LAYERS * WIDTH * WIDTH, dtype=torch.float32).view(LAYERS, WIDTH, WIDTH)
    save_file({f"{number}.layer.weight": weight for number, weight in enumerate(weights)}, tmp_path / "w.safetensors")
    found = run_on_ranks(4, loaded_in_boxes, tmp_path / "w.safetensors", built_on)[0]
    assert list(found) == [f"net.{number}.layer.weight" for number in range(LAYERS)]
    assert torch.equal(torch.stack([*found.values()]), weights)
