"""Code of users that reads and changes sharded parameters and hooks, as far as it is not in the table of semantics."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from messages import says
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric, TrainModule
from phalanx.framework.core.errors import ConfigurationError

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Program(TrainModule):
    """Two sharded blocks with parameters around them; ``actions`` are functions by the name of the hook they run in."""

    def __init__(self, **actions: Callable[..., Any]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
            self.blocks = nn.ModuleList([Block(), Block()])
        self.actions = actions
        self.seen: list[Any] = []
        self.act("init")

    def act(self, name: str) -> Any:
        return self.actions[name](self) if name in self.actions else None

    def on_fit_start(self) -> None:
        self.act("fit_start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.act("step")
        x = batch[0]
        for part in (self.first, *self.blocks):
            x = part(x)
        extra = self.actions["extra"](self, x) if "extra" in self.actions else 0.0
        loss: Tensor = (self.head(x).square().mean() + (x - 1).square().mean()) + extra
        return loss

    def on_after_backward(self) -> None:
        self.act("after_backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.act("batch_end")

    def on_train_epoch_end(self) -> None:
        self.act("epoch_end")

    def configure_optimizers(self) -> Any:
        if "optimizer" in self.actions:
            return self.actions["optimizer"](self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


def reads(module: Any) -> None:
    weights = [module.head.weight, module.blocks[0].lin.weight, module.blocks[1].lin.bias]
    for number, each in enumerate(weights):
        found = each.detach()
        module.seen += [found.norm().item(), float(found.abs().mean()), found.sum().tolist(), float(found.numel())]
        module.seen += [float(found.cpu().max()), float(found.square().sum().sqrt()), float((found > 0).sum())]
        module.seen.append(float(torch.linalg.matrix_norm(found, "nuc")) if found.dim() == 2 else 0.0)
        module.seen.append(float(found.numpy().std()))
        module.log(f"norm_{number}", each.norm(), on_step=False, on_epoch=True)
    module.seen.append(float(nn.utils.parameters_to_vector(module.blocks.parameters()).detach().cpu()[3]))


def limit(parameter: Any) -> None:
    parameter.grad.clamp_(-0.05, 0.05)


def hooked(module: Any) -> None:
    mask = (torch.arange(4) > 1).float()[:, None]
    module.blocks[0].lin.weight.register_hook(lambda gradient: gradient * mask)
    module.first.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
    module.head.weight.register_post_accumulate_grad_hook(limit)
    module.head.bias.register_hook(lambda gradient: gradient * 1e6).remove()


def writes(module: Any) -> None:
    module.head.weight.clamp_(-0.1, 0.1)
    module.blocks[0].lin.weight.copy_(torch.eye(4) * 0.3)
    module.blocks[1].lin.weight[3].fill_(0.7)
    module.blocks[1].lin.weight.view(-1)[2] = 5.0
    module.blocks[1].lin.weight.data[:, 1] = 0.25
    module.first.weight[module.first.weight > 0.2] = 0.2
    nn.init.constant_(module.first.bias, 0.4)
    nn.init.orthogonal_(module.blocks[0].lin.weight, 0.5)
    module.blocks[1].load_state_dict({"lin.bias": torch.ones(4)}, strict=False)


def parts(module: Any) -> None:
    weight = module.blocks[0].lin.weight.detach()
    module.seen += [
        float(weight.norm(4, dim=0).sum()),
        float((weight > 0.2).any(0).sum()),
        float(weight.norm(3, 0).max()),
    ]


def train_copy(module: Any) -> None:
    twin = copy.deepcopy(module.blocks[1].lin)
    with torch.enable_grad():
        twin(X[:6]).square().mean().backward()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    module.seen += [float(each.detach().norm()) for each in twin.parameters()]


class Trust(torch.optim.Optimizer):
    """Steps of a length relative to the parameter's, by numbers, with state of its own kinds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            scale = each.norm().item() / (float(each.grad.norm()) + 0.1)
            largest = self.state[each].setdefault("largest", torch.zeros(each.shape))
            largest.copy_(torch.maximum(largest, each.grad.abs()))
            each.data = each.data - 0.1 * scale * each.grad / (1 + largest)


def hook_steps(module: Any) -> None:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients = [each.grad for each in optimizer.param_groups[0]["params"] if each.grad is not None]
        total = sum(float(each.square().sum()) for each in gradients) ** 0.5
        for each in gradients:
            each.mul_(0.1 / (total + 0.1))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        module.seen.append(float(module.blocks[0].lin.weight.detach().norm()))

    module.trainer.optimizers[0].register_step_pre_hook(before)
    module.trainer.optimizers[0].register_step_post_hook(after)


def add_layer(module: Any) -> None:
    if not hasattr(module, "late"):
        module.late = nn.Linear(4, 2)
        with torch.no_grad():
            module.late.weight.copy_(torch.arange(8.0).view(2, 4) * (0.1 + module.global_rank))
            module.late.bias.zero_()
        module.trainer.optimizers[0].add_param_group({"params": list(module.late.parameters()), "lr": 0.1})


def with_layer(module: Any, x: Tensor) -> Any:
    return module.late(x).square().mean() if hasattr(module, "late") else 0.0


PROGRAMS: dict[str, dict[str, Callable[..., Any]]] = {
    "own optimizer": {"optimizer": Trust},
    "reads": {"step": reads, "after_backward": reads, "batch_end": reads, "epoch_end": reads},
    "copy": {"batch_end": train_copy},
    "step hooks": {"fit_start": hook_steps},
    "writes": {"batch_end": writes},
    "hooks, parts": {"init": hooked, "step": parts, "batch_end": parts},
}


def trained(strategy: str, ranks: int, window: int) -> dict[str, Any]:
    results = {}
    for name, program in PROGRAMS.items():
        torch.manual_seed(3)
        module = Program(**program)
        trainer = silent_trainer(strategy=strategy, devices=ranks, max_epochs=1, accumulate_grad_batches=window)
        trainer.fit(module, DataLoader(TensorDataset(X[:36]), 12 // ranks // window))
        logged = [value for key, value in sorted(trainer.callback_metrics.items()) if key.startswith("norm")]
        weights = [each.detach() for each in module.parameters()] if not module.first.weight.is_meta else []
        results[name] = weights, torch.tensor([*module.seen, *logged])
    return results


def named(program: str, message: str) -> str:
    return f"{program}: {message}"


# test_semantics.py has hsdp.
@pytest.mark.parametrize(("strategy", "ranks", "window"), [("fsdp", 2, 1), ("fsdp", 3, 2)])
def test_code_of_users_means_on_shards_what_it_means_in_one_process(strategy: str, ranks: int, window: int) -> None:
    expected = trained("single", 1, window)
    for rank, found in enumerate(run_on_ranks(ranks, trained, strategy, ranks, window)):
        for name in PROGRAMS:
            weights, seen = found[name]
            if rank > 0:
                weights = expected[name][0]
            torch.testing.assert_close((weights, seen), expected[name], rtol=1e-4, atol=1e-5, msg=partial(named, name))


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(4), nn.Linear(4, 4).to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(self.norm(x).double()).float())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift.float()


def trained_in_fabric(strategy: str, ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    model = nn.Sequential(TwoDtypes(), TwoDtypes(), nn.Linear(4, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = fabric.global_rank
    for part in X.view(4, 12, 4):
        share = part.view(ranks, -1, 4)[rank]
        optimizer.zero_grad()
        fabric.backward(model(share).square().mean())
        optimizer.step()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        outputs = [twin(X), *(each.double() for each in copy.deepcopy(model[0])(X).unbind())]
        model[0].lin.weight.zero_()
        outputs.append(twin(X))  # a copy is not changed with the model
        nn.init.normal_(model[2].weight)
        nn.init.uniform_(model[1].lin.weight)
        outputs += [model[2].weight.norm().cpu(), model[1].lin.weight.std().cpu()]
    return outputs


def test_two_dtypes_copies_and_random_values() -> None:
    expected = trained_in_fabric("single", 1)
    for found in run_on_ranks(2, trained_in_fabric, "fsdp", 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def narrow(module: Any) -> None:
    with torch.no_grad():
        module.head.weight.mul_(0.999)


def reshaped(module: Any) -> None:
    module.head.weight.data = torch.zeros(5, 4)


def assign_state(module: Any) -> None:
    for state in module.trainer.optimizers[0].state.values():
        state["momentum_buffer"] = torch.ones(state["momentum_buffer"].shape)


def differentiate(module: Any) -> None:
    torch.autograd.grad(module.blocks[0](X).sum(), module.blocks[0].lin.weight)


class Chosen(Program):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx), inputs=list(self.blocks[0].parameters()))


def save(what: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda module: torch.save(what(module), io.BytesIO())


def refusals() -> list[str]:
    def said(function: Callable[[], Any]) -> str:
        with pytest.raises(ConfigurationError) as caught:
            function()
        return str(caught.value)

    def fit(module: Program, **options: Any) -> None:
        silent_trainer(strategy="fsdp", devices=2, max_epochs=1, **options).fit(module, DataLoader(TensorDataset(X), 6))

    def set_up(*parts: nn.Module) -> None:
        model = nn.Sequential(*parts)
        Fabric(accelerator="cpu", devices=2, strategy="fsdp").setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return [
        said(lambda: fit(Program(step=narrow), precision="bf16-mixed")),
        said(lambda: fit(Program(step=reshaped))),
        said(lambda: set_up(Scaled())),
        said(lambda: fit(Program(batch_end=assign_state))),
        said(lambda: fit(Program(batch_end=add_layer, extra=with_layer))),
        said(lambda: fit(Program(step=differentiate))),
        said(lambda: fit(Chosen())),
        said(lambda: fit(Program(batch_end=save(lambda module: module.head.state_dict())))),
        said(lambda: fit(Program(epoch_end=save(lambda module: module.blocks[0])))),
    ]


def test_what_sharded_weights_cannot_do_is_refused() -> None:
    first, second = run_on_ranks(2, refusals)
    assert first == second
    names = [
        "bfloat16",
        "[5, 4]",
        "float64",
        "zeros_like",
        "on_train_epoch_start",
        "torch.autograd.grad",
        "inputs",
        "a tensor",
        "a Block",
    ]
    for message, name in zip(first, names, strict=True):
        says(message, name)


def carried(strategy: str, ranks: int) -> list[Tensor]:
    """Train twice; the hooks are those of the module, not of one fit."""
    module = Program(init=hooked)
    for _ in range(2):
        trainer = silent_trainer(strategy=strategy, devices=ranks, max_epochs=1)
        trainer.fit(module, DataLoader(TensorDataset(X), 12 // ranks))
    return [] if module.first.weight.is_meta else [each.detach() for each in module.parameters()]


def test_hooks_on_parameters_stay_for_the_next_fit() -> None:
    expected = carried("single", 1)
    torch.testing.assert_close(run_on_ranks(2, carried, "fsdp", 2)[0], expected, rtol=1e-4, atol=1e-5)
