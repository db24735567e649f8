"""``forward_backward``: evaluation, loss scales and random numbers of a pipeline, windows without data, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_model import LanguageModel, tokens
from messages import refuses
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric
from phalanx.errors import ConfigurationError, DesyncError, LoopError


class Tower(nn.Module):
    """Repeated blocks that return the hidden states beside the output."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
            self.last = nn.Linear(6, 2)
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return results for [batch, 6]."""
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x, "parts": [self.last(x), self.last(x) + self.shift], "rows": len(x)}

    def loss(self, x: Tensor) -> Tensor:
        """Return the mean of the squared output."""
        result: Tensor = self(x)["parts"][0].square().mean()
        return result


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def in_pipeline(module: nn.Module, parallel: str = "pp=2", **settings: Any) -> tuple[Fabric, Any, Any]:
    ranks = torch.distributed.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="pipeline", parallel=parallel, **settings)
    fabric.launch()
    return fabric, *fabric.setup(module, sgd(module))


X = torch.linspace(-1, 1, 24).view(4, 6)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluated() -> tuple[Any, Any, Any]:
    fabric, model, optimizer = in_pipeline(Tower(), "pp=2,dp_shard=2")
    model.mark_forward_method("loss")
    model.eval()
    with torch.no_grad():
        before = model(X)
    model.train()
    fabric.forward_backward(lambda x: model(x)["parts"][0].square().mean(), [X])
    optimizer.step()
    with torch.inference_mode():
        rows = fabric.gather_for_metrics(model(X)["parts"][1])
        return before, model.loss(X), rows


def test_a_forward_pass_without_gradients_returns_its_output_on_all_ranks() -> None:
    module = Tower()
    before = module(X)
    module.loss(X).backward()
    sgd(module).step()
    loss, rows = module.loss(X), module(X)["parts"][1]
    for found, found_loss, gathered in run_on_ranks(4, evaluated):
        torch.testing.assert_close(found, before)
        torch.testing.assert_close(found_loss, loss)
        torch.testing.assert_close(gathered, rows.repeat(2, 1))


# ---- loss scales and losses that are not finite ------------------------------------------------------------------


def scaled() -> tuple[bool, bool, Tensor, Tensor]:
    fabric, model, optimizer = in_pipeline(Tower(), precision="16-mixed")
    window = [X, X + 1]
    step: Callable[[Tensor], Tensor] = lambda x: model(x)["parts"][0].square().mean() * (1e30 if x[0, 0] > 5 else 1)  # noqa: E731
    fabric.forward_backward(step, [X, X + 9])
    optimizer.step()
    optimizer.zero_grad()
    skipped = optimizer.step_was_skipped
    losses = fabric.forward_backward(step, window, [1.0, 3.0])
    norm = fabric.clip_gradients(model, optimizer, max_norm=1e9)
    assert norm is not None
    optimizer.step()
    return skipped, optimizer.step_was_skipped, losses, norm


def test_an_update_that_overflows_is_skipped_on_all_ranks_and_the_next_is_unscaled() -> None:
    module = Tower()
    with torch.autocast("cpu", torch.float16):
        losses = [module.loss(X), module.loss(X + 1)]
    (losses[0] / 4 + losses[1] * 3 / 4).backward()
    norm = nn.utils.get_total_norm([each.grad for each in module.parameters() if each.grad is not None])
    for first, second, found, found_norm in run_on_ranks(2, scaled):
        assert (first, second) == (True, False)
        torch.testing.assert_close(found, torch.stack(losses).detach().float(), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(found_norm, norm, rtol=1e-2, atol=1e-3)


# ---- random numbers --------------------------------------------------------------------------------------------------


def noises() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    fabric, model, _ = in_pipeline(Tower())

    def step(x: Tensor) -> Tensor:
        noise = torch.rand(1)
        # The target is drawn on the last stage, the input on the first one: they are one number.
        hidden: Tensor = model(noise.expand(4, 6))["hidden"]
        return (hidden * 0).mean() + noise.squeeze()

    return fabric.forward_backward(step, [X, X]).tolist()


def test_ranks_of_a_pipeline_draw_the_same_numbers_also_if_they_were_not_seeded() -> None:
    first, second = run_on_ranks(2, noises)
    assert first == second
    torch.manual_seed(0)
    assert first == [pytest.approx(torch.rand(1).item()) for _ in range(2)]


# ---- windows without data or weight ----------------------------------------------------------------------------------


def alone() -> tuple[Fabric, Any, Any]:
    fabric, module = Fabric(accelerator="cpu", devices=1), Tower()
    model, optimizer = fabric.setup(module, sgd(module))
    model.mark_forward_method("loss")
    return fabric, model, optimizer


@pytest.mark.parametrize(("window", "weights"), [([], []), ([X], [0.0])])
def test_a_window_without_weight_keeps_gradients_that_exist(window: list[Tensor], weights: list[float]) -> None:
    fabric, model, optimizer = alone()
    plain = Tower()
    plain.loss(X).backward()
    sgd(plain).step()
    fabric.forward_backward(model.loss, [X])
    fabric.forward_backward(model.loss, window, weights)
    optimizer.step()
    assert not optimizer.step_was_skipped
    torch.testing.assert_close(model.last.weight.detach(), plain.last.weight.detach())
    # Gradients that were dropped stay dropped.
    fabric.forward_backward(model.loss, [X])
    optimizer.zero_grad()
    fabric.forward_backward(model.loss, window, weights)
    optimizer.step()
    assert optimizer.step_was_skipped


def clipped_without_data() -> float:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero2")
    fabric.launch()
    module = Tower()
    model, optimizer = fabric.setup(module, sgd(module))
    norms = []
    for window in ([], [X]):
        fabric.forward_backward(lambda x: model(x)["parts"][0].square().mean(), window)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0))
        optimizer.step()
    fabric.free_memory()
    assert norms[0] is not None
    return norms[0].item()


def test_a_window_without_data_has_the_norm_zero() -> None:
    assert run_on_ranks(2, clipped_without_data) == [0.0, 0.0]


def test_a_step_that_failed_does_not_end_training() -> None:
    fabric, model, optimizer = alone()
    with pytest.raises(ZeroDivisionError):
        fabric.forward_backward(lambda x: 1 / 0, [X])
    fabric.forward_backward(lambda x: model(x)["hidden"].mean(), [X, X])
    optimizer.step()
    assert fabric.sync_gradients
    assert not fabric.is_accumulating
    assert optimizer.applied == 1


# ---- what is refused ---------------------------------------------------------------------------------------------


def outside(fabric: Fabric, model: Any, optimizer: Any) -> None:
    model(X)


def backward(fabric: Fabric, model: Any, optimizer: Any) -> None:
    fabric.backward(torch.ones(1, requires_grad=True).sum())


def accumulate(fabric: Fabric, model: Any, optimizer: Any) -> None:
    with fabric.accumulate(model):
        pass


def without_sync(fabric: Fabric, model: Any, optimizer: Any) -> None:
    with model.no_sync():
        pass


def teacher(fabric: Fabric, model: Any, optimizer: Any) -> None:
    other = fabric.setup(Tower())
    fabric.forward_backward(lambda x: (other(x)["hidden"] - model(x)["hidden"]).square().mean(), [X], model=model)


def uneven(fabric: Fabric, model: Any, optimizer: Any) -> None:
    fabric.forward_backward(lambda x: model(x)["hidden"].mean(), [X] * (1 + fabric.global_rank))


@pytest.mark.parametrize(
    ("attempt", "kind", "words"),
    [
        (outside, LoopError, ["Tower was called with gradients", "fabric.forward_backward(step", "torch.no_grad()"]),
        (backward, ConfigurationError, ["backward is for", "'pipeline'", "fabric.forward_backward(step"]),
        (accumulate, ConfigurationError, ["accumulate is for", "fabric.forward_backward(step"]),
        (without_sync, ConfigurationError, ["no_sync is for", "fabric.forward_backward(step"]),
        (teacher, LoopError, ["trains another module", "before forward_backward"]),
        (uneven, DesyncError, ["1, 2 micro-batches on ranks 0 to 1", "setup_dataloaders"]),
    ],
)
def test_a_call_that_a_pipeline_cannot_run_is_refused_on_all_ranks(
    attempt: Callable[..., None], kind: type, words: list[str]
) -> None:
    for message in run_on_ranks(2, refusal, attempt, kind):
        assert [word for word in words if word not in message] == []


def refusal(attempt: Callable[..., None], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        attempt(*in_pipeline(Tower()))
    return str(caught.value)


def inside_accumulate(fabric: Fabric, model: Any) -> None:
    with fabric.accumulate(model):
        fabric.forward_backward(model.loss, [X])


def after_accumulate(fabric: Fabric, model: Any, window: int) -> None:
    fabric.set_accumulation(window)
    with fabric.accumulate(model):
        fabric.backward(model.loss(X))
    fabric.forward_backward(model.loss, [X])


@pytest.mark.parametrize(
    ("attempt", "kind", "name"),
    [
        (lambda f, m: f.forward_backward(lambda x: None, [X]), LoopError, "NoneType"),
        (lambda f, m: f.forward_backward(lambda x: {1: m.loss(x), "x": 2}, [X]), LoopError, "['1', 'x']"),
        (lambda f, m: f.forward_backward(lambda x: x, [X]), LoopError, "(4, 6)"),
        (lambda f, m: f.forward_backward(lambda x: m.loss(x).detach(), [X]), LoopError, "no_grad"),
        (lambda f, m: f.forward_backward(lambda x: f.backward(m.loss(x)), [X]), ConfigurationError, "backward"),
        (lambda f, m: f.forward_backward(m.loss, X), ConfigurationError, "Tensor"),
        (lambda f, m: f.forward_backward([X], m.loss), ConfigurationError, "list as"),
        (lambda f, m: f.forward_backward(m.loss, [X], [-1]), ConfigurationError, "weight=-1.0"),
        (lambda f, m: f.forward_backward(m.loss, [X], [1, 2]), ConfigurationError, "2 weights"),
        (lambda f, m: f.forward_backward(m.loss, [X], 6), ConfigurationError, "weights="),
        (lambda f, m: f.forward_backward(m.loss, [X], [None]), ConfigurationError, "weights="),
        (lambda f, m: f.windows([X], 0), ConfigurationError, "size=0"),
        (inside_accumulate, ConfigurationError, "accumulate"),
        (lambda f, m: after_accumulate(f, m, window=2), ConfigurationError, "window of accumulate"),
        (lambda f, m: after_accumulate(f, m, window=1), ConfigurationError, "optimizer.step"),
    ],
)
def test_a_mistake_is_refused_with_the_next_step(attempt: Callable[..., None], kind: type, name: str) -> None:
    fabric, model, _ = alone()
    with refuses(kind, name):
        attempt(fabric, model)


@pytest.mark.parametrize("verb", ["step", "zero_grad", "clip"])
def test_a_step_neither_updates_nor_clips(verb: str) -> None:
    fabric, model, optimizer = alone()

    def mistaken(x: Tensor) -> Tensor:
        loss: Tensor = model.loss(x)
        if verb == "clip":
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        else:
            getattr(optimizer, verb)()
        return loss

    with refuses(ConfigurationError, "forward_backward"):
        fabric.forward_backward(mistaken, [X, X])


def without_model() -> str:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, _ = (fabric.setup(module, sgd(module))[0] for module in (Tower(), Tower()))
    with pytest.raises(ConfigurationError) as caught:
        fabric.forward_backward(lambda x: model(x)["hidden"].mean(), [X] if fabric.global_rank == 0 else [])
    fabric.free_memory()
    return str(caught.value)


def test_a_rank_without_data_needs_to_know_the_module() -> None:
    assert all("model=..." in message for message in run_on_ranks(2, without_model))


def test_cut_sequences_need_weights() -> None:
    for message in run_on_ranks(2, without_weights):
        assert "needs forward_backward(weights=...)" in message


def without_weights() -> str:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, parallel={"cp": 2})
    fabric.launch()
    module = LanguageModel()
    model, _ = fabric.setup(module, sgd(module))
    with pytest.raises(ConfigurationError) as refused:
        fabric.forward_backward(lambda rows: model(fabric.part(rows)).mean(), [tokens(4)])
    return str(refused.value)
