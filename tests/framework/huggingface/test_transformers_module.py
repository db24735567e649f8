"""``TransformersModule`` trains as a loop in plain torch: the mean over all labels that count, whatever the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import MODELS, causal, collator, samples
from messages import refuses
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx.errors import LoopError, PhalanxError
from phalanx.framework.huggingface.model_config import config_values
from phalanx.hf import TransformersModule

GLOBAL_BATCH, ROWS, RATE, DECAY = 24, 53, 0.02, 0.5
SEQUENCE = "sequence-classification"


def loader(kind: str, batch_size: int) -> Any:
    return DataLoader(samples(kind, ROWS), batch_size=batch_size, collate_fn=collator(kind))  # type: ignore[arg-type]


def by_hand(kind: str) -> tuple[Tensor, float]:
    """Return the weights after an epoch of global batches, and the mean loss of all labels then."""
    model = MODELS[kind]()
    groups: list[dict[str, Any]] = [
        {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": DECAY},
        {"params": [one for one in model.parameters() if one.dim() <= 1]},
    ]
    optimizer = torch.optim.SGD(groups, lr=RATE)
    for batch in loader(kind, GLOBAL_BATCH):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return weights_of(model), model(**next(iter(loader(kind, ROWS)))).loss.item()


def fitted(kind: str, ranks: int, strategy: str, window: int, recomputes: bool) -> tuple[Tensor, Mapping[str, float]]:
    settings: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": window, "num_sanity_val_steps": 0}
    module = TransformersModule(MODELS[kind](), learning_rate=RATE, weight_decay=DECAY, optimizer=torch.optim.SGD)
    if recomputes:
        module.model.gradient_checkpointing_enable()
    trainer = silent_trainer(devices=ranks, strategy=strategy, **settings)
    trainer.fit(module, loader(kind, GLOBAL_BATCH // (ranks * window)), loader(kind, 5))
    weights = weights_of(module.model) if trainer.is_global_zero else torch.empty(0)
    return weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "strategy", "ranks"),
    [
        *((kind, "single", 1) for kind in MODELS),
        ("t5", "ddp", 3),
        ("llama", "fsdp", 3),
        ("gpt2", "zero2", 2),
        ("bert", "zero3", 2),
    ],
)
def test_weights_and_losses_are_those_of_a_loop_in_plain_torch(kind: str, strategy: str, ranks: int) -> None:
    expected, loss = by_hand(kind)
    for window, recomputes in ((1, False), (4, True)):
        arguments = kind, ranks, strategy, window, recomputes
        answers = [fitted(*arguments)] if ranks == 1 else run_on_ranks(ranks, fitted, *arguments)
        torch.testing.assert_close(answers[0][0], expected, rtol=1e-4, atol=1e-5)
        for _, metrics in answers:
            assert metrics["val_loss"] == pytest.approx(loss, rel=1e-4)
            perplexity = None if kind == "bert" else pytest.approx(math.exp(loss), rel=1e-3)
            assert metrics.get("val_perplexity") == perplexity


def test_a_batch_without_counted_labels_leaves_the_mean_as_it_is() -> None:
    ids = torch.tensor([[3, 4, 5, 6]])
    batches = [{"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": torch.full_like(ids, -100)}]
    module, trainer = TransformersModule(causal()), silent_trainer(devices=1)
    (with_empty,) = trainer.validate(module, batches, verbose=False)
    (alone,) = trainer.validate(module, batches[:1], verbose=False)
    assert with_empty == alone


def test_several_loaders_have_a_perplexity_each() -> None:
    texts: Any = [[{"input_ids": ids, "labels": ids}] for ids in torch.tensor([[[3, 4, 5]], [[9, 9, 9]]])]
    loaders = [DataLoader(text, batch_size=None) for text in texts]
    results = silent_trainer(devices=1).test(TransformersModule(causal()), loaders, verbose=False)
    for number, result in enumerate(results):
        loss, perplexity = (result[f"test_{name}/dataloader_idx_{number}"] for name in ("loss", "perplexity"))
        assert perplexity == pytest.approx(math.exp(loss))


def test_predictions_are_logits_without_labels() -> None:
    batch = next(iter(loader("bert", 4)))
    predicted = silent_trainer(devices=1).predict(TransformersModule(MODELS["bert"]()), [batch])
    assert predicted is not None
    assert {name: tuple(value.shape) for name, value in predicted[0].items()} == {"logits": (4, 3)}


def test_only_matrices_have_weight_decay() -> None:
    module = TransformersModule(causal(), weight_decay=0.3)
    module.model.transformer.wpe.weight.requires_grad = False
    decayed, others = module.configure_optimizers().param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {one.dim() for one in decayed["params"]} == {2}
    assert {one.dim() for one in others["params"]} == {1}
    trained = [one for one in module.parameters() if one.requires_grad]
    assert len(decayed["params"]) + len(others["params"]) == len(trained)


def started(strategy: str) -> Tensor:
    """Return the weights of a model that was built in the run, before any update; on rank 0."""
    torch.manual_seed(7)
    module = TransformersModule(config_values(causal().config))
    trainer = silent_trainer(devices="auto", strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    module.learning_rate = module.weight_decay = 0.0
    trainer.fit(module, loader("gpt2", 20))
    return weights_of(module.model) if trainer.is_global_zero else torch.empty(0)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_configuration_is_built_under_the_strategy_with_the_weights_of_one_process(strategy: str) -> None:
    assert torch.equal(run_on_ranks(2, started, strategy)[0], started("single"))


def test_a_checkpoint_needs_no_other_file(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    for given in (TransformersModule(MODELS["bert"]()), TransformersModule(MODELS["bert"]().config, SEQUENCE)):
        trainer = silent_trainer(devices=1, max_steps=1, num_sanity_val_steps=0)
        trainer.fit(given, loader("bert", 8))
        trainer.save_checkpoint(tmp_path / "saved")
        found = TransformersModule.load_from_checkpoint(tmp_path / "saved")
        assert isinstance(found.model, BertForSequenceClassification)
        assert found.config.num_labels == 3
        assert torch.equal(weights_of(found.model), weights_of(given.model))


class Asking(TransformersModule):
    """Notes the folders whose weights it asks for."""

    asked: tuple[str, ...] = ()

    def load_pretrained(self, path: Any, *_: Any, **__: Any) -> None:
        self.asked = (*self.asked, path)


def test_the_weights_of_a_folder_are_loaded_once_the_model_is_built(tmp_path: Path) -> None:
    causal().config.save_pretrained(tmp_path)
    module = Asking(tmp_path)
    assert not list(module.parameters())
    module.configure_model()
    module.configure_model()
    assert module.asked == (str(tmp_path),)
    assert module.model.config.n_embd == 16


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"model": "no/such/folder"}, "model='no/such/folder'"),
        ({"model": {"n_embd": 8}}, "model="),
        ({"model": 3}, "model=int"),
        ({"model": {"model_type": "gpt2"}, "task": int}, "task="),
        ({"model": {"model_type": "gpt2"}, "task": "causal_lm"}, "causal-lm"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], name: str) -> None:
    with refuses(PhalanxError, name):
        TransformersModule(**arguments)


def test_a_batch_without_labels_is_refused() -> None:
    with refuses(LoopError, "GPT2LMHeadModel", "input_ids"):
        silent_trainer(devices=1).validate(TransformersModule(causal()), [{"input_ids": torch.tensor([[3, 4]])}])


def test_a_model_with_adapters_is_given_to_load_its_checkpoint(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        return get_peft_model(causal(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    given, trainer = TransformersModule(adapted()), silent_trainer(devices=1, max_steps=1)
    trainer.fit(given, loader("gpt2", 8))
    trainer.save_checkpoint(tmp_path / "saved")
    with refuses(PhalanxError, "PeftModel", "load_from_checkpoint", "model="):
        TransformersModule.load_from_checkpoint(tmp_path / "saved")
    found = TransformersModule.load_from_checkpoint(tmp_path / "saved", model=adapted())
    assert torch.equal(weights_of(found.model), weights_of(given.model))
