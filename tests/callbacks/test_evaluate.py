"""``Evaluate``: results at their steps, under strategies that shard weights too, and a training that is unchanged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from local_tasks import NAMES, by_the_library, causal, samples, tokenizer, write_tasks
from messages import refuses
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.callbacks import Evaluate, ModelCheckpoint
from phalanx.errors import ConfigurationError, MetricError
from phalanx.framework.huggingface.harness_model import CausalModel, Ranks
from phalanx.hf import TransformersModule


def trained(strategy: str, callbacks: list[Any], **arguments: Any) -> tuple[Any, TransformersModule]:
    torch.manual_seed(11)
    module = TransformersModule(causal(), learning_rate=0.05)
    settings: dict[str, Any] = {"max_epochs": 1, "devices": "auto", **arguments}
    trainer = silent_trainer(strategy=strategy, callbacks=callbacks, **settings)
    trainer.fit(module, DataLoader(samples(), batch_size=2))  # type: ignore[arg-type]
    return trainer, module


def by_tasks(strategy: str, folder: Path) -> dict[str, float]:
    """Return the results of the last step; write the weights of that step."""
    import tqdm

    # Its bars start a thread, which the tests would find left behind.
    tqdm.tqdm.monitor_interval = 0
    trainer, _ = trained(strategy, [Evaluate(folder / "tasks.yaml", every="6 steps")])
    trainer.save_pretrained(folder / strategy)
    return {name: float(trainer.callback_metrics[f"eval/{name}"]) for name in NAMES}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_results_are_those_of_the_library_on_the_exported_weights(strategy: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_tasks(tmp_path)
    found = run_on_ranks(2, by_tasks, strategy, tmp_path, timeout=180.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / strategy)
    expected = by_the_library(model, tmp_path)
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-4)
    assert 0 < expected["choice/acc"] < 1


def mean_logit(trainer: Any, module: Any) -> dict[str, Any]:
    """Return a number of the weights; draw random numbers, and change the module."""
    tokens = torch.randint(3, 20, (2, 4), generator=torch.Generator().manual_seed(1))
    assert not module.training
    assert not torch.is_grad_enabled()
    torch.rand(3)
    module.calls = getattr(module, "calls", 0) + 1
    ranks = module.all_gather(torch.tensor(float(trainer.global_rank)))
    return {"logit": module(tokens).logits.mean(), "step": trainer.global_step, "ranks": ranks.sum()}


def with_and_without() -> tuple[Any, Any, dict[str, float], list[int]]:
    found: list[int] = []

    def noted(trainer: Any, module: Any) -> dict[str, Any]:
        found.append(trainer.global_step)
        return mean_logit(trainer, module)

    _, plain = trained("fsdp", [])
    trainer, module = trained("fsdp", [Evaluate(noted, every=2)])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert not hasattr(module, "calls")
    assert module.training
    weights = [weights_of(each.model) if trainer.is_global_zero else torch.empty(0) for each in (plain, module)]
    return weights[0], weights[1], metrics, found


def test_a_function_evaluates_without_effect_on_the_training() -> None:
    (plain, evaluated, metrics, steps), other = run_on_ranks(2, with_and_without)
    assert torch.equal(plain, evaluated)
    assert steps == other[3] == [2, 4, 6]
    assert (metrics["eval/step"], metrics["eval/ranks"]) == (6, 1)
    model = causal().eval()
    torch.nn.utils.vector_to_parameters(evaluated, model.parameters())
    tokens = torch.randint(3, 20, (2, 4), generator=torch.Generator().manual_seed(1))
    assert metrics["eval/logit"] == pytest.approx(model(tokens).logits.mean().item(), rel=1e-4)


def test_steps_are_counted_over_windows_and_checkpoints_monitor_the_results(tmp_path: Path) -> None:
    values = iter([3.0, 1.0, 2.0])
    saver = ModelCheckpoint(tmp_path, monitor="eval/value", mode="min", every_n_train_steps=2, filename="{step}")
    evaluate = Evaluate(lambda *_: {"value": next(values)}, every=2)
    arguments: dict[str, Any] = {"accumulate_grad_batches": 2, "devices": 1, "enable_checkpointing": True}
    trained("single", [saver, evaluate], **arguments)
    assert Path(saver.best_model_path).name == "step=4.ckpt"
    assert saver.best_model_score == 1.0


def test_epochs_are_counted_and_a_resumed_fit_keeps_the_results(tmp_path: Path) -> None:
    seen: list[int] = []

    def noted(trainer: Any, module: Any) -> dict[str, float]:
        seen.append(trainer.current_epoch)
        return {"epoch": trainer.current_epoch}

    trainer, module = trained("single", [Evaluate(noted, every="2 epochs")], max_epochs=3, devices=1)
    assert seen == [1]
    trainer.save_checkpoint(tmp_path / "saved")

    class Looks(Evaluate):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(int(trainer.callback_metrics["eval/epoch"]))

        def wants(self, hook: str) -> bool:
            return hook == "on_train_batch_end" or super().wants(hook)

        @property
        def state_key(self) -> str:
            return "Evaluate"

    again = silent_trainer(devices=1, max_epochs=4, callbacks=[Looks(noted, every="3 epochs")], limit_train_batches=1)
    again.fit(module, DataLoader(samples(), batch_size=2), ckpt_path=tmp_path / "saved")  # type: ignore[arg-type]
    assert set(seen[1:]) == {1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": ["choice"]}, "'task'"),
        ({"tasks": []}, "tasks: []"),
        ({"limit": -1}, "limit: -1"),
        ({"include_path": "nowhere"}, "include_path: 'nowhere'"),
        ({"batch_size": 0}, "batch_size: 0"),
    ],
)
def test_wrong_files_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with refuses(ConfigurationError, said):
        Evaluate(write_tasks(tmp_path, **options))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    with refuses(ConfigurationError, "task.yaml", "tasks.yaml"):
        Evaluate(tmp_path / "task.yaml")
    with refuses(ConfigurationError, "tasks=3"):
        Evaluate(3)  # type: ignore[arg-type]
    with refuses(ConfigurationError, "every='2 fortnights'"):
        Evaluate(mean_logit, every="2 fortnights")


@pytest.mark.parametrize("found", [3.0, {"text": "much"}])
def test_other_results_than_numbers_are_refused(found: Any) -> None:
    with refuses(MetricError, "numbers by name"):
        trained("single", [Evaluate(lambda *_: found, every=1)], devices=1)


class Counting(TrainModule):
    """A model that is no model of transformers: the next token is the next letter, whatever came before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.tokenizer = tokenizer()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        following = (tokens + 1).clamp(max=len(self.tokenizer) - 1)
        return {"logits": self.weight * 5 * one_hot(following, len(self.tokenizer))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def by_letters(folder: Path) -> tuple[dict[str, float], list[str]]:
    write_tasks(folder, tokenizer=None)
    module, texts = Counting(), []
    trainer = silent_trainer(max_steps=1, devices="auto", callbacks=[Evaluate(folder / "tasks.yaml", every=1)])
    trainer.fit(module, DataLoader([1.0, 2.0]))  # type: ignore[arg-type]
    model = CausalModel(module, module.tokenizer, Ranks(trainer.world, True, lambda: None), 2)
    with torch.no_grad():
        for prompts in (["ab", "abc?", "k"], ["d"], []):
            texts += model.generate([(each, {"until": ["i"], "max_gen_toks": 5}) for each in prompts])
        (score,) = model.score([([3, 4], [5, 7])])
    # Of two tokens one is the next letter.
    total, is_greedy = score
    assert total == pytest.approx(2 * -math.log(1 + (len(module.tokenizer) - 1) * math.exp(-5)) - 5, rel=1e-5)
    assert not is_greedy
    return {name: float(trainer.callback_metrics[f"eval/{name}"]) for name in NAMES}, texts


def test_any_module_that_returns_logits_answers_tasks(tmp_path: Path) -> None:
    metrics, texts = by_letters(tmp_path)
    # The letters after the prompts, up to the stop sequence.
    assert texts == ["cdefg", ".:\n\n\n", "lmnop", "efgh"]
    assert metrics["texts/exact_match"] == 0
    # Of all choices " a" has the fewest tokens, and none of its letters follows.
    assert metrics["choice/acc"] == pytest.approx(3 / 7)
