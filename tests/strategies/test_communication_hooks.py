"""Communication hooks of ``ddp`` train as in plain torch with the same hook, with accumulation and uneven data."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from messages import refuses, says
from models import Regressor, loader, network, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from phalanx import Fabric, TrainModule
from phalanx.compat import accelerate as compat
from phalanx.errors import ConfigurationError
from phalanx.strategies import DDPStrategy, FSDPStrategy

FP16, POWER_SGD = compat.DDPCommunicationHookType.FP16, compat.DDPCommunicationHookType.POWER_SGD
POWER = partial(powerSGD_hook.PowerSGDState, None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
HOOKS: dict[str, dict[str, Any]] = {
    "fp16": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    "bf16": {"ddp_comm_hook": default_hooks.bf16_compress_hook},
    "power_sgd": {"ddp_comm_hook": powerSGD_hook.powerSGD_hook, "ddp_comm_state": POWER},
    "power_sgd_by_shape": {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": partial(POWER, batch_tensors_with_same_shape=True),
    },
    "power_sgd_in_bf16": {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": POWER,
        "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper,
    },
}


class Recorded(Regressor):
    """Keeps the batches of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: dict[int, list[Any]] = defaultdict(list)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.windows[self.global_step].append(batch)
        return super().training_step(batch, batch_idx)


def replica(net: nn.Module, name: str | None) -> nn.parallel.DistributedDataParallel:
    """Wrap a network as by hand in plain torch."""
    ddp = nn.parallel.DistributedDataParallel(net)
    if name is not None:
        given = HOOKS[name]
        hook = given.get("ddp_comm_wrapper", lambda each: each)(given["ddp_comm_hook"])
        state = given["ddp_comm_state"]() if "ddp_comm_state" in given else None
        # Torch refuses its hooks in bf16 by their names where ranks use gloo.
        ddp.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    return ddp


def by_hand(windows: list[list[Any]], name: str | None) -> Tensor:
    """Train on this rank's windows, some of which may be empty; a window's loss is the mean over all ranks."""
    net = network()
    ddp, optimizer = replica(net, name), torch.optim.AdamW(net.parameters(), lr=0.05)
    for window in windows:
        count = torch.tensor(float(len(window)))
        torch.distributed.all_reduce(count)
        optimizer.zero_grad()
        for position, (x, y) in enumerate(window):
            ddp.require_backward_grad_sync = position == len(window) - 1
            (nn.functional.mse_loss(ddp(x), y) * 2 / count).backward()
        if not window:
            ddp.require_backward_grad_sync = True
            (ddp(torch.zeros(1, 6)).sum() * 0).backward()
        optimizer.step()
    return weights_of(net)


def trained(name: str, samples: int, **arguments: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """Train through the Trainer; return its weights, those by hand with and without hook, and the emptiest window."""
    module = Recorded()
    strategy = DDPStrategy(**HOOKS[name], **arguments)
    trainer = silent_trainer(strategy=strategy, devices=2, max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(module, loader(samples, 2))
    windows = [module.windows[step] for step in range(trainer.global_step)]
    return weights_of(module), by_hand(windows, name), by_hand(windows, None), min(map(len, windows))


@pytest.mark.parametrize("name", ["fp16", "power_sgd", "power_sgd_by_shape", "power_sgd_in_bf16"])
def test_a_hook_averages_as_in_plain_torch(name: str) -> None:
    results = run_on_ranks(2, trained, name, 33)
    for weights, expected, exact, _ in results:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights, results[0][0])
        assert (weights - exact).abs().max() > 1e-4
    assert min(emptiest for *_, emptiest in results) == 0


def train(verbs: Any, model: Any, optimizer: Any, batches: Any) -> list[list[Any]]:
    """Train with a Fabric or an Accelerator over windows of two batches; return the windows."""
    windows: list[list[Any]] = []
    for index, batch in enumerate(batches):
        windows += [[]] if index % 2 == 0 else []
        windows[-1].append(batch)
        with verbs.accumulate(model):
            verbs.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()
    return windows


def fabric_loop() -> tuple[Tensor, Tensor, int]:
    """Train with a Fabric over windows of two; return the weights, those by hand, and the state's own count."""
    state = POWER()
    strategy = DDPStrategy(ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=state)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, accumulate=2)
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    batches = fabric.setup_dataloaders(loader(40, 2))
    windows = train(fabric, model, optimizer, batches)
    return weights_of(net), by_hand(windows, "power_sgd"), state.iter


def test_a_hook_in_a_fabric_averages_as_in_plain_torch() -> None:
    for weights, expected, count in run_on_ranks(2, fabric_loop):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert count == 5


class Spoiled(Regressor):
    """Has a loss that is not a number in one step of rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if batch_idx == 5 and self.global_rank == 1 else loss


def after_a_spoiled_step() -> tuple[int, bool]:
    module = Spoiled()
    trainer = silent_trainer(strategy=DDPStrategy(**HOOKS["power_sgd"]), devices=2, max_epochs=1, nonfinite="skip")
    trainer.fit(module, loader(40, 2))
    return trainer.global_step, bool(weights_of(module).isfinite().all())


def test_power_sgd_continues_after_a_step_that_is_skipped() -> None:
    assert run_on_ranks(2, after_a_spoiled_step) == [(9, True)] * 2


class FrozenAtFirst(Regressor):
    """Trains a second layer from the second epoch on, so that the buckets change."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def after_unfreezing(makes_state: bool) -> int:
    given = {**HOOKS["power_sgd"], "ddp_comm_state": POWER if makes_state else POWER()}
    trainer = silent_trainer(strategy=DDPStrategy(**given), devices=2, max_epochs=2)
    trainer.fit(FrozenAtFirst(), loader(40, 2))
    return trainer.global_step


@pytest.mark.parametrize("makes_state", [True, False])
def test_power_sgd_continues_with_other_parameters(makes_state: bool) -> None:
    assert run_on_ranks(2, after_unfreezing, makes_state) == [20, 20]


class ByItself(Regressor):
    automatic_optimization = False


def refused_by_a_trainer() -> str:
    strategy = DDPStrategy(**HOOKS["fp16"])
    with pytest.raises(ConfigurationError) as caught:
        silent_trainer(strategy=strategy, devices=2, max_steps=1).fit(ByItself(), loader())
    return str(caught.value)


def refused_by_a_fabric() -> str:
    strategy = DDPStrategy(ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=POWER())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.setup(network())
    with pytest.raises(ConfigurationError) as caught:
        fabric.setup(network())
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "name"), [(refused_by_a_trainer, "ddp_comm_hook"), (refused_by_a_fabric, "ddp_comm_state")]
)
def test_a_hook_that_cannot_work_is_refused(function: Any, name: str) -> None:
    says(run_on_ranks(2, function), name)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"timeout": 60}, "stall_timeout="),
        ({"process_group_backend": "gloo"}, "process_group_backend='gloo'"),
        ({"bucket_cap": 5}, "'bucket_cap_mb'"),
        ({"ddp_comm_hok": 5}, "'ddp_comm_hook'"),
        ({"process_group": 5}, "process_group="),
        ({"ddp_comm_state": POWER}, "ddp_comm_hook"),
        ({"ddp_comm_hook": "fp16"}, "ddp_comm_hook='fp16'"),
        ({"ddp_comm_hook": powerSGD_hook.batched_powerSGD_hook}, "batch_tensors_with_same_shape=True"),
    ],
)
def test_an_argument_without_effect_is_refused_when_the_strategy_is_built(arguments: dict[str, Any], name: str) -> None:
    with refuses(ConfigurationError, name):
        DDPStrategy(**arguments)


def test_fsdp_names_its_own_way_to_compress() -> None:
    with refuses(ConfigurationError, "ddp_comm_hook=", "reduce_dtype=torch.bfloat16"):
        FSDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)


class WithAnUnusedLayer(Regressor):
    """Notes in how many buckets gradients arrive, and whether they share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Identity())
        self.unused = nn.Linear(64, 64)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [each.grad for each in self.net.parameters() if each.grad is not None]
        self.one_memory = len({each.untyped_storage().data_ptr() for each in gradients}) == 1


def counted(counts: list[int], state: Any, bucket: Any) -> Any:
    counts[0] += 1
    return default_hooks.allreduce_hook(state, bucket)


def with_option(name: str, value: Any) -> Any:
    """Return what an option of DDP changes."""
    counts = [0]
    hook = {"ddp_comm_hook": partial(counted, counts)} if name == "bucket_cap_mb" else {}
    module: TrainModule = WithAnUnusedLayer() if name == "static_graph" else WithSharedMemory()
    trainer = silent_trainer(strategy=DDPStrategy(**{name: value}, **hook), devices=2, max_steps=3)
    try:
        trainer.fit(module, loader(40, 2))
    except ConfigurationError:
        return "refused"
    return getattr(module, "one_memory", None), counts[0]


class WithSharedMemory(WithAnUnusedLayer):
    """Uses every layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.unused.weight.square().mean() + self.unused.bias.sum()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("gradient_as_bucket_view", [False, True], [(False, 0), (True, 0)]),
        ("bucket_cap_mb", [25, 0.001], [(False, 3), (False, 6)]),
        ("static_graph", [False, True], ["refused", (False, 0)]),
    ],
)
def test_options_of_ddp_have_their_effect(name: str, values: list[Any], expected: list[Any]) -> None:
    for value, effect in zip(values, expected, strict=True):
        assert run_on_ranks(2, with_option, name, value) == [effect] * 2


def with_accelerator(name: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Train with the names of Accelerate; return the weights, and those by hand."""
    handler = compat.DistributedDataParallelKwargs(comm_hook=compat.DDPCommunicationHookType(name), **options)
    accelerator = compat.Accelerator(
        cpu=True, devices=2, gradient_accumulation_steps=2, kwargs_handlers=[handler], strategy="ddp"
    )
    net = network()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
    model, optimizer, batches = accelerator.prepare(net, optimizer, loader(40, 2))
    windows = train(accelerator, model, optimizer, batches)
    return weights_of(net), by_hand(windows, "power_sgd_in_bf16" if options else name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bf16", {}),
        (
            "power_sgd",
            {
                "comm_wrapper": compat.DDPCommunicationHookType.BF16,
                "comm_state_option": POWER.keywords | {"matrix_approximation_rank": 2},
            },
        ),
    ],
)
def test_the_hooks_of_an_accelerator(name: str, options: dict[str, Any]) -> None:
    for weights, expected in run_on_ranks(2, with_accelerator, name, options):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_hook_of_an_accelerator_that_cannot_work_is_refused() -> None:
    with refuses(ConfigurationError, "comm_state_option", "PowerSGD"):
        compat.DistributedDataParallelKwargs(comm_state_option={"start_powerSGD_iter": 2}).options()
    with refuses(ConfigurationError, "comm_wrapper="):
        compat.DistributedDataParallelKwargs(comm_hook=FP16, comm_wrapper=POWER_SGD).options()
