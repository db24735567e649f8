"""Models that a pipeline builds without data: each rank fills the stages that it holds, with one process's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_model import LanguageModel, token_loader
from live_memory import LiveMemory
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import TrainModule

SEED, BLOCKS = 11, 4


class Drawn(nn.Module):
    """Weights that depend on the generator's state."""

    def __init__(self) -> None:
        super().__init__()
        whole = LanguageModel(blocks=BLOCKS)
        self.model = whole
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.register_buffer("drawn", torch.randn(3))


class Configured(TrainModule):
    """Builds its model under the strategy."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device_of_build = device
        self.with_data: list[str] = []
        self.at_start: dict[str, Tensor | None] = {}

    def configure_model(self) -> None:
        torch.manual_seed(SEED)
        with torch.device(self.device_of_build):
            self.net = Drawn()

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        plan = LanguageModel.configure_tensor_parallel(self.net.model, mesh)
        return {f"net.model.{name}": style for name, style in plan.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.model.loss(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.with_data = [name for name, parameter in self.named_parameters() if not parameter.is_meta]
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        for name, tensor in [*self.net.named_parameters(), *self.net.named_buffers()]:
            self.at_start[name] = None if tensor.is_meta else whole(tensor)


def whole(tensor: Any) -> Tensor:
    copy: Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    return copy


def configured(mesh: str, ranks: int, precision: str) -> tuple[list[str], dict[str, Tensor | None]]:
    module = Configured("cpu")
    trainer = silent_trainer(devices=ranks, parallel=mesh, max_steps=1, precision=precision)
    trainer.fit(module, token_loader(8, batch_size=2))
    return module.with_data, module.at_start


@pytest.mark.parametrize(
    ("mesh", "ranks", "precision"),
    [("pp=2", 2, "bf16-true"), ("pp=2,dp_shard=2", 4, "bf16-true"), ("pp=2,tp=2", 4, "32-true")],
)
def test_configure_model_builds_without_data_and_stages_start_as_in_one_process(
    mesh: str, ranks: int, precision: str
) -> None:
    torch.manual_seed(SEED)
    plain = Drawn().to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    filled: set[str] = set()
    for with_data, at_start in run_on_ranks(ranks, configured, mesh, ranks, precision):
        assert not with_data
        assert at_start.keys() == expected.keys()
        held = {name: tensor for name, tensor in at_start.items() if tensor is not None}
        assert {int(name.split(".")[2]) for name in held if ".blocks." in name} in ({0, 1}, {2, 3})
        for name, tensor in held.items():
            assert torch.equal(tensor, expected[name].detach()), name
        filled |= held.keys()
    assert filled == expected.keys()


def through(blocks: nn.ModuleList, hidden: Tensor) -> Tensor:
    for block in blocks:
        hidden = block(hidden)
    return hidden.square().mean()


class Layers(TrainModule):
    """Blocks that were built on the meta device, whose layers initialize themselves."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(BLOCKS))
        self.at_start: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return through(self.blocks, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        held = self.named_parameters()
        self.at_start = {name: tensor.detach().clone() for name, tensor in held if not tensor.is_meta}


def from_meta() -> dict[str, Tensor]:
    module = Layers()
    trainer = silent_trainer(devices=2, strategy="pipeline", max_steps=1)
    torch.manual_seed(SEED)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=2))  # type: ignore[arg-type]
    return module.at_start


def test_layers_on_the_meta_device_are_initialized_by_their_own_methods() -> None:
    torch.manual_seed(SEED)
    plain = nn.ModuleList(nn.Linear(8, 8) for _ in range(BLOCKS))
    first, second = run_on_ranks(2, from_meta)
    assert len(first) == len(second) == BLOCKS
    for name, tensor in {**first, **second}.items():
        assert torch.equal(tensor, plain.get_parameter(name.removeprefix("blocks.")).detach()), name


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 128, 12
LARGEST = WIDTH * WIDTH * 4


class Stack(TrainModule):
    """Many equal blocks."""

    memory: LiveMemory

    def configure_model(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return through(self.blocks, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        self.memory.stop()


def counted() -> tuple[int, int]:
    """Return the bytes of tensors that set-up keeps, and the peak of those that are freed again."""
    module = Stack()
    data: Any = torch.utils.data.DataLoader(torch.ones(4, WIDTH), batch_size=2)  # type: ignore[arg-type]
    trainer = silent_trainer(devices=4, parallel="pp=2,dp_shard=2", max_steps=1)
    with LiveMemory() as memory:
        module.memory = memory
        trainer.fit(module, data)
    return memory.kept, memory.passing


def test_set_up_takes_the_memory_of_a_ranks_part_and_few_tensors() -> None:
    for kept, passing in run_on_ranks(4, counted):
        assert kept == pytest.approx(LAYERS * LARGEST / 4, abs=LARGEST / 2)
        # Gloo runs collectives on two threads, each of which may still hold the tensors of one that has returned.
        assert passing < 3.5 * LARGEST
