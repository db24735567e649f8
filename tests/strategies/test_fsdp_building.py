"""Models that are built without data: every weight, buffer and generator is what one process would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import says
from models import silent_trainer
from ranks import run_on_ranks
from small_gpt import GLOBAL_BATCH, Language, SmallGPT, connected, optimizer_of, token_loader
from torch import Tensor, nn

from phalanx import Fabric
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.parallel.deferred import Deferred
from phalanx.framework.parallel.meta_device import replace_tensors
from phalanx.strategies import FSDPStrategy


class OwnInit(SmallGPT):
    """Initialises its layers as GPTs do, and holds what is awkward to build without data."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.01)
        self.padded = nn.Embedding(5, 4, padding_idx=1)
        self.copied = nn.Linear(4, 4)
        self.copied.weight.data.copy_(self.padded.weight.data[:4])
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.drawn = nn.Parameter(torch.empty(3).normal_() * 3)
        nn.init.orthogonal_(self.copied.bias.data.view(2, 2))
        self.truncated = nn.Parameter(torch.empty(3))
        nn.init.trunc_normal_(self.truncated)
        with torch.no_grad():
            self.truncated[0] = 7
            self.truncated.add_(1)

    @staticmethod
    def initialise(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(mean=0.0, std=0.02)
            if part.bias is not None:
                part.bias.data.zero_()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": OwnInit,
    "layers": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(4, 5), nn.Bilinear(3, 4, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_generators_are_those_of_a_plain_build(name: str) -> None:
    torch.manual_seed(4)
    plain = MODELS[name]()
    after = torch.get_rng_state()
    deferred = Deferred()
    torch.manual_seed(4)
    with deferred.recording():
        module = MODELS[name]()
    assert torch.equal(torch.get_rng_state(), after)
    # In another order than they were built in.
    built = dict(module.named_parameters())
    values: list[tuple[str, Tensor]] = [(key, each.detach()) for key, each in plain.named_parameters()]
    for key, expected in reversed(values):
        recipe = deferred.recipe(built[key])
        assert (recipe is not None) == built[key].is_meta
        value: Tensor = built[key].detach() if recipe is None else recipe.value()
        assert torch.equal(value, expected), key
    for (key, buffer), expected in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, expected), key
    assert torch.equal(torch.get_rng_state(), after)
    if name == "layers":
        assert all(parameter.is_meta for parameter in module.parameters())


class Configured(Language):
    """Builds its model under the strategy."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        del self.gpt
        self.at_start: dict[str, Any] = {}

    def configure_model(self) -> None:
        if not hasattr(self, "gpt"):
            torch.manual_seed(11)
            self.gpt = SmallGPT()

    def configure_optimizers(self) -> Any:
        self.at_start = {"meta": [name for name, each in self.named_parameters() if not each.is_meta]}
        return optimizer_of(self)

    def on_train_start(self) -> None:
        state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        self.at_start["values"] = {name: whole(tensor) for name, tensor in state.items()}


def whole(tensor: Any) -> Tensor:
    copy: Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    return copy


def configured() -> dict[str, Any]:
    module = Configured()
    # test_init_module_builds_without_data has fp32.
    trainer = silent_trainer(strategy="fsdp", devices=2, max_steps=2, precision="bf16-true")
    # The generators of ranks may differ: rank 0 counts.
    torch.manual_seed(trainer.fabric.world.rank)
    trainer.fit(module, token_loader(GLOBAL_BATCH // 2))
    return module.at_start


def test_configure_model_builds_without_data_and_starts_as_one_process_would() -> None:
    torch.manual_seed(11)
    plain = SmallGPT().to(torch.bfloat16)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for at_start in run_on_ranks(2, configured):
        assert at_start["meta"] == ["gpt.position", "gpt.scale"]
        for name, tensor in expected.items():
            assert torch.equal(at_start["values"][f"gpt.{name}"], tensor.detach()), name


def inside_fabric() -> list[bool]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    with fabric.init_module():
        torch.manual_seed(11)
        module = SmallGPT()
    wrapped = fabric.setup(module)
    torch.manual_seed(11)
    plain = dict(SmallGPT().named_parameters())
    return [torch.equal(whole(tensor), plain[name].detach()) for name, tensor in wrapped.named_parameters()]


def test_init_module_builds_without_data() -> None:
    assert all(all(equal) for equal in run_on_ranks(2, inside_fabric))


# ---- modules that a user built on the meta device ------------------------------------------------------------------


def from_meta(name: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        module = MODELS[name]()
    strategy = connected(FSDPStrategy())
    torch.manual_seed(4)
    strategy.setup(module, [], training=False)
    return {name: whole(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def test_layers_on_the_meta_device_are_initialised_by_their_own_methods() -> None:
    torch.manual_seed(4)
    plain = MODELS["layers"]()
    for values in run_on_ranks(2, from_meta, "layers"):
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            assert torch.equal(values[name], tensor.detach()), name


def only_on_rank_zero() -> list[bool]:
    plain = SmallGPT()
    module = SmallGPT()
    module.load_state_dict(plain.state_dict())
    strategy = connected(FSDPStrategy())
    if strategy.world.rank:
        replace_tensors(module, lambda _, tensor: tensor.to("meta") if isinstance(tensor, nn.Parameter) else None)
        torch.manual_seed(99)
    strategy.to_device(module)
    strategy.setup(module, [], training=False)
    expected = dict(plain.named_parameters())
    return [torch.equal(whole(tensor), expected[name].detach()) for name, tensor in module.named_parameters()]


def test_weights_that_only_rank_0_holds_reach_all() -> None:
    assert all(all(equal) for equal in run_on_ranks(2, only_on_rank_zero))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)
        self.layer = nn.Linear(3, 3)


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.mask = torch.ones(3)


def refused(kind: type[nn.Module]) -> str:
    with torch.device("meta"):
        module = nn.Sequential(kind())
    with pytest.raises(ConfigurationError) as caught:
        connected(FSDPStrategy()).setup(module, [], training=False)
    return str(caught.value)


def test_what_nothing_gives_values_is_named() -> None:
    for kind, name in ((Bare, "0 (Bare)"), (Rotary, "frequencies"), (Stray, "0.mask")):
        says(run_on_ranks(2, refused, kind), name)
