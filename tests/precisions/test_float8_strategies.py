"""``fp8-mixed`` under every registered strategy: trained, saved and resumed, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import LanguageModel, adamw, token_loader
from messages import refuses
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor
from torch_strategies import RANKS, strategy_named

from phalanx import Fabric
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.registry import STRATEGIES

STEPS, GLOBAL_BATCH, WINDOW = 3, 8, 2
ROWS = STEPS * GLOBAL_BATCH * WINDOW
TOLERANCE_OF_BF16 = 2e-2


def trained(name: str, root: str, precision: str, stop: int, ckpt: str | None) -> tuple[list[float], Tensor | None]:
    """Train until ``stop``, two micro-batches a step; save there; return losses, and weights on rank 0."""
    ranks, module = RANKS[name], LanguageModel()
    trainer = silent_trainer(
        devices=ranks,
        strategy=strategy_named(name),
        max_steps=stop,
        precision=precision,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=0.5,
        default_root_dir=root,
    )
    trainer.fit(module, token_loader(ROWS, GLOBAL_BATCH // ranks), ckpt_path=ckpt)
    trainer.save_checkpoint(f"{root}/{stop}.ckpt")
    return module.losses, weights_of(module) if trainer.is_global_zero else None


def four_runs(name: str, root: str) -> dict[str, tuple[list[float], Tensor | None]]:
    return {
        "bf16": trained(name, f"{root}/bf16", "bf16-mixed", STEPS, None),
        "fp8": trained(name, f"{root}/fp8", "fp8", STEPS, None),
        "first": trained(name, f"{root}/parts", "fp8", 1, None),
        "rest": trained(name, f"{root}/parts", "fp8", STEPS, f"{root}/parts/1.ckpt"),
    }


@pytest.mark.parametrize("name", [name for name in RANKS if name not in ("fsdp", "ddp_find_unused_parameters_true")])
def test_fp8_trains_as_bf16_does_and_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    ranks = RANKS[name]
    found = [four_runs(name, str(tmp_path))] if ranks == 1 else run_on_ranks(ranks, four_runs, name, str(tmp_path))
    for each in found:
        (half, _), (eighth, weights), (first, _), (rest, resumed) = each.values()
        assert half != eighth
        assert len(half) == STEPS * WINDOW
        torch.testing.assert_close(torch.tensor(eighth), torch.tensor(half), rtol=TOLERANCE_OF_BF16, atol=0)
        assert first + rest == eighth
        assert weights is None or (resumed is not None and torch.equal(weights, resumed))
    assert found[0]["fp8"][1] is not None


# test_pipeline_refusals.py has pipelines, which need windows of several micro-batches.
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(RANKS) - {"pipeline"}))
def test_every_other_strategy_refuses_fp8_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_NVME_PATH", str(tmp_path))
    makes: list[Any] = [silent_trainer, lambda **arguments: Fabric(accelerator="cpu", **arguments)]
    for make in makes:
        with refuses(ConfigurationError, "precision='fp8-mixed'") as raised:
            make(strategy=name, precision="fp8", devices=2)
        assert "\n" not in str(raised.value)


def evaluated_in_a_loop(name: str) -> None:
    ranks = RANKS[name]
    fabric = Fabric(accelerator="cpu", strategy=strategy_named(name), devices=ranks, precision="fp8")
    fabric.launch()
    net = LanguageModel()
    model, optimizer = fabric.setup(net, adamw(net, net.lr))
    (rows,) = next(iter(fabric.setup_dataloaders(token_loader(ROWS, GLOBAL_BATCH // ranks))))
    with torch.no_grad():
        expected = model(rows)
    with torch.inference_mode():
        assert torch.equal(model(rows), expected)
        # A tensor that was made in inference mode.
        assert torch.equal(model(rows.clone()), expected)
        assert torch.is_inference_mode_enabled()
    fabric.backward(model(rows).float().mean())
    optimizer.step()
    fabric.free_memory()


def test_a_set_up_module_is_evaluated_in_the_users_inference_mode() -> None:
    evaluated_in_a_loop("single")
    run_on_ranks(2, evaluated_in_a_loop, "fsdp")
