"""Checkpoints without the base: what they hold, that they resume to the bit, and that another base is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import Adapted, frozen_of, row_loader
from hf_models import FineTuned, loader as token_loader, model_class, written
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks

import phalanx
from phalanx.callbacks import Callback, LambdaCallback
from phalanx.errors import CheckpointError

STEPS, SAVED = 4, 2
STRATEGIES = {"single": 1, "fsdp": 2, "hsdp": 2, "zero2": 2, "zero3": 2}


class Lean(Adapted):
    """Leaves frozen weights out of its checkpoints."""

    save_frozen = False


def fit(strategy: str, ranks: int, module: Adapted, callbacks: list[Callback], resume: Path | None = None) -> None:
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=STEPS, callbacks=callbacks)
    trainer.fit(module, row_loader(STEPS * 12, 12 // ranks), ckpt_path=resume)


def losses_and_weights(module: Adapted) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of this rank, and the weights of a rank that has them."""
    weights = {} if any(one.is_meta for one in module.parameters()) else module.state_dict()
    return module.losses, {name: one.clone() for name, one in weights.items()}


def undisturbed(strategy: str, ranks: int, path: Path, variant: str) -> Any:
    module = Lean(variant)

    def save(trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(path)

    fit(strategy, ranks, module, [LambdaCallback(on_train_batch_end=save)])
    return losses_and_weights(module)


def resumed(strategy: str, ranks: int, path: Path, variant: str, late: bool = False) -> Any:
    # The generator is elsewhere than in the fit that saved.
    torch.manual_seed(99)
    module = Lean(variant, late)
    fit(strategy, ranks, module, [], path)
    return losses_and_weights(module)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fit_resumes_to_the_bit_from_trained_weights_alone(strategy: str, tmp_path: Path) -> None:
    ranks, path = STRATEGIES[strategy], tmp_path / "lean.ckpt"
    whole = run_on_ranks(ranks, undisturbed, strategy, ranks, path, "dropout", timeout=120.0)
    manifest = phalanx.checkpoint.inspect(path).sections["model"]
    frozen = frozen_of(Lean("dropout"))
    assert (manifest.left_out, manifest.left_out_elements) == (len(frozen), sum(one.numel() for one in frozen.values()))
    assert phalanx.checkpoint.verify(path) == []
    late = strategy in ("fsdp", "zero3")
    again = run_on_ranks(ranks, resumed, strategy, ranks, path, "dropout", late, timeout=120.0)
    for (losses, weights), (found, after) in zip(whole, again, strict=True):
        assert found == losses[SAVED:]
        assert weights.keys() == after.keys()
        assert all(torch.equal(weights[name], after[name]) for name in weights)


def test_it_moves_between_strategies_and_zero3(tmp_path: Path) -> None:
    chain = [("fsdp", 2), ("zero3", 3), ("ddp", 3), ("fsdp", 3)]
    path = tmp_path / "first.ckpt"
    losses, _ = undisturbed("single", 1, path, "conv1d")
    expected = torch.tensor(losses[SAVED:])
    for strategy, ranks in chain:
        path, before = tmp_path / f"{strategy}-{ranks}.ckpt", path
        copies = run_on_ranks(ranks, resaved, strategy, ranks, before, path, timeout=120.0)
        torch.testing.assert_close(torch.tensor(copies).mean(0), expected, rtol=1e-5, atol=0.0)
    left_out = [phalanx.checkpoint.open_checkpoint(each).left_out for each in (tmp_path / "first.ckpt", path)]
    assert left_out[0] == left_out[1]


def resaved(strategy: str, ranks: int, path: Path, to: Path) -> list[float]:
    """Resume, and save the restored state before the first step."""
    module = Lean("conv1d")
    fit(strategy, ranks, module, [LambdaCallback(on_train_start=lambda trainer, _: trainer.save_checkpoint(to))], path)
    return module.losses


# ---- bases that load_pretrained reads from a folder ------------------------------------------------------------------


class LowRank(FineTuned):
    """Trains adapters of a model whose weights come from a folder. Checkpoints hold the adapters alone."""

    save_frozen = False

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model

        if self.net is None:
            super().configure_model()
            self.net = get_peft_model(self.net, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.1)


def trained(strategy: str, ranks: int, folder: Path, steps: int, path: Path, resume: bool) -> list[float]:
    """Return the losses of a fit of so many steps, which writes a checkpoint, or continues from it."""
    torch.manual_seed(7 if resume else 3)
    module = LowRank("llama", folder)
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=steps)
    trainer.fit(module, token_loader(ranks), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return module.losses


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2), ("zero3", 2)])
def test_a_fit_resumes_with_the_base_of_its_folder(strategy: str, ranks: int, tmp_path: Path) -> None:
    folder, path = written("llama", tmp_path / "base"), tmp_path / "half"
    whole = run_on_ranks(ranks, trained, strategy, ranks, folder, 4, tmp_path / "whole", False)
    run_on_ranks(ranks, trained, strategy, ranks, folder, 2, path, False)
    # The folder may be elsewhere.
    moved = folder.rename(tmp_path / "moved")
    again = run_on_ranks(ranks, trained, strategy, ranks, moved, 4, path, True)
    assert again == [losses[2:] for losses in whole]


def test_other_stages_read_the_folder_too(tmp_path: Path) -> None:
    class Frozen(FineTuned):
        save_frozen = False

        def configure_model(self) -> None:
            super().configure_model()
            for name, one in self.net.named_parameters():
                one.requires_grad_("norm" in name)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(input_ids=batch, labels=batch).loss)

    folder, path = written("llama", tmp_path / "base"), tmp_path / "saved"
    module = Frozen("llama", folder, empty=True)
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, token_loader())
    trainer.save_checkpoint(path)
    expected = silent_trainer().validate(module, token_loader())

    assert silent_trainer().validate(Frozen("llama", folder, empty=True), token_loader(), ckpt_path=path) == expected
    rebuilt = Frozen.load_from_checkpoint(path, kind="llama", folder=folder, empty=True)
    state = rebuilt.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())

    other = model_class("llama").from_pretrained(folder)
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    with refuses(CheckpointError, "net.model.embed_tokens.weight"):
        Frozen.load_from_checkpoint(path, kind="llama", folder=tmp_path / "other", empty=True)
