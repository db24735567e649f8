"""Errors in the user's code: a script shows the user's lines, the step and the usual cause, not frames of phalanx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from model_script import MODEL
from models import Regressor, loader, silent_trainer
from ranks import run_script
from torch import nn

from phalanx import Callback, Trainer, TrainModule
from phalanx.callbacks import EarlyStopping, ModelCheckpoint
from phalanx.errors import CheckpointError, ConfigurationError, MetricError

_SCRIPT = """
class Net(Model):
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        {step}
        return loss

data = loader(16, 2{workers})
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
trainer.{verb}(Net(), data)
"""


def shown(tmp_path: Path, step: str = "pass", verb: str = "fit", workers: str = "") -> tuple[int, str]:
    """Run a script with a mistake; return its exit code and what it shows."""
    script = tmp_path / "script.py"
    script.write_text(MODEL + _SCRIPT.format(step=step, verb=verb, workers=workers))
    done = run_script(script)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"step": "if batch_idx == 3: {}['b']"}, "KeyError: 'b'\nRaised at step 3 (epoch 0, batch 3)."),
        ({"step": "loss.backward()"}, "leave the call out: phalanx calls backward on the loss"),
        ({"step": "self.hparams.lr"}, "call self.save_hyperparameters() in __init__"),
        ({"verb": "predict"}, "define predict_step(self, batch, batch_idx)"),
        ({"workers": ", num_workers=1, multiprocessing_context='spawn', collate_fn=lambda items: items"},
         "at the top level of a module, not as a lambda"),
    ],
)  # fmt: skip
def test_one_rank_shows_the_users_lines_the_step_and_the_cause(
    given: dict[str, str], expected: str, tmp_path: Path
) -> None:
    code, output = shown(tmp_path, **given)
    assert code == 1
    assert expected in output
    if "step" in given:
        assert "Raised at step " in output
        assert "trainer.fit(Net(), data)" in output
        assert "framework/trainer" not in output
        assert len(output[output.index("Traceback") :].splitlines()) <= 20


def test_a_file_of_torch_save_as_a_checkpoint_gets_the_next_step(tmp_path: Path) -> None:
    plain, lightning = tmp_path / "weights.pt", tmp_path / "lightning.ckpt"
    torch.save(Regressor().state_dict(), plain)
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.5.0"}, lightning)
    with refuses(CheckpointError, "weights.pt", "module.load_state_dict") as raised:
        silent_trainer().fit(Regressor(), loader(), ckpt_path=plain)
    assert "convert" not in str(raised.value)
    with refuses(CheckpointError, "lightning.ckpt", "phalanx checkpoint convert"):
        silent_trainer().fit(Regressor(), loader(), ckpt_path=lightning)
    with refuses(CheckpointError, "'lastest'", "'last'"):
        silent_trainer().fit(Regressor(), loader(), ckpt_path="lastest")


class _Plateau(Regressor):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "vall_loss"}}


@pytest.mark.parametrize(
    ("callbacks", "kind", "who"),
    [
        ([EarlyStopping("vall_loss")], Regressor, "EarlyStopping"),
        ([ModelCheckpoint(monitor="vall_loss")], Regressor, "ModelCheckpoint"),
        ([ModelCheckpoint(filename="{epoch}-{vall_loss:.2f}")], Regressor, "ModelCheckpoint"),
        ([], _Plateau, "ReduceLROnPlateau"),
    ],
)
def test_a_misspelled_monitor_is_reported_before_training(
    tmp_path: Path, callbacks: list[Callback], kind: type[Regressor], who: str
) -> None:
    steps: list[int] = []

    class Mine(kind):  # type: ignore[misc,valid-type]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            steps.append(len(notes))

    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=callbacks, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=None if callbacks else False,
    )  # fmt: skip
    notes: list[str] = []
    trainer.note = notes.append  # type: ignore[method-assign, assignment]
    with refuses(MetricError, who, "'vall_loss'", "'val_loss'"):
        trainer.fit(Mine(), loader(), loader())
    found = [place for place, note in enumerate(notes) if f"{who} needs the metric 'vall_loss'" in note]
    assert len(found) == 1
    assert "Did you mean 'val_loss'?" in notes[found[0]]
    assert found[0] < steps[0]
    assert not list(tmp_path.rglob("*.ckpt"))


def test_other_monitors_are_not_reported(tmp_path: Path) -> None:
    class Mine(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_loss", 1.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    trainer = silent_trainer(max_epochs=1, callbacks=[EarlyStopping("train_loss"), EarlyStopping("val_loss")])
    notes: list[str] = []
    trainer.note = notes.append  # type: ignore[method-assign, assignment]
    trainer.fit(Mine(), loader(), loader())
    assert not [note for note in notes if "needs the metric" in note]


@pytest.mark.parametrize(("given", "meant"), [("minimum", "min"), ("maximize", "max"), ("mx", "max")])
def test_a_misspelled_mode_gets_the_closest_one(given: str, meant: str) -> None:
    with refuses(ConfigurationError, "EarlyStopping", f"'{meant}'?"):
        EarlyStopping("val_loss", mode=given)
    with refuses(ConfigurationError, "ModelCheckpoint", f"'{meant}'?"):
        ModelCheckpoint(monitor="val_loss", mode=given)


class Listed(TrainModule):
    """Holds its layers where torch does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(1, 1)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.blocks[0](batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_layers_in_a_list_are_found_where_there_are_no_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list") as caught:
        silent_trainer(strategy="single", devices=1, max_steps=1).fit(Listed(), loader(8))
    hint = vars(caught.value)["__notes__"][0]
    assert "blocks" in hint
    assert "nn.ModuleList" in hint
