"""The recipes of preference tuning: what plain torch computes, under each strategy; exact resumes; the commands."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks, run_script
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

import phalanx
from phalanx import Callback, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.core.position_rng import mix_seed

ROOT = Path(phalanx.__file__).parent
COOKBOOK = ROOT / "examples" / "cookbook"
PAGE = ROOT / "docs" / "preference-tuning.md"
BATCHES = 4


@pytest.fixture(autouse=True)
def _recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(COOKBOOK))


class Note(Callback):
    """Notes the metrics of each step on this rank. After a step, if there is one, all ranks raise an error."""

    def __init__(self, names: tuple[str, ...], stop: int | None) -> None:
        self.names, self.stop, self.values = names, stop, list[list[float]]()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.values.append([float(trainer.callback_metrics[name]) for name in self.names])
        if trainer.global_step == self.stop:
            raise ValueError("stopped")


def prepared(name: str, options: Any, root: Path, callbacks: list[Callback]) -> tuple[Any, Any, Any]:
    """Return the Trainer, the module and the training loader of a recipe, for ``BATCHES`` batches."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "default_root_dir": root,
        "logger": False,
        "limit_train_batches": BATCHES,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    # For a moment: recipes have the names of other packages.
    sys.path.insert(0, str(COOKBOOK))
    recipe = importlib.import_module(name)
    sys.path.remove(str(COOKBOOK))
    length = {"batches": BATCHES} if name == "grpo" else {"max_epochs": 1}
    trainer, module, (training, _) = recipe.prepare(options, callbacks=callbacks, **length, **settings)
    return trainer, module, training


def noted(name: str, strategy: str, lora: bool, root: Path, *names: str) -> list[list[float]]:
    """Train as the recipe does, without shuffling, as a whole and in two parts; return the metrics of each step."""
    options, found = Namespace(strategy=strategy, devices=2, lora=lora), []
    for folder, stop in (("whole", None), ("parts", 3), ("parts", None)):
        note, saver = Note(names, stop), ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
        trainer, module, training = prepared(name, options, root / folder, [note, saver])
        with contextlib.suppress(ValueError):
            trainer.fit(module, DataLoader(training.dataset, training.batch_size), ckpt_path="auto")
        found.append(note.values)
    whole, before, after = found
    # The checkpoint is that of the second step.
    assert before + after[1:] == whole
    assert after[0] == whole[2]
    return whole


# ---- direct preference optimization ----------------------------------------------------------------------------------


def preferred_by_hand(lora: bool) -> Tensor:
    """Return loss and margin of each step in plain torch: pair by pair, without padding, on the global batch."""
    import dpo
    from tasks import PROMPT, preference_pairs

    seed_everything(1)
    policy, data = dpo.Preferences(lora).model, preference_pairs(384)[64:]
    seed_everything(1)
    reference = dpo.Preferences(lora).model
    optimizer = torch.optim.AdamW([one for one in policy.parameters() if one.requires_grad], lr=2e-3)

    def score(model: Any, padded: Tensor) -> Tensor:
        tokens = padded[padded != 0]
        logits = model(input_ids=tokens[None]).logits[0, PROMPT - 1 : -1]
        return -functional.cross_entropy(logits, tokens[PROMPT:], reduction="sum")

    found = []
    for step in range(BATCHES):
        margins = []
        for pair in data[32 * step : 32 * (step + 1)]:
            with torch.no_grad():
                before = score(reference, pair["chosen"]) - score(reference, pair["rejected"])
            margins.append(0.1 * (score(policy, pair["chosen"]) - score(policy, pair["rejected"]) - before))
        loss = -torch.stack(margins).sigmoid().log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append([loss.item(), torch.stack(margins).mean().item()])
    return torch.tensor(found)


# Without adapters, the reference's log-probabilities are computed once.
@pytest.mark.parametrize(("strategy", "lora"), [("ddp", False), ("fsdp", True), ("zero3", False), ("zero3", True)])
def test_dpo_is_plain_torch_on_the_global_batch(strategy: str, lora: bool, tmp_path: Path) -> None:
    names = "train_loss", "train_margin"
    found = torch.tensor(run_on_ranks(2, noted, "dpo", strategy, lora, tmp_path, *names, timeout=120.0)).mean(0)
    # Log-probabilities of an answer are sums of up to 36 numbers of float32, in another order than by hand.
    torch.testing.assert_close(found, preferred_by_hand(lora), rtol=1e-4, atol=1e-5)


# ---- group relative policy optimization ------------------------------------------------------------------------------


@torch.no_grad()
def answered(model: Any, first: int, second: int, sample: int, answer: int) -> list[int]:
    """Return a prompt and one answer, sampled token by token."""
    import grpo

    generator = torch.Generator().manual_seed(mix_seed(grpo.SEED, sample, answer))
    tokens = [first, 10, second, 11]
    for _ in range(grpo.ANSWER):
        shares = model(torch.tensor([tokens])).logits[0, -1].softmax(-1)
        tokens.append(int((shares / torch.empty_like(shares).exponential_(generator=generator)).argmax()))
    return tokens


def rewarded_by_hand() -> Tensor:
    """Return reward and loss of each step in plain torch: answer by answer, on the global batch."""
    import grpo

    seed_everything(grpo.SEED)
    module = grpo.Policy()
    policy, reference = module.model, module.reference
    optimizer, found = module.configure_optimizers(), []

    def scores(model: Any, tokens: list[int]) -> Tensor:
        logits = model(torch.tensor([tokens[:-1]])).logits[0, 3:]
        found: Tensor = logits.log_softmax(-1)[range(grpo.ANSWER), tokens[4:]]
        return found

    for step in range(BATCHES):
        texts, advantages, rewards = [], [], []
        for sample in range(8 * step, 8 * (step + 1)):
            first, second = sample % 5, sample // 5 % 5
            group = [answered(policy, first, second, sample, answer) for answer in range(grpo.GROUP)]
            own = torch.tensor([sum(token == first + second for token in one[4:]) / grpo.ANSWER for one in group])
            texts += group
            rewards.append(own.mean())
            advantages += ((own - own.mean()) / (own.std() + 1e-4)).tolist()
        with torch.no_grad():
            old = [scores(policy, one) for one in texts]
            known = [scores(reference, one) for one in texts]
        for _ in range(grpo.UPDATES):
            terms = []
            for one, advantage, before, other in zip(texts, advantages, old, known, strict=True):
                new = scores(policy, one)
                ratio = (new - before).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(1 - grpo.CLIP, 1 + grpo.CLIP) * advantage)
                terms.append((gain - grpo.BETA * ((other - new).exp() - (other - new) - 1)).mean())
            loss = -torch.stack(terms).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append([torch.stack(rewards).mean().item(), loss.item()])
    return torch.tensor(found)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_grpo_is_plain_torch_on_the_global_batch(strategy: str, tmp_path: Path) -> None:
    found = torch.tensor(run_on_ranks(2, noted, "grpo", strategy, False, tmp_path, "reward", "loss", timeout=120.0))
    expected = rewarded_by_hand()
    # The answers are the same: rewards are numbers of right tokens. Losses are near zero, as advantages have no mean.
    torch.testing.assert_close(found.mean(0), expected, rtol=1e-4, atol=1e-5)
    assert expected[:, 0].unique().numel() > 1


# ---- as scripts ------------------------------------------------------------------------------------------------------


COMMANDS = re.findall(r"^    python (examples/cookbook/\w+\.py) (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("script", "flags"), COMMANDS)
def test_the_commands_of_the_page_run_on_two_ranks(script: str, flags: str, tmp_path: Path) -> None:
    arguments = [*flags.split(), "--short", "--out", str(tmp_path)]
    done = run_script(ROOT / script, *arguments, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout
    assert str(done.stdout).count(" after training") == 1


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 2
