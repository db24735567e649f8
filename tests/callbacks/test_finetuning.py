"""The callbacks that freeze parts of a model and unfreeze them later, on one and several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import SILENT, network, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.callbacks import BackboneFinetuning, BaseFinetuning, Callback, GradientNormMonitor, LambdaCallback
from phalanx.framework.core.errors import ConfigurationError

SETTINGS: dict[str, Any] = {"unfreeze_backbone_at_epoch": 1, "backbone_initial_ratio_lr": 0.2}


def backbone() -> nn.Module:
    layers = network()
    return nn.Sequential(layers[0], nn.BatchNorm1d(16), nn.Sequential(layers[1]))


def training_loss(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = nn.functional.mse_loss(self.head(self.backbone(x)), y)
    self.losses.append(loss.item())
    return loss


def optimizer_of_head(self: Any) -> Any:
    return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.01)


class Transfer(TrainModule):
    """A backbone with a batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone: Any = backbone()
        self.head, self.losses = network()[3], list[float]()

    training_step = training_loss
    configure_optimizers = optimizer_of_head


def data(ranks: int = 1) -> DataLoader[Any]:
    return DataLoader(regression_data(16), batch_size=4 // ranks)


def lambda_slow(epoch: int) -> float:
    return 1.5


def rates_of(trainer: Any) -> list[float]:
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize(
    "settings",
    [
        {"train_bn": False},
        {"lambda_func": lambda_slow, "backbone_initial_lr": 0.001},
        {"should_align": False, "unfreeze_backbone_at_epoch": 2},
    ],
    ids=["batch norm", "initial", "unaligned"],
)
def test_learning_rates_and_weights_are_those_of_lightning(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    # Lightning sets this variable when it looks for devices.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import lightning.pytorch as pl

    class Theirs(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head, self.losses = backbone(), network()[3], list[float]()

        training_step = training_loss
        configure_optimizers = optimizer_of_head

    class TheirRecorder(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            theirs.append(rates_of(trainer))

    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    arguments = {**SETTINGS, **settings}
    recorder = LambdaCallback(on_train_epoch_end=lambda trainer, _: ours.append(rates_of(trainer)))
    module, other = Transfer(), Theirs()
    silent_trainer(max_epochs=5, callbacks=[BackboneFinetuning(**arguments), recorder]).fit(module, data())
    callbacks = [pl.callbacks.BackboneFinetuning(**arguments), TheirRecorder()]
    pl.Trainer(**SILENT, max_epochs=5, callbacks=callbacks, default_root_dir=tmp_path).fit(other, data())
    assert ours == theirs
    assert module.losses == other.losses
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


class ThawsLayers(BaseFinetuning):
    """Unfreezes one layer in each epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.backbone], train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(module.backbone[epoch - 1], optimizer, train_bn=epoch == 1)


def callback(kind: str) -> Callback:
    return ThawsLayers() if kind == "layers" else BackboneFinetuning(**SETTINGS, train_bn=False)


class WithoutNorm(Transfer):
    """Without a batch norm, whose statistics differ with the batch of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone[1] = nn.Linear(16, 16)
        nn.init.eye_(self.backbone[1].weight)
        nn.init.zeros_(self.backbone[1].bias)


def trained(strategy: str, ranks: int, kind: str) -> tuple[list[float], list[float]]:
    module = WithoutNorm()
    rates: list[list[float]] = []
    recorder = LambdaCallback(on_train_end=lambda trainer, _: rates.append(rates_of(trainer)))
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_epochs=4, callbacks=[callback(kind), recorder])
    trainer.fit(module, data(ranks))
    return module.losses, rates[0]


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "backbone"), ("fsdp", "layers")])
def test_ranks_train_what_one_process_trains(strategy: str, kind: str) -> None:
    losses, rates = trained("auto", 1, kind)
    assert len(rates) == (3 if kind == "layers" else 2)
    found = run_on_ranks(2, trained, strategy, 2, kind)
    assert [one for _, one in found] == [rates, rates]
    mean = torch.tensor([one for one, _ in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-7)


def resumed(strategy: str, ranks: int, kind: str, root: str, stops: list[int]) -> tuple[list[float], Any]:
    """Train in parts, each resumed from the last one's checkpoint; return the losses and the state of the module."""
    losses: list[float] = []
    path = None
    for number, stop in enumerate(stops):
        module, save = Transfer(), str(Path(root) / f"{len(stops)}-{number}.ckpt")
        saver = LambdaCallback(on_train_end=lambda trainer, _, save=save: trainer.save_checkpoint(save))
        trainer = silent_trainer(
            strategy=strategy, devices=ranks, max_steps=stop, callbacks=[callback(kind), saver], default_root_dir=root
        )
        trainer.fit(module, data(ranks), ckpt_path=path)
        losses, path = losses + module.losses, save
    # Under fsdp the module of another rank than 0 holds no weights after the fit.
    state = module.state_dict() if trainer.is_global_zero else {}
    return losses, {name: tensor.tolist() for name, tensor in state.items()}


# Stops in an epoch before, in and after that in which a group is added, and at an end of an epoch.
@pytest.mark.parametrize("stops", [[2, 5, 10, 14], [4, 8, 14]], ids=["in epochs", "at their ends"])
@pytest.mark.parametrize("kind", ["layers", "backbone"])
def test_a_resumed_fit_continues_exactly(kind: str, stops: list[int], tmp_path: Path) -> None:
    assert resumed("auto", 1, kind, str(tmp_path), stops) == resumed("auto", 1, kind, str(tmp_path), stops[-1:])


def test_a_resumed_fit_continues_exactly_on_ranks(tmp_path: Path) -> None:
    parts = run_on_ranks(2, resumed, "fsdp", 2, "backbone", str(tmp_path), [5, 14])
    full = run_on_ranks(2, resumed, "fsdp", 2, "backbone", str(tmp_path), [14])
    assert parts == full


def test_a_second_fit_begins_with_a_frozen_backbone() -> None:
    finetuning, module = BackboneFinetuning(**SETTINGS), Transfer()
    frozen = weights_of(module.backbone[0])
    for _ in range(2):
        silent_trainer(max_epochs=1, callbacks=[finetuning]).fit(module, data())
        assert torch.equal(weights_of(module.backbone[0]), frozen)
    silent_trainer(max_epochs=2, callbacks=[finetuning]).fit(module, data())
    assert not torch.equal(weights_of(module.backbone[0]), frozen)


def test_the_gradient_norm_includes_parameters_that_were_added() -> None:
    module, norms = WithoutNorm(), list[float]()
    logged: list[float] = []

    def record(trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))

    recorder = LambdaCallback(
        on_before_optimizer_step=record,
        on_train_batch_end=lambda trainer, *_: logged.append(float(trainer.callback_metrics["grad_norm"])),
    )
    callbacks = [BackboneFinetuning(**SETTINGS), GradientNormMonitor(), recorder]
    silent_trainer(max_epochs=2, log_every_n_steps=1, callbacks=callbacks).fit(module, data())
    assert logged == pytest.approx(norms, rel=1e-6)


def refused() -> str:
    try:
        trainer = silent_trainer(strategy="zero3", devices=2, max_epochs=1, callbacks=[BackboneFinetuning()])
        trainer.fit(Transfer(), data(2))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_strategies_with_fixed_parameters_are_refused() -> None:
    for message in run_on_ranks(2, refused):
        assert message == (
            "BackboneFinetuning adds parameters to an optimizer during training, which strategy='zero3' cannot do: use "
            "ddp or fsdp."
        )


def test_misuse_is_refused() -> None:
    with refuses(ConfigurationError, "unfreeze_backbone_at_epoch=-1", "BackboneFinetuning"):
        BackboneFinetuning(unfreeze_backbone_at_epoch=-1)
    module = Transfer()
    del module.backbone
    with refuses(ConfigurationError, "Transfer.backbone", "self.backbone"):
        silent_trainer(max_epochs=1, callbacks=[BackboneFinetuning()]).fit(module, data())


def test_parameters_that_the_optimizer_holds_are_not_added_again() -> None:
    module = Transfer()
    BaseFinetuning.freeze(module.backbone)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="2 parameters to unfreeze are in a group of SGD already"):
        BaseFinetuning.unfreeze_and_add_param_group(module.backbone, optimizer)
    assert len(optimizer.param_groups) == 1
    # A second time they are trained already, which is no reason for a warning.
    BaseFinetuning.unfreeze_and_add_param_group(module.backbone, optimizer)


def test_the_selection_of_parameters() -> None:
    module = Transfer()
    first, norm = module.backbone[0], module.backbone[1]
    assert BaseFinetuning.flatten_modules([module.backbone, [first]]) == [first, norm, module.backbone[2][0]]
    BaseFinetuning.freeze(module.backbone)
    assert list(BaseFinetuning.filter_params(module.backbone)) == list(norm.parameters())
    assert list(BaseFinetuning.filter_params(module.backbone, train_bn=False)) == []
    assert list(BaseFinetuning.filter_params(module.backbone, requires_grad=False)) == list(first.parameters())
