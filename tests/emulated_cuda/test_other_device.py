"""Fits on a device that is neither a CPU nor CUDA: a backend that torch does not know, on the kernels of the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cuda_machine import EMULATED
from ranks import run_script

pytestmark = pytest.mark.skipif(not EMULATED, reason="the emulated devices are built for a torch without CUDA")

HERE = Path(__file__).parent
START = f"""
import json, sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
import other_device
other_device.enable()
import torch
from models import Regressor, loader, silent_trainer
from phalanx import Fabric, Trainer
from phalanx.errors import ConfigurationError
"""


def found(source: str, *arguments: str) -> Any:
    # The first use compiles the devices.
    outcome = run_script(START + source, *arguments, timeout=300)
    assert outcome.returncode == 0, outcome.stdout
    return json.loads(outcome.stdout.splitlines()[-1])


def test_fits_saves_and_resumes_are_those_of_the_cpu(tmp_path: Path) -> None:
    result = found(
        """
from phalanx.callbacks import ModelCheckpoint
folder = sys.argv[1]

def fit(accelerator, steps, ckpt_path=None, **arguments):
    torch.manual_seed(1)
    module = Regressor(dropout=arguments.pop("dropout", 0.0))
    saves = ModelCheckpoint(f"{folder}/{accelerator}", "{step}", every="4 steps", save_top_k=-1, asynchronous=True)
    trainer = silent_trainer(accelerator=accelerator, max_steps=steps, callbacks=saves, enable_checkpointing=True,
                             default_root_dir=folder, **arguments)
    trainer.fit(module, loader(40), ckpt_path=ckpt_path)
    return module.losses, trainer, [p.detach().cpu().flatten().tolist() for p in module.parameters()]

cpu, _, cpu_weights = fit("cpu", 12)
other, trainer, other_weights = fit("other", 12)
whole, _, whole_weights = fit("other", 12, dropout=0.5)
resumed, _, resumed_weights = fit("other", 12, f"{folder}/other/step=8-v1.ckpt", dropout=0.5)
report = json.load(open(f"{trainer.run_dir}/report.json"))
auto, gpu = silent_trainer(accelerator="auto"), silent_trainer(accelerator="gpu")
print(json.dumps({
    "same": cpu == other and cpu_weights == other_weights,
    "resumed": whole[8:] == resumed and whole_weights == resumed_weights,
    "device": str(trainer.world.device), "peak": trainer.throughput.peak_memory_bytes,
    "auto": auto.fabric.resources.device_type, "gpu": gpu.fabric.resources.device_type,
    "bf16": fit("other", 4, precision="bf16-true")[1].global_step,
}))
""",
        str(tmp_path),
    )
    assert result["same"]
    assert result["resumed"]
    assert (result["device"], result["auto"], result["gpu"]) == ("other:0", "other", "other")
    assert 0 < result["peak"] < 50_000_000
    assert result["bf16"] == 4


def test_nonfinite_losses_end_a_fit_and_evaluation_runs() -> None:
    result = found(
        """
from phalanx.errors import NonFiniteError

class Diverging(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 3 else loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

trainer = silent_trainer(accelerator="other", devices=[1], max_epochs=1)
module = Diverging()
try:
    trainer.fit(module, loader(40))
    raised = None
except NonFiniteError as error:
    raised = trainer.global_step
metrics = trainer.validate(module, loader(8))
predicted = trainer.predict(module, loader(8))
print(json.dumps({"raised": raised, "metrics": list(metrics[0]), "on": str(trainer.world.device),
                  "predicted": str(predicted[0].device)}))
"""
    )
    assert result["raised"] == 3
    assert result["metrics"] == ["val_loss"]
    assert result["on"] == "other:1"


def test_several_ranks_need_collectives_for_the_device() -> None:
    result = found(
        """
texts = []
for arguments in ({"devices": 2}, {"devices": 3}, {"accelerator": "mps"}, {"accelerator": "cuda"}, {"devices": [2]}):
    try:
        Trainer(**{"accelerator": "other", "logger": False, **arguments})
    except ConfigurationError as error:
        texts.append(str(error))
ranks = silent_trainer(accelerator="auto", devices=2).fabric.resources
print(json.dumps([texts, ranks.device_type]))
"""
    )
    texts, device_type = result
    assert "2 ranks on OTHER devices need a backend of torch.distributed" in texts[0]
    assert "devices=3 but torch sees 2 OTHER device(s)" in texts[1]
    assert "accelerator='mps' but torch sees no MPS device" in texts[2]
    assert "use 'other' or 'cpu'" in texts[3]
    assert "different indices from 0 to 1" in texts[4]
    assert device_type == "cpu"


def test_a_fabric_trains_on_it() -> None:
    result = found(
        """
fabric = Fabric(accelerator="other")
model = torch.nn.Linear(6, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
(data,) = [fabric.setup_dataloaders(loader(16))]
for x, y in data:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    fabric.backward(loss)
    optimizer.step()
print(json.dumps([str(loss.device), float(loss.detach())]))
"""
    )
    device, loss = result
    assert device == "other:0"
    assert 0 < loss < 10
