"""Programs of Composer: what ``phalanx migrate`` translates as a whole, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from migrations import assert_becomes, rewritten
from ranks import run_script
from torch import nn

import phalanx
from phalanx.cli.main import main
from phalanx.cli.migrate.composer_counterparts import COMPOSER

SCRIPT = '''
"""A regression, written for Composer."""
import json
import os
import sys

import torch
from composer import Trainer
from composer.models import ComposerModel
from torch import nn

losses = []


class Net(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        loss = nn.functional.mse_loss(outputs, batch[1])
        losses.append(loss.item())
        return loss  # the mean


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    torch.manual_seed(7)
    inputs = torch.randn(32, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=4),
        optimizers=optimizer,
        max_duration="2ep",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    print("losses", json.dumps(losses))
'''


def losses_by_hand() -> list[float]:
    torch.manual_seed(7)
    inputs = torch.randn(32, 4)
    targets = inputs.sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    found = []
    for step in range(16):
        rows = slice(4 * (step % 8), 4 * (step % 8) + 4)
        loss = nn.functional.mse_loss(net(inputs[rows]), targets[rows])
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_script_trains_to_the_losses_of_a_loop_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert main(["migrate", str(file), "--write"]) == 0
    text = file.read_text()
    assert "from composer" not in text
    done = run_script(text, str(tmp_path))
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    assert json.loads(line.removeprefix("losses ")) == losses_by_hand()


PROGRAM = """
import composer
import torch

class Net(composer.ComposerModel):
    def forward(self, batch): ...
    def loss(self, outputs, batch): ...  # the loss

trainer = composer.Trainer(
    model=net, train_dataloader=data, eval_dataloader=val, optimizers=adam, device="cpu", {arguments}
)
trainer.fit()
trainer.eval()
"""


def test_the_model_the_trainer_and_its_calls_are_translated() -> None:
    after = """
    import phalanx
    import torch

    class Net(phalanx.TrainModule):
        def forward(self, batch): ...
        def loss(self, outputs, batch): ...  # the loss

        def training_step(self, batch, batch_idx):
            loss = self.loss(self(batch), batch)
            self.log("loss/train/total", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("loss/eval/total", self.loss(self(batch), batch))

        def configure_optimizers(self):
            return self.given_optimizer

    phalanx.seed_everything(3)
    net.given_optimizer = adam
    trainer = phalanx.Trainer(accelerator="cpu", max_epochs=1)
    trainer.fit(net, data, val)
    trainer.validate(net, val)
    """
    assert_becomes(PROGRAM.format(arguments='max_duration="1ep", seed=3'), after)


@pytest.mark.parametrize(
    ("arguments", "trainer"),
    [
        ("max_duration=3", "max_epochs=3"),
        ("max_duration='100ba'", "max_epochs=-1, max_steps=100"),
        ("max_duration='1ep', precision='amp_bf16'", 'max_epochs=1, precision="bf16-mixed"'),
        ("max_duration='1ep', train_subset_num_batches=5", "limit_train_batches=5, max_epochs=1"),
        ("max_duration='1ep', eval_interval='2ep'", "check_val_every_n_epoch=2, max_epochs=1"),
    ],
)
def test_arguments_are_translated(arguments: str, trainer: str) -> None:
    text = rewritten(PROGRAM.format(arguments=arguments)).text
    assert f'trainer = phalanx.Trainer(accelerator="cpu", {trainer})\n' in text


def test_a_program_that_is_not_certain_stays_and_all_its_parts_are_listed() -> None:
    program = PROGRAM.format(
        arguments="max_duration='10tok', algorithms=[composer.algorithms.EMA()], callbacks=[composer.callbacks.X()]"
    )
    found = rewritten(program)
    assert found.text == program
    reasons = " ".join(reason for _, reason in found.left)
    for part in (
        "max_duration='10tok'",
        "algorithms=[",
        "composer.algorithms.EMA: use phalanx.callbacks.EMAWeightAveraging.",
        "composer.callbacks.X: use one of phalanx.callbacks, or write a Callback.",
        "Net.loss: call it in training_step, which returns the loss.",
    ):
        assert part in reasons
    assert {line for line, _ in found.left} == {5, 7, 9, 10}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trainer.eval()", "trainer.state"),
        ("trainer.eval()", "print(trainer)"),
        ("optimizers=adam", "optimizers=Adam()"),
        ("optimizers=adam, ", ""),
        ("composer.ComposerModel", "composer.models.HuggingFaceModel"),
        ("def loss(self", "def other(self"),
        ("import torch", "from composer.utils import dist; dist.get_sampler(data)"),
    ],
)
def test_what_is_not_understood_leaves_the_program_as_it_is(old: str, new: str) -> None:
    program = PROGRAM.format(arguments="max_duration=1").replace(old, new)
    found = rewritten(program)
    assert found.text == program
    assert any("is not translated" in reason for _, reason in found.left)


def test_what_is_recommended_exists() -> None:
    for advice in COMPOSER.names.values():
        for word in advice.replace(",", " ").split():
            if word.startswith(("phalanx.callbacks.", "phalanx.loggers.")):
                _, module, name = word.split(".")
                assert hasattr(getattr(phalanx, module), name), advice
    for advice in COMPOSER.methods["Callback"].values():
        if advice.endswith(" of a Callback"):
            assert hasattr(phalanx.Callback, advice.split()[1]), advice
