"""Scripts of Lightning: the names, arguments and values that ``phalanx migrate`` rewrites, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrations import assert_becomes, assert_left_again, assert_losses_by_hand, rewritten
from ranks import run_script

from phalanx.cli.main import main

PAGE = "docs/migrating-from-lightning.md"


# ---- imports and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["import lightning as L", "import lightning.pytorch as L", "import pytorch_lightning as L"]
)
def test_an_alias_of_the_package_gives_way_to_phalanx(line: str) -> None:
    before = f"""
    # A comment above.
    {line}  # and one behind

    class Net(L.LightningModule):
        pass

    trainer = L.Trainer(max_epochs=1,   devices = 1)
    early = L.callbacks.EarlyStopping("loss")
    """
    after = """
    # A comment above.
    import phalanx  # and one behind

    class Net(phalanx.TrainModule):
        pass

    trainer = phalanx.Trainer(max_epochs=1,   devices = 1)
    early = phalanx.callbacks.EarlyStopping("loss")
    """
    assert_becomes(before, after)


def test_names_that_are_imported_get_the_names_of_phalanx_and_an_alias_stays() -> None:
    before = """
    from lightning import Trainer as T
    from lightning.pytorch import (
        LightningModule,  # the model
        LightningDataModule,
    )
    from lightning.pytorch.callbacks.early_stopping import EarlyStopping
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger as Board
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.fabric import Fabric

    def plain(module: "LightningModule", data: LightningDataModule):
        T(max_steps=3)
    """
    after = """
    from phalanx import Trainer as T
    from phalanx import (
        TrainModule,  # the model
        DataModule,
    )
    from phalanx.callbacks import EarlyStopping
    from phalanx.loggers import CSVLogger, TensorBoardLogger as Board
    from phalanx.compat.lightning.utilities import rank_zero_only
    from phalanx import Fabric

    def plain(module: "TrainModule", data: DataModule):
        T(max_steps=3)
    """
    assert_becomes(before, after)


def test_a_name_of_phalanx_that_the_file_uses_already_is_not_taken() -> None:
    before = """
    from lightning import LightningModule

    class TrainModule(LightningModule): ...
    """
    after = """
    from phalanx import TrainModule as LightningModule

    class TrainModule(LightningModule): ...
    """
    assert_becomes(before, after)


def test_names_that_a_package_offers_to_others_stay() -> None:
    before = """
    from pytorch_lightning import LightningModule, Trainer
    """
    after = """
    from phalanx import TrainModule as LightningModule, Trainer
    """
    assert_becomes(before, after, is_package_file=True)


def test_imports_in_functions_and_conditions_are_rewritten_where_they_are() -> None:
    before = """
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

    def main():
        from lightning.pytorch import Trainer; Trainer()
        pl.seed_everything(1)
    """
    after = """
    try:
        import phalanx
    except ImportError:
        import phalanx

    def main():
        from phalanx import Trainer; Trainer()
        phalanx.seed_everything(1)
    """
    assert_becomes(before, after)


def test_other_names_and_text_that_look_similar_stay() -> None:
    before = """
    import torch
    from .lightning import Trainer
    lightning = "lightning.pytorch.Trainer"  # lightning.Trainer
    class LightningModule: ...
    LightningModule().Trainer
    """
    assert_becomes(before, before)


def test_line_ends_and_a_missing_last_one_stay() -> None:
    assert rewritten("import lightning\r\n\r\nlightning.Trainer()").text == "import phalanx\r\n\r\nphalanx.Trainer()"


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_and_values_of_older_releases() -> None:
    before = """
    import pytorch_lightning as pl
    trainer = pl.Trainer(
        gpus=2,  # both
        precision=16,
        strategy='deepspeed_stage_2',
        progress_bar_refresh_rate=0,
        replace_sampler_ddp=False,
        weights_summary="top",
        amp_backend="native",  # goes with it
    )
    """
    after = """
    import phalanx
    trainer = phalanx.Trainer(
        accelerator="gpu", devices=2,  # both
        precision=16,
        strategy='zero2',
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    """
    assert_becomes(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("weights_summary='top'", ""),
        ("amp_backend='native', max_epochs=1", "max_epochs=1"),
        ("max_epochs=1, amp_backend='native', weights_summary='top'", "max_epochs=1"),
        ("max_epochs=1, amp_backend='native', max_steps=2", "max_epochs=1, max_steps=2"),
        ("gpus=0, accelerator='cpu'", "accelerator='cpu'"),
        # Without GPUs the older releases trained on the CPU of every machine; the default here is its GPU.
        ("gpus=0", 'accelerator="cpu"'),
        ("max_epochs=1, gpus=None", 'max_epochs=1, accelerator="cpu"'),
        ("gpus=-1", 'accelerator="gpu", devices=-1'),
        ("gpus=2, accelerator='gpu'", "devices=2, accelerator='gpu'"),
        ("gpus=0, num_processes=4", 'accelerator="cpu", devices=4'),
    ],
)
def test_an_argument_goes_with_its_comma_and_a_number_of_gpus_is_the_device_that_it_meant(
    before: str, after: str
) -> None:
    assert_becomes(
        f"from lightning import Trainer\n\nTrainer({before})\n", f"from phalanx import Trainer\n\nTrainer({after})\n"
    )


@pytest.mark.parametrize(
    "arguments",
    ["gpus=1 if fast else 0", "gpus=1, accelerator='ddp'", "gpus=0, accelerator='gpu'", "gpus=1, devices=2"],
)
def test_a_number_of_gpus_of_unknown_meaning_is_left(arguments: str) -> None:
    found = rewritten(f"from lightning import Trainer\n\nTrainer({arguments})\n")
    assert found.text == f"from phalanx import Trainer\n\nTrainer({arguments})\n"
    assert any("Trainer(gpus=" in reason for _, reason in found.left)


def test_two_arguments_of_older_releases_do_not_become_the_same_one() -> None:
    found = rewritten("from lightning import Trainer\n\nTrainer(gpus=2, num_processes=3)\n")
    assert found.text == 'from phalanx import Trainer\n\nTrainer(accelerator="gpu", devices=2, num_processes=3)\n'
    ((_, reason),) = found.left
    assert "Trainer(num_processes=3)" in reason


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("Trainer(strategy='ddp_spawn_typo')", "ddp_spawn_typo"),
        ("Trainer(max_epoch=3)", "Did you mean 'max_epochs'?"),
        ("Trainer(resume_from_checkpoint='a.ckpt')", "give it to fit: fit(model, ckpt_path=...)"),
        ("Trainer(plugins=[Plugin()])", "plugins is not supported"),
        ("Trainer(accelerator='tpu')", "tpu"),
        ("Trainer(**options)", "its arguments are not in the text"),
        ("Trainer.from_argparse_args(parser)", "phalanx.Trainer has no from_argparse_args."),
    ],
)
def test_an_argument_that_is_refused_is_left_with_the_sentence_of_its_error(call: str, reason: str) -> None:
    found = rewritten(f"from lightning import Trainer\n\n{call}\n")
    assert found.text == f"from phalanx import Trainer\n\n{call}\n"
    ((line, sentence),) = found.left
    assert line == 3
    assert reason in sentence
    assert_left_again(found)


# ---- what is left ----------------------------------------------------------------------------------------------------


def test_what_needs_the_user_is_listed_with_its_line() -> None:
    found = rewritten(
        """\
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.callbacks import BatchSizeFinder
        from lightning.pytorch.demos.boring_classes import BoringModel
        from lightning import *

        class Net(LightningModule):
            def training_epoch_end(self, outputs): ...
            def optimizer_step(self, *args): ...

        trainer = Trainer()
        trainer.fit(Net())
        trainer.test()
        trainer.init_module()
        open("lightning_logs/version_0/metrics.csv")
        """
    )
    assert [line for line, _ in found.left] == [2, 3, 4, 7, 8, 12, 13, 14]
    reasons = [reason for _, reason in found.left]
    for reason, part in zip(
        reasons,
        (
            "BatchSizeFinder",
            "keep 'from lightning.pytorch.demos import ...'",
            "instead of *",
            "use 'on_train_epoch_end'",
            "another contract",
            "ckpt_path='best'",
            "configure_model",
            "phalanx_logs",
        ),
        strict=True,
    ):
        assert part in reason
    assert "from lightning.pytorch.callbacks import BatchSizeFinder\n" in found.text
    assert_left_again(found)


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        ("LightningModule", "validation_epoch_end"),
        ("Callback", "on_batch_end"),
        ("LightningDataModule", "valid_dataloader"),
    ],
)
@pytest.mark.parametrize("line", ["import lightning.pytorch as pl", "import phalanx.compat.lightning as pl"])
def test_a_hook_that_is_never_called_is_found_by_the_names_of_phalanx_too(line: str, base: str, hook: str) -> None:
    found = rewritten(f"{line}\n\nclass Mine(pl.{base}):\n    def {hook}(self, *args): ...\n")
    ((_, reason),) = found.left
    assert reason.startswith(f"phalanx never calls Mine.{hook}: use ")
    assert_left_again(found)


def test_a_method_that_a_callback_of_phalanx_lacks_is_left() -> None:
    found = rewritten("""
    from lightning.pytorch.callbacks import TQDMProgressBar

    class Bar(TQDMProgressBar):
        def init_train_tqdm(self): ...
    """)
    ((line, reason),) = found.left
    assert line == 5
    assert reason.startswith("TQDMProgressBar has no 'init_train_tqdm': ")
    assert_left_again(found)


def test_a_load_of_trained_weights_is_left_where_a_program_averages_them() -> None:
    program = """
    import lightning as L
    from lightning.pytorch.callbacks import EMAWeightAveraging

    L.Trainer(callbacks=[EMAWeightAveraging(decay=0.9)])
    L.LightningModule.load_from_checkpoint(path)
    L.LightningModule.load_from_checkpoint(path, average="ema")
    """
    found = rewritten(program)
    ((line, reason),) = found.left
    assert line == 6
    assert "average='ema'" in reason
    assert_left_again(found)
    # Its checkpoints have the trained weights there, too.
    other = program.replace("EMAWeightAveraging", "StochasticWeightAveraging").replace("decay=0.9", "0.1")
    assert rewritten(other).left == []


def test_names_and_values_of_a_program_of_phalanx_stay() -> None:
    before = """
    import phalanx
    from phalanx.compat.lightning import LightningModule
    from phalanx.checkpoint import weights

    class Net(LightningModule):
        def training_step(self, batch, batch_idx): ...

    print(weights("a.ckpt").keys())
    phalanx.Trainer(precision="bf16", strategy="deepspeed_stage_2").fit(Net())
    """
    assert_becomes(before, before)


# ---- a whole script --------------------------------------------------------------------------------------------------

SCRIPT = '''
"""A regression, written for Lightning."""
import json
import sys

import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from torch import nn


class Losses(Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.found.append(outputs["loss"].item())


class Net(pl.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [scheduler]


if __name__ == "__main__":
    pl.seed_everything(7)
    inputs = torch.randn(32, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    losses = Losses()
    trainer = pl.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[losses, LearningRateMonitor()],
        accelerator="cpu",
        devices=1,
        default_root_dir=sys.argv[1],
        weights_summary=None,  # of an older release
        enable_progress_bar=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=4))
    print("losses", json.dumps(losses.found))
'''


def test_a_script_trains_to_the_losses_of_a_loop_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert main(["migrate", str(file), "--write"]) == 0
    assert "1 file written" in capsys.readouterr().out
    text = file.read_text()
    assert "lightning" not in text.replace("written for Lightning", "")
    assert_losses_by_hand(run_script(text, str(tmp_path)), halved_every=4)
