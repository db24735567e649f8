"""Accelerate's names over Fabric: a loop with its import lines changed trains as with Accelerate, or as plain torch."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks, run_script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.compat import accelerate as compat
from phalanx.compat.accelerate import Accelerator, find_executable_batch_size
from phalanx.compat.accelerate.local_sgd import LocalSGD
from phalanx.framework.core.errors import CheckpointError, ConfigurationError

LOOP = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from {accelerate} import Accelerator
from {accelerate}.logging import get_logger
from {accelerate}.utils import ProjectConfiguration, set_seed


def train(folder, **options):
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir=folder, project_config=project,
        **options,
    )
    logger = get_logger(__name__)
    logger.info("begins", main_process_only=True)
    set_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.init_trackers("project", config={{"lr": 0.01}})
    step = 0
    for _ in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += 1
            accelerator.log({{"loss": loss.item()}}, step=step)
        accelerator.save_state()
    with torch.no_grad():
        rows = [accelerator.gather_for_metrics((model(a) - b).abs()) for a, b in loader]
    accelerator.end_training()
    weights = [p.tolist() for p in accelerator.unwrap_model(model).parameters()]
    kind = accelerator.distributed_type.value
    return weights, torch.cat(rows).flatten().tolist(), scheduler.get_last_lr(), kind
"""

ENDING = """
import sys
print("RESULT", json.dumps(train(sys.argv[1])))
"""


def plain_torch() -> list[Any]:
    """Train the same model in one process, on the batches that two processes share."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
    for _ in range(3):
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for _ in range(2):
                scheduler.step()
            optimizer.zero_grad()
    return [parameter.tolist() for parameter in model.parameters()]


def on_rank(folder: Path, devices: int) -> Any:
    namespace: dict[str, Any] = {"__name__": "loop"}
    exec(LOOP.format(accelerate="phalanx.compat.accelerate"), namespace)
    return namespace["train"](str(folder), devices=devices)


def assert_equal_weights(actual: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=1e-6)


def test_a_loop_trains_as_with_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    output = run_script(LOOP.format(accelerate="accelerate") + ENDING, str(tmp_path / "theirs")).stdout
    theirs = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[7:])
    ours = on_rank(tmp_path / "ours", devices=1)
    assert_equal_weights(ours[0], theirs[0])
    assert ours[1:3] == (pytest.approx(theirs[1], abs=1e-6), pytest.approx(theirs[2]))
    assert ours[3] == theirs[3] == "NO"
    assert sorted(path.name for path in (tmp_path / "ours" / "checkpoints").iterdir()) == [
        "checkpoint_1",
        "checkpoint_2",
    ]


def test_a_loop_on_two_ranks_trains_as_plain_torch(tmp_path: Path) -> None:
    results = run_on_ranks(2, on_rank, tmp_path, 2)
    for weights, rows, rates, kind in results:
        assert_equal_weights(weights, plain_torch())
        assert (len(rows), rates, kind) == (32, [pytest.approx(0.01 * (1 - 0.9 * 12 / 24))], "MULTI_CPU")


def accumulated_by_hand() -> tuple[int, list[float], list[float]]:
    """Accumulate without ``accumulate``: ``no_sync`` skips the reduction, and ``backward`` divides the loss."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, devices=2)
    accelerator.gradient_accumulation_steps = 2
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    norms = []
    for window in torch.randn(4, 2, 2, 3, 4, generator=torch.Generator().manual_seed(0)):
        for number, ranks in enumerate(window):
            with model.no_sync() if number == 0 else nullcontext():
                accelerator.backward(model(ranks[accelerator.process_index]).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        assert norm is not None
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.gradient_accumulation_steps, norms, model.weight.flatten().tolist()


def by_hand_in_plain_torch() -> tuple[list[float], list[float]]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = torch.randn(4, 2, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    norms = []
    for window in rows:
        model(window.flatten(end_dim=-2)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.weight.flatten().tolist()


def test_accumulation_without_accumulate_on_two_ranks_trains_as_plain_torch() -> None:
    expected_norms, expected = by_hand_in_plain_torch()
    for steps, norms, weights in run_on_ranks(2, accumulated_by_hand):
        assert steps == 2
        assert norms == pytest.approx(expected_norms, abs=1e-6)
        assert weights == pytest.approx(expected, abs=1e-6)


def averaged_now_and_then() -> tuple[float, float]:
    accelerator = Accelerator(cpu=True, devices=2)
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for _ in range(2):
            accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(model.weight))
            local.step()
    return seen[1], float(model.weight)


def test_local_sgd_averages_weights_after_some_updates() -> None:
    assert run_on_ranks(2, averaged_now_and_then) == [(0.0, -1.0), (-2.0, -1.0)]


def test_a_smaller_batch_is_tried_when_memory_runs_out() -> None:
    seen = []

    def attempt(batch_size: int, extra: str) -> str:
        seen.append(batch_size)
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return extra

    train = find_executable_batch_size(attempt, starting_batch_size=10)
    assert train("done") == "done"
    assert seen == [10, 9, 8]
    with refuses(TypeError, "attempt"):
        train(4, "done")
    with pytest.raises(ZeroDivisionError):
        find_executable_batch_size(lambda batch_size: 1 / 0)()


def test_a_numbered_state_is_loaded_and_counted_from(tmp_path: Path) -> None:
    project = compat.utils.ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    layer = nn.Linear(1, 1)
    accelerator.prepare(layer)
    with refuses(CheckpointError, "load_state"):
        accelerator.load_state()
    before = layer.weight.item()
    accelerator.save_state()
    with torch.no_grad():
        layer.weight.zero_()
    accelerator.load_state()
    assert (layer.weight.item(), project.iteration) == (before, 1)


def test_fp8_is_that_of_torchao() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert accelerator.mixed_precision == accelerator.state.mixed_precision == "fp8"
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1)))
    layers = [type(layer).__name__ for layer in accelerator.unwrap_model(model)]
    assert layers == ["Linear", "Float8Linear", "Linear"]
    assert compat.utils.is_fp8_available()
    with refuses(ImportError, "mixed_precision='fp8'"):
        _ = compat.utils.AORecipeKwargs


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mixed_precision": "fp4"}, "mixed_precision='fp4'"),
        ({"kwargs_handlers": ["x"]}, "kwargs_handlers"),
        ({"log_with": "tensorbord"}, "'tensorboard'"),
        ({"deepspeed_plugin": compat.DeepSpeedPlugin(2, "cuda")}, "offload_optimizer_device='cuda'"),
        ({"megatron_lm_plugin": 1}, "megatron_lm_plugin=1"),
        ({"mixed_precison": "bf16"}, "'mixed_precision'"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], name: str) -> None:
    with refuses(ConfigurationError, name):
        Accelerator(cpu=True, **arguments)
