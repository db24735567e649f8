"""Layers that are built without data start from the values of a plain build, however these are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.parallel.deferred import Deferred


def resized(first: nn.Linear, second: nn.Linear) -> None:
    first.weight.unsqueeze_(0).mul_(2)
    second.weight.data.t_().mul_(3)
    first.views = nn.ParameterList([torch.empty(12).view(3, 4), torch.empty(4, 6)[:, 1:3], torch.empty(2, 6).t()])
    first.conv = nn.Parameter(torch.empty(2, 3, 2, 2, memory_format=torch.channels_last))
    for parameter in first.parameters():
        parameter.normal_()


def in_a_function(first: nn.Linear, second: nn.Linear) -> None:
    nn.functional.dropout(first.weight, inplace=True)
    nn.functional.relu(first.bias, inplace=True)
    torch.sort(second.weight, out=(second.weight.data, torch.empty(0, dtype=torch.long)))
    assert torch.mul(first.weight, 2, out=first.weight) is first.weight
    assert nn.functional.relu(second.bias, inplace=True) is second.bias


def over_layers(first: nn.Linear, second: nn.Linear) -> None:
    torch._foreach_mul_([first.weight, second.weight, first.weight[0]], 2.0)
    torch._foreach_add_([first.bias, second.bias], [torch.ones(4), second.weight[0]])


def from_generators(first: nn.Linear, second: nn.Linear) -> None:
    generator = torch.Generator().manual_seed(5)
    nn.init.normal_(first.weight, generator=generator)
    nn.init.trunc_normal_(second.weight, 0.0, 1.0, -2.0, 2.0, generator)
    nn.init.orthogonal_(first.bias.data.view(2, 2), generator=generator)
    second.bias.uniform_(generator=generator)
    second.bias.mul_(torch.rand(4, generator=generator))
    generator.manual_seed(7)


def from_scratch(first: nn.Linear, second: nn.Linear) -> None:
    scratch, array = torch.zeros(4, 4), np.zeros(4, dtype=np.float32)
    for number, layer in enumerate((first, second), 1):
        layer.weight.copy_(scratch.fill_(number))
        layer.weight[0] = scratch[1].add_(1)
        array[:] = number
        layer.bias.copy_(torch.from_numpy(array))
    scratch[:] = array[:] = 9


def from_memory_of_an_array(first: nn.Linear, second: nn.Linear) -> None:
    scratch = torch.zeros(4)
    array = scratch.numpy()
    for number, layer in enumerate((first, second), 1):
        scratch.fill_(number)
        layer.bias.copy_(torch.from_numpy(array))
        layer.weight[0].copy_(scratch)
        layer.weight[1].copy_(scratch)
        scratch.add_(1)
        layer.weight[2].copy_(torch.from_numpy(array))


def from_shared_memory(first: nn.Linear, second: nn.Linear) -> None:
    given = torch.ones(4, 4)
    first.weight.data = given
    second.bias.data = given[1]
    given.mul_(3)


FILLS: dict[str, Callable[[nn.Linear, nn.Linear], Any]] = {
    "eye_": lambda first, second: [nn.init.eye_(each.weight) for each in (first, second)],
    "randn(out=)": lambda first, second: torch.randn(4, 4, out=second.weight.data),
    "arange(out=)": lambda first, second: torch.arange(4.0, out=second.bias.data),
    "sparse_": lambda first, second: nn.init.sparse_(first.weight, 0.5, generator=torch.Generator().manual_seed(3)),
    **{fill.__name__: fill for fill in (resized, in_a_function, over_layers, from_generators, from_scratch)},
    "from_memory_of_an_array": from_memory_of_an_array,
    "from_shared_memory": from_shared_memory,
}


def filled(name: str, inference: bool = False) -> nn.Sequential:
    torch.manual_seed(4)
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.inference_mode() if inference else torch.no_grad():
        FILLS[name](*layers)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("name", FILLS)
def test_every_way_to_fill_a_layer_gives_the_values_of_a_plain_build(name: str) -> None:
    plain, after = filled(name), torch.get_rng_state()
    deferred = Deferred()
    with deferred.recording():
        module = filled(name)
    assert torch.equal(torch.get_rng_state(), after)
    for (key, expected), built in reversed([*zip(plain.named_parameters(), module.parameters(), strict=True)]):
        recipe = deferred.recipe(built)
        assert built.shape == expected.shape
        assert torch.equal(built if recipe is None else recipe.value(), expected), key
    assert all(parameter.is_meta for parameter in module.parameters())


def test_layers_that_are_filled_in_inference_mode_have_the_same_values() -> None:
    deferred = Deferred()
    with deferred.recording():
        module = filled("over_layers", inference=True)
    for built, expected in zip(module.parameters(), filled("over_layers").parameters(), strict=True):
        recipe = deferred.recipe(built)
        assert recipe is not None
        assert torch.equal(recipe.value(), expected)


def test_a_changed_shape_is_refused() -> None:
    with refuses(ConfigurationError, "resize_", "(3, 3)", "(2, 2)"), Deferred().recording():
        nn.Linear(3, 3).weight.data.resize_(2, 2)


class Filled(TrainModule):
    """Fills its layers in several ways under the strategy, and keeps these values."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(*(filled(name) for name in ("eye_", "from_generators", "from_scratch")))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trained_by(strategy: str) -> dict[str, Tensor]:
    module = Filled()
    trainer = silent_trainer(strategy=strategy, devices=2, max_steps=1)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=1))
    return {name: tensor.detach().clone() for name, tensor in module.net.named_parameters()}


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_training_starts_from_the_values_of_one_process(strategy: str) -> None:
    values = run_on_ranks(2, trained_by, strategy)[0]
    module = Filled()
    module.configure_model()
    for name, expected in module.net.named_parameters():
        assert torch.equal(values[name], expected), name
