"""Checkpoints without frozen weights, of modules whose base is read from a folder by ``load_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FineTuned, loader, model_class, written
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks

from phalanx.errors import CheckpointError

STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "zero3": 2}


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
    trainer.fit(module, loader(ranks), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return module.losses


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES.items())
def test_a_fit_resumes_with_the_base_of_its_folder(strategy: str, ranks: int, tmp_path: Path) -> None:
    folder, path = written("llama", tmp_path / "base"), tmp_path / "half"
    whole = run_on_ranks(ranks, trained, strategy, ranks, folder, 4, tmp_path / "whole", False)
    run_on_ranks(ranks, trained, strategy, ranks, folder, 2, path, False)
    # The folder may be elsewhere.
    moved = folder.rename(tmp_path / "moved")
    again = run_on_ranks(ranks, trained, strategy, ranks, moved, 4, path, True)
    assert again == [losses[2:] for losses in whole]


@pytest.mark.parametrize("empty", [False, True])
def test_other_stages_read_the_folder_too(empty: bool, tmp_path: Path) -> None:
    class Frozen(FineTuned):
        save_frozen = False

        def configure_model(self) -> None:
            super().configure_model()
            for name, one in self.net.named_parameters():
                one.requires_grad_("norm" in name)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(input_ids=batch, labels=batch).loss)

    folder, path = written("llama", tmp_path / "base"), tmp_path / "saved"
    module = Frozen("llama", folder, empty)
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    expected = silent_trainer().validate(module, loader())

    assert silent_trainer().validate(Frozen("llama", folder, empty), loader(), ckpt_path=path) == expected
    rebuilt = Frozen.load_from_checkpoint(path, kind="llama", folder=folder, empty=empty)
    state = rebuilt.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())

    other = model_class("llama").from_pretrained(folder)
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    with refuses(CheckpointError, "net.model.embed_tokens.weight"):
        Frozen.load_from_checkpoint(path, kind="llama", folder=tmp_path / "other", empty=empty)
