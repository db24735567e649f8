"""The stages of a module in which pretrained weights are loaded, and those in which others replace them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_models import FineTuned, loader, model_class, written
from models import silent_trainer
from torch import Tensor


class Validated(FineTuned):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("empty", [False, True])
def test_a_trained_module_keeps_its_weights_and_a_resumed_fit_those_of_its_checkpoint(
    empty: bool, tmp_path: Path
) -> None:
    folder = written("gpt2", tmp_path / "given")
    module = Validated("gpt2", folder, empty)
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "saved")
    document = json.loads((tmp_path / "saved" / "manifest.json").read_text())["document"]
    assert document["pretrained"] == list(module.pretrained_sources)
    assert document["pretrained"][0]["path"] == str(folder)
    trained = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    # A hook without a guard asks again in every stage.
    module.load_pretrained(folder)
    silent_trainer().validate(module, loader())
    assert all(torch.equal(tensor, trained[name]) for name, tensor in module.state_dict().items())

    resumed = FineTuned("gpt2", tmp_path / "gone", empty)
    silent_trainer(max_steps=1).fit(resumed, loader(), ckpt_path=tmp_path / "saved", pretrained=tmp_path / "gone")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in resumed.state_dict().items())
    assert resumed.pretrained_sources == module.pretrained_sources
    rebuilt = Validated.load_from_checkpoint(tmp_path / "saved", kind="gpt2", folder=tmp_path / "gone", empty=empty)
    assert rebuilt._pretrained_requests == ()

    silent_trainer(max_steps=0).fit(module, loader(), pretrained=folder)
    expected = model_class("gpt2").from_pretrained(folder)
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in module.net.state_dict().items())
