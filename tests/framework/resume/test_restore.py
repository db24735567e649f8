"""What a checkpoint and a run do not share is one list, on all ranks, before anything changes; or left, and told."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from messages import refuses
from models import Regressor, loader, regression_data, silent_trainer, weights_of
from parity_table import strategy_named
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from phalanx import Fabric, Trainer
from phalanx.callbacks import LambdaCallback
from phalanx.framework.checkpoint.manifest import MANIFEST
from phalanx.framework.checkpoint.reader import open_checkpoint
from phalanx.framework.core.errors import CheckpointError

EVERYWHERE = ["single@1", "fsdp@2", "zero2@2", "zero3@2"]


class Scheduled(Regressor):
    """Has a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]


class Changed(Regressor):
    """Another shape, another name, another optimizer with another number of groups, another scheduler."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(8)
            self.net[3] = nn.Linear(16, 2)
            self.nett = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.nett(self.net(batch[0])), batch[1])
        return loss

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.net.parameters())}, {"params": list(self.nett.parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.9)]


PROBLEMS = [
    "net.3.weight: (1, 16) in the checkpoint, (2, 16) in the module",
    "net.3.bias: (1,) in the checkpoint, (2,) in the module",
    "nett.weight: missing in the checkpoint",
    "optimizer 0: 1 parameter groups in the checkpoint, 2 here",
    "optimizer 0: nett.bias is in its groups here, not in the checkpoint",
    "scheduler 0: StepLR in the checkpoint, ExponentialLR here",
]


def fit(module: Regressor, strategy: str, root: str, stop: int, **options: Any) -> Trainer:
    """Train up to a step; ``save`` and ``resume`` are paths."""
    name, _, ranks = strategy.partition("@")
    trainer = silent_trainer(
        strategy=strategy_named(name, root),
        devices=int(ranks),
        max_steps=stop,
        callbacks=options.get("callbacks", []),
        default_root_dir=root,
    )
    trainer.fit(module, loader(batch_size=4 // int(ranks)), ckpt_path=options.get("resume"))
    if save := options.get("save"):
        trainer.save_checkpoint(save)
    return trainer


def on(strategy: str, function: Any, *args: Any) -> list[Any]:
    """Call a function on the ranks of a strategy, itself first among the arguments."""
    ranks = int(strategy.partition("@")[2])
    return [function(strategy, *args)] if ranks == 1 else run_on_ranks(ranks, function, strategy, *args)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("saved")
    fit(Scheduled(), "single@1", str(root), 3, save=root / "saved.ckpt")
    return str(root / "saved.ckpt")


# ---- refused --------------------------------------------------------------------------------------------------------


def refused(strategy: str, path: str, root: str) -> tuple[str, bool]:
    module = Changed()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        fit(module, strategy, root, 5, resume=path)
    after = module.state_dict()
    return str(error.value), all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("strategy", EVERYWHERE)
def test_everything_that_does_not_fit_is_one_list(strategy: str, path: str, tmp_path: Path) -> None:
    for text, unchanged in on(strategy, refused, path, str(tmp_path)):
        assert [problem for problem in PROBLEMS if problem not in text] == []
        assert "strict_loading = False" in text
        # Stage 3 splits a module as soon as it is placed.
        assert unchanged or "zero3" in strategy


class SeveralOptimizers(Regressor):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.05, momentum=0.9)
        return [first, torch.optim.AdamW(self.net[3].parameters(), lr=0.01)]


class Swapped(SeveralOptimizers):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()[::-1]


def test_optimizers_in_another_order_or_number_are_named(path: str, tmp_path: Path) -> None:
    several = tmp_path / "several.ckpt"
    fit(SeveralOptimizers(), "single@1", str(tmp_path), 3, save=several)
    with refuses(CheckpointError, "Swapped", "SGD", "AdamW"):
        fit(Swapped(), "single@1", str(tmp_path), 5, resume=several)
    with refuses(CheckpointError, "SeveralOptimizers", "SGD", "AdamW"):
        fit(SeveralOptimizers(), "single@1", str(tmp_path), 5, resume=path)


def parts(strategy: str, root: str, resume: str | None, save: str | None, stop: int) -> list[float]:
    module = SeveralOptimizers()
    fit(module, strategy, root, stop, resume=resume, save=save)
    return module.losses


def test_several_optimizers_resume_under_another_strategy(tmp_path: Path) -> None:
    whole = torch.tensor(on("single@1", parts, str(tmp_path), None, None, 6)).mean(0)
    found, saved = [], None
    for number, strategy in enumerate(["fsdp@2", "ddp@2", "single@1"]):
        save = str(tmp_path / f"{number}.ckpt")
        found.append(torch.tensor(on(strategy, parts, str(tmp_path), saved, save, 2 * number + 2)).mean(0))
        saved = save
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-5, atol=0)


def one_cannot_read(strategy: str, path: str, root: str) -> str:
    rank, mine = in_a_folder_of_its_own(path, root)
    if rank == 1:
        os.truncate(mine / MANIFEST, 200)
    with pytest.raises(CheckpointError) as error:
        fit(Scheduled(), strategy, root, 5, resume=mine)
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    with pytest.raises(CheckpointError, match="rank 1 of 2"):
        fabric.load(mine, Scheduled())
    return str(error.value)


def in_a_folder_of_its_own(path: str, root: str) -> tuple[int, Path]:
    """Go to a folder of this rank with a copy of a checkpoint, as on another machine; the path to it is relative."""
    rank = torch.distributed.get_rank()
    folder = Path(root) / f"rank{rank}"
    shutil.copytree(path, folder / "saved.ckpt")
    os.chdir(folder)
    return rank, Path("saved.ckpt")


@pytest.mark.parametrize("strategy", ["ddp@2", "zero3@2"])
def test_where_one_rank_cannot_read_all_raise(strategy: str, path: str, tmp_path: Path) -> None:
    for text in on(strategy, one_cannot_read, path, str(tmp_path)):
        assert "rank 1 of 2: " in text
        assert MANIFEST in text or "manifest" in text


def one_differs(strategy: str, path: str, root: str, other: str) -> str:
    rank, mine = in_a_folder_of_its_own(path, root)
    if rank == 1:
        shutil.rmtree(mine)
        shutil.copytree(other, mine)
    with pytest.raises(CheckpointError) as error:
        fit(Scheduled(), strategy, root, 5, resume=mine)
    return str(error.value)


def test_where_one_rank_has_another_checkpoint_all_raise(path: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.ckpt")
    fit(Scheduled(), "single@1", str(tmp_path), 2, save=other)
    for text in on("ddp@2", one_differs, path, str(tmp_path), other):
        assert "is another checkpoint on rank 1 than on rank 0" in text


class RankOneLacks(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.get_rank() == 1:
            self.register_buffer("more", torch.zeros(2))


def one_does_not_fit(strategy: str, path: str, root: str) -> str:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    with pytest.raises(CheckpointError) as error:
        fabric.load(path, {"model": RankOneLacks()})
    return str(error.value)


def test_where_one_rank_does_not_fit_all_raise(path: str, tmp_path: Path) -> None:
    for text in on("ddp@2", one_does_not_fit, path, str(tmp_path)):
        assert "more: missing in the checkpoint" in text


# ---- what fits ------------------------------------------------------------------------------------------------------


class Lenient(Changed):
    strict_loading = False


def lenient(strategy: str, path: str, root: str) -> list[str]:
    module, notes = Lenient(), list[str]()
    save = f"{root}/after.ckpt"
    told = LambdaCallback(setup=lambda trainer, *_: setattr(trainer, "note", notes.append))
    trainer = fit(module, strategy, root, 3, resume=path, save=save, callbacks=[told])
    assert trainer.global_step == 3
    return notes


@pytest.mark.parametrize("strategy", EVERYWHERE)
def test_matching_tensors_are_loaded_and_mismatches_reported(strategy: str, path: str, tmp_path: Path) -> None:
    for notes in on(strategy, lenient, path, str(tmp_path)):
        (left,) = [note for note in notes if "strict_loading is False" in note]
        assert [problem for problem in PROBLEMS if problem not in left] == []
    old, new = open_checkpoint(path), open_checkpoint(tmp_path / "after.ckpt")
    fitting = ["net.0.weight", "net.0.bias"]
    for name in fitting:
        assert torch.equal(new.read("model", name), old.read("model", name))
        for slot in ("exp_avg", "exp_avg_sq"):
            key = f"0/{slot}/{name}"
            assert torch.equal(new.read("optimizer", key), old.read("optimizer", key))
    kept = Changed().state_dict()
    for name in ("net.3.weight", "nett.weight"):
        assert torch.equal(new.read("model", name), kept[name])
        if f"0/exp_avg/{name}" in new.names("optimizer"):
            assert not new.read("optimizer", f"0/exp_avg/{name}").any()


def test_fabric_takes_what_fits(path: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    module = Changed()
    optimizer = module.configure_optimizers()[0][0]
    with pytest.warns(UserWarning, match=r"net.3.weight: \(1, 16\) in the checkpoint, \(2, 16\) in the module"):
        fabric.load(path, {"model": module, "optimizer": optimizer}, strict=False)
    old = open_checkpoint(path)
    assert torch.equal(module.state_dict()["net.0.weight"], old.read("model", "net.0.weight"))
    assert torch.equal(
        optimizer.state[module.net[0].weight]["exp_avg"], old.read("optimizer", "0/exp_avg/net.0.weight")
    )
    assert module.net[3].weight not in optimizer.state


# ---- other names ----------------------------------------------------------------------------------------------------


class Held(Scheduled):
    """The same network under another name."""

    checkpoint_renames: ClassVar[dict[str, str]] = {"net": "body.net"}

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.net = self.net
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body.net(x)  # type: ignore[operator]
        return output


def renamed(strategy: str, path: str | None, root: str, kind: type[Regressor]) -> list[float]:
    module = kind()
    fit(module, strategy, root, 6, resume=path)
    return module.losses


@pytest.mark.parametrize("strategy", ["single@1", "fsdp@2", "zero3@2"])
def test_renamed_modules_resume(strategy: str, path: str, tmp_path: Path) -> None:
    whole = on("single@1", renamed, None, str(tmp_path), Scheduled)[0]
    found = torch.tensor(on(strategy, renamed, path, str(tmp_path), Held)).mean(0)
    torch.testing.assert_close(found, torch.tensor(whole[3:]), rtol=1e-5, atol=0)


def test_renames_everywhere_else(path: str) -> None:
    wanted = open_checkpoint(path).read("model", "net.0.weight")
    assert torch.equal(Held.load_from_checkpoint(path).state_dict()["body.net.0.weight"], wanted)
    fabric = Fabric(accelerator="cpu", devices=1)
    for rename in ({"net": ""}, {"net.0": "0", "net.3": "3"}):
        bare = Regressor().net
        fabric.load(path, bare, rename=rename)
        assert torch.equal(bare.state_dict()["0.weight"], wanted)
        fabric.load_raw(path, fresh := Regressor().net, rename=rename)
        assert torch.equal(fresh.state_dict()["0.weight"], wanted)
    with refuses(CheckpointError, "net.0.weight", "net.3.weight", "same"):
        fabric.load_raw(path, nn.Linear(1, 1), rename={"net.0.weight": "same", "net.3.weight": "same"})


def test_renames_that_match_no_name_are_reported_with_mismatches(path: str) -> None:
    class Misspelt(Held):
        checkpoint_renames: ClassVar[dict[str, str]] = {"nett": "body.net"}

    with refuses(CheckpointError, "Misspelt", "'nett'"):
        Misspelt.load_from_checkpoint(path)

    class Careful(Held):
        checkpoint_renames: ClassVar[dict[str, str]] = {"net": "body.net", "older": "body.net"}

    Careful.load_from_checkpoint(path)


class Wrapped(Scheduled):
    """Its network is held by whatever wraps modules for a while."""

    wrapper = "checkpoint"

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        if self.wrapper == "checkpoint":
            self.net[0] = checkpoint_wrapper(self.net[0])
            self.net = checkpoint_wrapper(self.net)  # type: ignore[assignment]
        elif self.wrapper == "compiled":
            self.net[0] = torch.compile(self.net[0], backend="eager")  # type: ignore[assignment]
        else:
            self.net.compile(backend="eager")


class Compiled(Wrapped):
    wrapper = "compiled"


class InPlace(Wrapped):
    wrapper = "in place"


def unwrapped_names(strategy: str, path: str, root: str, kind: type[Regressor]) -> list[float]:
    module = kind()
    fit(module, strategy, root, 6, resume=path, save=f"{root}/after.ckpt")
    return module.losses


@pytest.mark.parametrize(
    ("kind", "strategies"),
    [
        (Wrapped, ["single@1", "fsdp@2", "zero3@2"]),
        (Compiled, ["ddp@2", "zero2@2"]),
        (InPlace, ["single@1", "fsdp@2"]),
    ],
)
def test_names_of_wrappers_never_reach_a_checkpoint(
    kind: type[Regressor], strategies: list[str], path: str, tmp_path: Path
) -> None:
    whole = on("single@1", renamed, None, str(tmp_path), Scheduled)[0]
    plain = open_checkpoint(path)
    for strategy in strategies:
        found = torch.tensor(on(strategy, unwrapped_names, path, str(tmp_path), kind)).mean(0)
        torch.testing.assert_close(found, torch.tensor(whole[3:]), rtol=1e-5, atol=0)
        saved = open_checkpoint(tmp_path / "after.ckpt")
        assert saved.names("model") == plain.names("model")
        assert sorted(saved.names("optimizer")) == sorted(plain.names("optimizer"))
        resumed = Scheduled.load_from_checkpoint(tmp_path / "after.ckpt")
        assert torch.equal(resumed.state_dict()["net.3.weight"], saved.read("model", "net.3.weight"))


# ---- groups that join later -----------------------------------------------------------------------------------------


class Thawing(Regressor):
    """Trains its head; the rest joins the optimizer as a group of its own in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[3].parameters(), lr=0.05)


def join(trainer: Trainer, module: Regressor) -> None:
    optimizer = trainer.run.optimizers[0]  # type: ignore[union-attr]
    # An epoch that is resumed in its middle starts again, with the group in its place.
    if trainer.current_epoch == 1 and len(optimizer.param_groups) == 1:
        module.net[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(module.net[0].parameters()), "lr": 0.01})


def thawed(strategy: str, root: str, resume: str | None, save: str | None, stop: int) -> list[float]:
    name, _, ranks = strategy.partition("@")
    module = Thawing()
    joining = LambdaCallback(on_train_epoch_start=join)
    trainer = silent_trainer(
        strategy=name, devices=int(ranks), max_steps=stop, callbacks=[joining], default_root_dir=root
    )
    trainer.fit(module, DataLoader(regression_data(16), batch_size=4 // int(ranks)), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return module.losses


@pytest.mark.parametrize("chain", ["single@1 ddp@2 zero2@2 single@1", "ddp@2 fsdp@2 zero3@2 ddp@2"])
def test_groups_that_joined_an_optimizer_later_are_carried(chain: str, tmp_path: Path) -> None:
    whole = torch.tensor(thawed("single@1", str(tmp_path), None, None, 12))
    found, saved = [], None
    for number, strategy in enumerate(chain.split()):
        # The first part stops in the epoch in which the group joined.
        save = str(tmp_path / f"{number}.ckpt")
        found.append(torch.tensor(on(strategy, thawed, str(tmp_path), saved, save, 6 + 2 * number)).mean(0))
        saved = save
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-5, atol=0)


class HeldThawing(Thawing):
    """The same under another name; what joins has that name too."""

    checkpoint_renames: ClassVar[dict[str, str]] = {"net": "body"}

    def __init__(self) -> None:
        super().__init__()
        self.body = self.net
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.body[3].parameters(), lr=0.05)


def test_groups_that_joined_later_are_carried_to_other_names(tmp_path: Path) -> None:
    whole = thawed("single@1", str(tmp_path), None, None, 12)
    thawed("single@1", str(tmp_path), None, str(tmp_path / "a.ckpt"), 6)
    module = HeldThawing()
    trainer = silent_trainer(max_steps=12, default_root_dir=tmp_path)
    trainer.fit(module, DataLoader(regression_data(16), batch_size=4), ckpt_path=tmp_path / "a.ckpt")
    assert module.losses == whole[6:]


def test_keys_of_the_run_stay_and_unknown_ones_are_kept(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    net = Regressor().net
    old = torch.optim.AdamW([{"params": net.parameters(), "name": "all"}], lr=0.5, foreach=True)
    fabric.save(tmp_path / "a.ckpt", {"model": net, "optimizer": old})
    new = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    new.param_groups[0]["initial_lr"] = 0.2
    fabric.load(tmp_path / "a.ckpt", {"model": net, "optimizer": new})
    group = new.param_groups[0]
    assert (group["lr"], group["name"], group["initial_lr"]) == (0.5, "all", 0.2)
    assert (group["fused"], group["foreach"]) == (True, None)


def test_weights_are_taken_by_the_name_of_a_tied_one(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    fabric.save(tmp_path / "a.ckpt", {"model": tied})
    apart = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    fabric.load(tmp_path / "a.ckpt", apart)
    assert torch.equal(weights_of(apart), weights_of(nn.ModuleList([tied["a"], tied["b"]])).new_tensor(
        [*weights_of(tied["a"]).tolist(), *weights_of(tied["b"]).tolist()]))  # fmt: skip
    without = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)})
    with refuses(CheckpointError, "b.bias"):
        fabric.load(tmp_path / "a.ckpt", without)
