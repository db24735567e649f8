"""Folders that ``save_pretrained`` writes under every strategy, opened by transformers."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FineTuned, loader, model_class, tiny_config, tokens, written
from messages import refuses
from models import Regressor, loader as regressor_loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric, TrainModule
from phalanx.callbacks import EMAWeightAveraging
from phalanx.framework.core.errors import ConfigurationError, StorageError

KINDS = ("gpt2", "llama", "bert")


class Saving(FineTuned):
    """Writes its model at the end of the training loop, while the strategy still holds the weights."""

    def __init__(self, kind: str, folder: Path | None, out: Path) -> None:
        super().__init__(kind, folder)
        self.out = out

    def on_train_end(self) -> None:
        assert self.trainer.save_pretrained(self.out / "during") == self.out / "during"


def fitted_and_saved(strategy: Any, ranks: int, folder: Path, kinds: tuple[str, ...]) -> dict[str, Tensor]:
    logits = {}
    for kind in kinds:
        module = Saving(kind, folder / kind, folder / f"out-{kind}")
        trainer = silent_trainer(
            strategy=strategy,
            devices=ranks,
            max_steps=2,
            callbacks=[EMAWeightAveraging(decay=0.5, average_at_end=False)],
        )
        trainer.fit(module, loader(ranks))
        trainer.save_pretrained(module.out / "after", max_shard_size="3KB")
        trainer.save_pretrained(module.out / "ema", average="ema")
        if trainer.is_global_zero:
            with torch.no_grad():
                logits[kind] = module.net.eval()(input_ids=tokens()[:3]).logits
    return logits


@pytest.mark.parametrize(
    ("strategy", "ranks", "kinds"),
    [
        ("single", 1, KINDS),
        ("zero3", 1, ("gpt2",)),
        ("ddp", 2, ("gpt2",)),
        ("fsdp", 2, ("gpt2", "llama")),
        ("zero2", 2, ("bert",)),
        ("zero3", 2, ("gpt2", "llama")),
        ("fsdp", 3, ("bert",)),
    ],
)
def test_transformers_opens_the_folder_with_equal_logits(
    strategy: str, ranks: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    for kind in kinds:
        written(kind, tmp_path / kind)
    results = run_on_ranks(ranks, fitted_and_saved, strategy, ranks, tmp_path, kinds, timeout=180)
    for kind, logits in results[0].items():
        out = tmp_path / f"out-{kind}"
        for folder in (out / "during", out / "after"):
            torch.testing.assert_close(opened_logits(kind, folder), logits, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(opened_logits(kind, out / "ema"), logits, rtol=1e-5)
        assert sorted(path.name for path in out.iterdir()) == ["after", "during", "ema"]
        names = {path.name for path in (out / "during").iterdir()}
        assert names == {path.name for path in (tmp_path / kind).iterdir()}
        shards = [path.name for path in (out / "after").glob("*.safetensors")]
        assert len(shards) > 1
        assert (out / "after" / "model.safetensors.index.json").exists()


def opened_logits(kind: str, folder: Path) -> Tensor:
    """Let transformers open a folder without any complaint; return the logits of a few samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = model_class(kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=tokens()[:3]).logits
    return logits


def test_files_are_those_of_transformers(tmp_path: Path) -> None:
    module = FineTuned("gpt2", written("gpt2", tmp_path / "given"))
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, loader())
    trainer.save_pretrained(tmp_path / "own", dtype="bf16")
    module.net.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    own, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("own", "theirs"))
    assert own == theirs
    from safetensors.torch import load_file

    tensors, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "theirs"))
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_an_existing_folder_keeps_its_other_files_and_loses_old_shards(tmp_path: Path) -> None:
    module = FineTuned("llama", written("llama", tmp_path / "given"))
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, loader())
    folder = trainer.save_pretrained(tmp_path / "out", max_shard_size="3KB")
    (folder / "README.md").write_text("mine")
    trainer.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    opened_logits("llama", folder)


@pytest.mark.parametrize(("first", "second"), [("3KB", "3KB"), ("3KB", "5GB"), ("5GB", "3KB"), ("5GB", "5GB")])
def test_a_replacement_that_is_interrupted_mixes_no_weights(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = FineTuned("gpt2", written("gpt2", tmp_path / "given"))
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, loader())
    replace, ends = os.replace, list[str]()

    def fill(value: float) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(value)

    for count in range(20):
        folder, left = tmp_path / str(count), [count]

        def interrupted(source: Any, target: Any, *, into: Path = folder, left: list[int] = left) -> None:
            if Path(target).parent == into:
                if not left[0]:
                    raise OSError("interrupted")
                left[0] -= 1
            replace(source, target)

        fill(1.0)
        trainer.save_pretrained(folder, max_shard_size=first)
        fill(2.0)
        monkeypatch.setattr(os, "replace", interrupted)
        is_whole = False
        with contextlib.suppress(StorageError):
            trainer.save_pretrained(folder, max_shard_size=second)
            is_whole = True
        monkeypatch.setattr(os, "replace", replace)
        try:
            opened = model_class("gpt2").from_pretrained(folder)
        except OSError:
            ends.append("refused")
            continue
        values = {float(one) for parameter in opened.parameters() for one in parameter.detach().unique()}
        assert len(values) == 1
        ends.append("old" if values == {1.0} else "new")
        if is_whole:
            break
    assert is_whole
    assert ends[-1] == "new"
    assert ends == sorted(ends, key=["old", "refused", "new"].index)
    assert ("refused" in ends) is (first != second or first == "3KB")


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_the_tokenizer_is_added_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    module = FineTuned("gpt2", written("gpt2", tmp_path / "given"))
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, loader())
    assert (trainer.save_pretrained(tmp_path / "out", tokenizer=_Tokenizer()) / "tokenizer.json").exists()
    with torch.no_grad():
        module.net.transformer.wpe.weight[0, 0] = 1e6
    with refuses(ConfigurationError, "transformer.wpe.weight", "1e+06"):
        trainer.save_pretrained(tmp_path / "failed", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "out"]


class Two(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.a = model_class("gpt2").from_config(tiny_config("gpt2"))
        self.b = model_class("gpt2").from_config(tiny_config("gpt2"))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def test_the_model_is_found_or_asked_for(tmp_path: Path) -> None:
    trainer = silent_trainer()
    with refuses(ConfigurationError, "save_pretrained"):
        trainer.save_pretrained(tmp_path / "out")
    module = Two()
    trainer.validate(module, loader())
    with refuses(ConfigurationError, "Two", "model="):
        trainer.save_pretrained(tmp_path / "out")
    with refuses(ConfigurationError, "model=Linear", "Two"):
        trainer.save_pretrained(tmp_path / "out", model=nn.Linear(1, 1))
    with refuses(ConfigurationError, "tokenizer=int"):
        trainer.save_pretrained(tmp_path / "out", tokenizer=1)
    trainer.save_pretrained(tmp_path / "out", model=module.b)
    expected = module.b.eval()(input_ids=tokens()[:3]).logits
    torch.testing.assert_close(opened_logits("gpt2", tmp_path / "out"), expected, rtol=1e-6, atol=1e-6)


def test_of_other_modules_the_weights_alone_are_written(tmp_path: Path) -> None:
    module = Regressor()
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, regressor_loader(8))
    with refuses(ConfigurationError, "Regressor", "model="):
        trainer.save_pretrained(tmp_path / "out")
    trainer.save_pretrained(tmp_path / "out", model=module.net)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def with_fabric(strategy: Any, ranks: int, folder: Path) -> Tensor | None:
    fabric = Fabric(strategy=strategy, devices=ranks, accelerator="cpu")
    fabric.launch()
    with fabric.init_module():
        net = model_class("gpt2").from_config(tiny_config("gpt2"))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.load_pretrained(model, folder / "gpt2")
    batch = tokens()[:2]
    loss = model(input_ids=batch, labels=batch).loss
    fabric.backward(loss)
    optimizer.step()
    fabric.save_pretrained(model, folder / "out")
    # Else the hooks of a strategy would stay in these ranks.
    fabric.free_memory()
    return float(loss.detach())  # type: ignore[return-value]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_the_verbs_of_fabric(strategy: str, tmp_path: Path) -> None:
    model = model_class("gpt2").from_pretrained(written("gpt2", tmp_path / "gpt2"))
    losses = run_on_ranks(2, with_fabric, strategy, 2, tmp_path, timeout=120)
    batch = tokens()[:2]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(torch.tensor(losses), loss.detach().expand(2), rtol=1e-6, atol=0)
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens()[:3]).logits
    torch.testing.assert_close(opened_logits("gpt2", tmp_path / "out"), expected, rtol=1e-5, atol=1e-6)
