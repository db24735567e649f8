"""``TrainerCLI``: objects of a configuration train as the same objects created by hand."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from configured import BareNet, Net, Points, ScaledNet
from messages import refuses
from models import SILENT
from torch import nn

from phalanx import TrainerCLI
from phalanx.callbacks import EarlyStopping, Timer
from phalanx.configuration import LRSchedulerCallable, OptimizerCallable, SaveConfigCallback, TrainerArgumentParser
from phalanx.errors import ConfigurationError
from phalanx.loggers import CSVLogger
from phalanx.strategies import DDPStrategy

QUIET: dict[str, Any] = {**SILENT, "max_epochs": 2, "enable_report": False}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}


def torch_losses(
    epochs: int = 2,
    seed: int = 0,
    width: int = 4,
    lr: float = 0.1,
    batch_size: int = 4,
    scale: float = 1.0,
    decay: float = 1.0,
    momentum: float = 0.0,
) -> list[float]:
    """Return the losses of a loop in plain torch, as ``configured.Net`` records them."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), last := nn.Linear(width, 1))
    with torch.no_grad():
        last.weight.mul_(scale)
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    losses = []
    for _ in range(epochs):
        for inputs, targets in zip(x.split(batch_size), x.sum(1, keepdim=True).split(batch_size), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] *= decay
    return losses


def fit(*arguments: str, model: Any = Net, data: Any = Points, **options: Any) -> TrainerCLI:
    """Fit by a command line."""
    return TrainerCLI(model, data, trainer_defaults=QUIET, args=["fit", *arguments], **options)


def losses_of(cli: TrainerCLI) -> list[float]:
    losses: list[float] = cli.model.losses  # type: ignore[assignment]
    return losses


def written(folder: Path, name: str, **sections: Any) -> str:
    """Write a configuration file; return its path."""
    (folder / name).write_text(yaml.safe_dump(sections))
    return str(folder / name)


@pytest.mark.parametrize("given", ['{"dp_replicate": 1, "cp": 1}', "dp_replicate=1,cp=1", "section"])
def test_degrees_of_parallelism_are_a_setting(given: str, tmp_path: Path) -> None:
    path = written(tmp_path, "config.yaml", trainer={"parallel": {"dp_replicate": 1, "cp": 1}})
    arguments = ["--config", path] if given == "section" else ["--trainer.parallel", given]
    cli = fit(*arguments, "--trainer.strategy", "ddp", "--trainer.devices", "1")
    assert cli.trainer.strategy.degrees.given == {"dp_replicate": 1, "cp": 1}


def test_a_fit_has_the_losses_of_a_torch_loop() -> None:
    assert losses_of(fit()) == torch_losses()
    cli = fit("--model.width=6", "--data.batch_size", "8", "--trainer.max_epochs=3", "--seed_everything", "5")
    assert losses_of(cli) == torch_losses(epochs=3, seed=5, width=6, batch_size=8)


def test_files_are_merged_and_options_have_precedence(tmp_path: Path) -> None:
    first = written(tmp_path, "a.yaml", model={"width": 5, "lr": 0.3}, trainer={"max_epochs": 4}, seed_everything=1)
    second = written(tmp_path, "b.yaml", model={"lr": 0.2}, trainer={"max_epochs": 3})
    cli = fit("-c", first, "--config", second, "--trainer.max_epochs=1")
    assert losses_of(cli) == torch_losses(epochs=1, seed=1, width=5, lr=0.2)


def test_an_option_before_a_file_is_replaced_by_the_file(tmp_path: Path) -> None:
    cli = fit("--model.width=9", "-c", written(tmp_path, "a.yaml", model={"width": 5}))
    assert losses_of(cli) == torch_losses(width=5)


def test_a_configuration_in_json_and_as_a_dict(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"model": {"width": 5}, "trainer": {"max_epochs": 1}}')
    expected = torch_losses(epochs=1, width=5)
    assert losses_of(fit("-c", str(tmp_path / "a.json"))) == expected
    given = {"subcommand": "fit", "fit": {"model": {"width": 5}, "trainer": {"max_epochs": 1}}}
    assert losses_of(TrainerCLI(Net, Points, trainer_defaults=QUIET, args=given)) == expected


def test_subclass_mode_takes_the_class_from_the_configuration(tmp_path: Path) -> None:
    model = {"class_path": "configured.ScaledNet", "init_args": {"scale": 2.0, "width": 5}}
    path = written(tmp_path, "a.yaml", model=model, data={"class_path": "configured.Points"})
    cli = fit("-c", path, "--data.batch_size=8", model=None, data=None)
    assert type(cli.model) is ScaledNet
    assert losses_of(cli) == torch_losses(width=5, batch_size=8, scale=2.0)
    # The arguments that both classes have stay if the class changes.
    cli = fit("-c", path, "--model=configured.Net", model=Net, data=None, subclass_mode_model=True)
    assert type(cli.model) is Net
    assert losses_of(cli) == torch_losses(width=5)


def test_a_module_with_loaders_of_its_own_needs_no_data_section() -> None:
    class WithLoader(Net):
        def train_dataloader(self) -> Any:
            points = Points()
            points.setup("fit")
            return points.train_dataloader()

    assert losses_of(fit(model=WithLoader, data=None)) == torch_losses()


def test_the_optimizer_and_the_schedule_of_a_configuration(tmp_path: Path) -> None:
    decay = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}}
    path = written(tmp_path, "a.yaml", optimizer=SGD, lr_scheduler=decay)
    cli = fit("-c", path, "--optimizer.momentum=0.9", "--optimizer.lr=0.05", model=BareNet)
    assert losses_of(cli) == torch_losses(lr=0.05, momentum=0.9, decay=0.5)
    cli = fit("--optimizer=SGD", "--optimizer.lr=0.05", "--lr_scheduler", "ExponentialLR", "--lr_scheduler.gamma=0.5")
    assert losses_of(cli) == torch_losses(lr=0.05, decay=0.5)


def test_an_optimizer_that_replaces_that_of_the_module_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    assert losses_of(fit("--optimizer=SGD", "--optimizer.lr=0.05")) == torch_losses(lr=0.05)
    assert capfd.readouterr().err == "phalanx: the section 'optimizer' replaces configure_optimizers of Net.\n"


def test_a_schedule_that_monitors_a_metric(tmp_path: Path) -> None:
    plateau = {"class_path": "ReduceLROnPlateau", "init_args": {"monitor": "val_loss", "patience": 0, "threshold": 1e9}}
    path = written(tmp_path, "a.yaml", optimizer=SGD, lr_scheduler=plateau)
    cli = fit("-c", path, "--trainer.max_epochs=4", "--lr_scheduler.factor=0.5", model=BareNet)
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] < 0.1
    plateau = {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}
    with refuses(ConfigurationError, "class_path", "phalanx.configuration"):
        fit("-c", written(tmp_path, "b.yaml", optimizer=SGD, lr_scheduler=plateau), model=BareNet)


class CallableNet(Net):
    """A module that receives what creates its optimizer and its scheduler."""

    def __init__(self, optimizer: OptimizerCallable = torch.optim.Adam, decay: LRSchedulerCallable | None = None):
        super().__init__()
        self.optimizer, self.decay = optimizer, decay

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return optimizer if self.decay is None else ([optimizer], [self.decay(optimizer)])


def test_a_module_that_receives_its_optimizer(tmp_path: Path) -> None:
    decay = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}}
    path = written(tmp_path, "a.yaml", model={"optimizer": SGD, "decay": decay})
    assert losses_of(fit("-c", path, model=CallableNet)) == torch_losses(decay=0.5)


def test_optimizers_that_are_linked_to_arguments() -> None:
    class Linked(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.SGD, "slow", link_to="model.slow")
            parser.add_optimizer_args((torch.optim.SGD, torch.optim.Adam), "fast", link_to="model.fast")

    class Two(Net):
        def __init__(self, slow: dict, fast: dict) -> None:  # type: ignore[type-arg]
            super().__init__()
            self.given = slow, fast

    cli = Linked(Two, args=["--slow.lr=0.5", "--fast=Adam", "--fast.lr=0.25"], run=False)
    slow, fast = cli.model.given  # type: ignore[misc]
    assert (slow["class_path"], slow["init_args"]["lr"]) == ("torch.optim.sgd.SGD", 0.5)
    assert (fast["class_path"], fast["init_args"]["lr"]) == ("torch.optim.Adam", 0.25)


def test_two_optimizers_must_be_linked() -> None:
    class Ambiguous(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.SGD, "slow")
            parser.add_optimizer_args(torch.optim.Adam, "fast")

    with refuses(ConfigurationError, "slow, fast, lr_scheduler", "link_to="):
        Ambiguous(BareNet, Points, args=["--slow.lr=0.1", "--fast.lr=0.1"], run=False)


def test_callbacks_and_loggers_by_class_path_and_by_name(tmp_path: Path) -> None:
    callbacks: list[Any] = [
        {"class_path": "phalanx.callbacks.EarlyStopping", "init_args": {"monitor": "loss", "patience": 7}},
        {"class_path": "ModelSummary", "init_args": {"max_depth": 3}},
        {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
        {"class_path": "configured.Reminder", "init_args": {"text": "now"}},
        "timer",
    ]
    loggers = [{"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}]
    path = written(tmp_path, "a.yaml", trainer={"callbacks": callbacks, "logger": loggers})
    cli = TrainerCLI(Net, Points, args=["-c", path, "--trainer.callbacks+=early_stopping"], run=False)
    kinds = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert kinds[:6] == ["EarlyStopping", "ModelSummary", "LearningRateMonitor", "Reminder", "Timer", "EarlyStopping"]
    first, last = cli.trainer.callbacks[0], cli.trainer.callbacks[5]
    assert isinstance(first, EarlyStopping)
    assert isinstance(last, EarlyStopping)
    assert (first.patience, first.monitor, last.monitor) == (7, "loss", "val_loss")
    assert [type(logger).__name__ for logger in cli.trainer.loggers] == ["CSVLogger"]
    cli = TrainerCLI(Net, Points, args=["--trainer.logger", "csv", "--trainer.callbacks=Timer"], run=False)
    assert [type(logger).__name__ for logger in cli.trainer.loggers] == ["CSVLogger"]
    assert "Timer" in {type(callback).__name__ for callback in cli.trainer.callbacks}


class Prompted(Net):
    """A module with an argument that is a text."""

    def __init__(self, prompt: str = "") -> None:
        super().__init__()
        self.prompt = prompt


@pytest.mark.parametrize("prompt", ["[INST] hello", "{name}, hello", "[a, b]", "[2024-13-45]", "{{a}: b"])
@pytest.mark.parametrize("in_one_word", [True, False])
def test_a_text_that_begins_with_a_bracket(prompt: str, in_one_word: bool) -> None:
    args = [f"--model.prompt={prompt}"] if in_one_word else ["--model.prompt", prompt]
    assert TrainerCLI(Prompted, Points, args=args, trainer_defaults=QUIET, run=False).model.prompt == prompt


def test_values_of_a_callback_are_read_as_in_a_file() -> None:
    stopping = "[{class_path: early_stopping, init_args: {monitor: 2026-01-02, min_delta: 1e-3}}]"
    cli = TrainerCLI(Net, Points, args=["--trainer.callbacks", stopping], trainer_defaults=QUIET, run=False)
    (found,) = (each for each in cli.trainer.callbacks if isinstance(each, EarlyStopping))
    assert (found.monitor, found.min_delta) == ("2026-01-02", 1e-3)


def test_a_callback_with_a_section_of_its_own() -> None:
    class WithStopping(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_component_args(EarlyStopping, "stopping")
            parser.set_defaults({"stopping.monitor": "val_loss", "stopping.patience": 4})

    cli = WithStopping(Net, Points, trainer_defaults=QUIET, args=["--stopping.patience=9"], run=False)
    (stopping,) = [each for each in cli.trainer.callbacks if isinstance(each, EarlyStopping)]
    assert (stopping.monitor, stopping.patience) == ("val_loss", 9)


@pytest.mark.parametrize("text", ["00:12:00:00", "12:00:00", "{hours: 12}", "0 days, 12:00:00"])
def test_durations(text: str, tmp_path: Path) -> None:
    saving = {"class_path": "ModelCheckpoint", "init_args": {"train_time_interval": "01:02:00:00"}}
    path = written(tmp_path, "a.yaml", trainer={"callbacks": [saving], "enable_checkpointing": True})
    cli = TrainerCLI(Net, Points, args=["-c", path, f"--trainer.max_time={text}"], run=False)
    limit = next(each for each in cli.trainer.callbacks if isinstance(each, Timer))
    assert limit.time_remaining() == 12 * 3600
    assert cli.config["trainer"]["callbacks"][0].init_args.train_time_interval == timedelta(days=1, hours=2)


def test_linked_arguments_and_hooks_around_a_stage() -> None:
    order = []

    class Ordered(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.link_arguments("data.batch_size", "model.width")

        def before_instantiate_classes(self) -> None:
            order.append("before classes")

        def before_fit(self) -> None:
            order.append(f"before fit, step {self.trainer.global_step}")

        def after_fit(self) -> None:
            order.append(f"after fit, step {self.trainer.global_step}")

    cli = Ordered(Net, Points, trainer_defaults=QUIET, args=["fit", "--data.batch_size=6"])
    assert losses_of(cli) == torch_losses(width=6, batch_size=6)
    assert order == ["before classes", "before fit, step 0", "after fit, step 8"]


def test_without_a_stage_the_objects_are_created_only() -> None:
    cli = TrainerCLI(Net, Points, trainer_defaults=QUIET, args=["--model.width=6"], run=False)
    assert (cli.subcommand, losses_of(cli)) == (None, [])
    cli.trainer.fit(cli.model, cli.datamodule)
    assert losses_of(cli) == torch_losses(width=6)


def test_callbacks_of_the_defaults_are_added_to_those_of_a_configuration() -> None:
    defaults = {**QUIET, "callbacks": [EarlyStopping("val_loss")]}
    cli = TrainerCLI(Net, Points, trainer_defaults=defaults, args=["--trainer.callbacks=Timer"], run=False)
    kinds = {type(callback).__name__ for callback in cli.trainer.callbacks}
    assert {"Timer", "EarlyStopping"} <= kinds


@pytest.mark.parametrize("several", [False, True])
def test_objects_among_the_defaults_are_used_unless_a_configuration_has_others(several: bool, tmp_path: Path) -> None:
    logger, strategy = CSVLogger(tmp_path), DDPStrategy(bucket_cap_mb=1)
    defaults = {**QUIET, "logger": [logger] if several else logger, "strategy": strategy}
    cli = TrainerCLI(Net, Points, trainer_defaults=defaults, args=[], run=False)
    assert cli.trainer.loggers == [logger]
    assert cli.trainer.strategy is strategy
    other = TrainerCLI(
        Net, Points, trainer_defaults=defaults, args=["--trainer.logger=false", "--trainer.strategy=single"], run=False
    )
    assert (other.trainer.loggers, other.trainer.strategy.name) == ([], "single")


def test_the_seed() -> None:
    assert losses_of(fit("--seed_everything=3")) == losses_of(fit(seed_everything_default=3)) == torch_losses(seed=3)
    torch.manual_seed(11)
    assert losses_of(fit("--seed_everything=false")) == torch_losses(seed=11)
    assert fit("--seed_everything=true").config["fit"]["seed_everything"] == 0


def test_a_fit_is_resumed_by_ckpt_path(tmp_path: Path) -> None:
    saving = ["--trainer.enable_checkpointing=true", f"--trainer.default_root_dir={tmp_path}", "--seed_everything=2"]
    first = fit(*saving, "--trainer.max_epochs=1")
    (path,) = tmp_path.rglob("*.ckpt")
    second = fit(*saving, "--trainer.max_epochs=3", f"--ckpt_path={path}")
    assert losses_of(first) + losses_of(second) == torch_losses(epochs=3, seed=2)


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_FIT__MODEL__WIDTH", "6")
    monkeypatch.setenv("PHALANX_FIT__TRAINER__MAX_EPOCHS", "1")
    enabled = {"default_env": True}
    assert losses_of(fit(parser_kwargs=enabled)) == torch_losses(epochs=1, width=6)
    assert losses_of(fit("--model.width=5", parser_kwargs=enabled)) == torch_losses(epochs=1, width=5)
    assert losses_of(fit()) == torch_losses()


def test_the_printed_configuration_trains_to_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model=configured.ScaledNet", "--model.scale=3", "--data=configured.Points", "--optimizer=SGD"]
    arguments += ["--optimizer.lr=0.05", "--trainer.callbacks=timer", "--seed_everything=4"]
    expected = losses_of(fit(*arguments, model=None, data=None))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        fit(*arguments, "--print_config", model=None, data=None)
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["seed_everything"] == 4
    (tmp_path / "printed.yaml").write_text(printed)
    assert losses_of(fit("-c", str(tmp_path / "printed.yaml"), model=None, data=None)) == expected
    assert expected == torch_losses(seed=4, lr=0.05, scale=3.0)


def test_the_configuration_of_a_run_is_saved_and_reproduces_it(tmp_path: Path) -> None:
    cli = fit("--trainer.enable_checkpointing=true", f"--trainer.default_root_dir={tmp_path}", "--model.width=5")
    (saved,) = tmp_path.rglob("config.yaml")
    assert saved.parent == cli.trainer.run_dir
    text = saved.read_text()
    assert len(re.findall("^# phalanx==", text, re.MULTILINE)) == 1
    assert losses_of(fit("-c", str(saved))) == losses_of(cli) == torch_losses(width=5)


def test_a_configuration_that_is_not_saved_or_saved_elsewhere(tmp_path: Path) -> None:
    saving = ["--trainer.enable_checkpointing=true", f"--trainer.default_root_dir={tmp_path}"]
    fit(*saving, save_config_callback=None)
    assert [*tmp_path.rglob("*.yaml")] == []
    with refuses(ConfigurationError, "save_to_log_dir=False"):
        fit(*saving, save_config_kwargs={"save_to_log_dir": False})
    texts = []

    class Elsewhere(SaveConfigCallback):
        def save_config(self, trainer: Any, module: Any, stage: str) -> None:
            texts.append(self.parser.text_of(self.config))

    fit(*saving, save_config_callback=Elsewhere, save_config_kwargs={"save_to_log_dir": False})
    assert [yaml.safe_load(text)["model"] for text in texts] == [{"width": 4, "lr": 0.1}]
    assert [*tmp_path.rglob("*.yaml")] == []
