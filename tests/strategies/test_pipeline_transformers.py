"""Models of transformers in pipelines: the losses and weights of a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import GLOBAL_BATCH, LENGTH, model_class, tiny_config, tokens
from models import plain_steps, silent_trainer
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx import Fabric
from phalanx.framework.core.degrees import resolve_degrees
from phalanx.hf import TransformersModule

pytest.importorskip("transformers")

STEPS, WINDOW = 4, 3
# The class of the model, and changes of its configuration.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {"num_key_value_heads": 2, "vocab_size": 64}),
    "tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
}


def model(kind: str) -> Any:
    torch.manual_seed(5)
    name, changes = KINDS[kind]
    config = tiny_config(name)
    config.update(changes)
    net = model_class(name).from_config(config)
    with torch.no_grad():
        for parameter in net.parameters():
            # Biases and norms differ from their initial values too.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return net


class Noted(TransformersModule):
    """Notes the sum of the losses of each micro-batch, and the number of targets."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        # The model averages a loss over the targets that count.
        self.sums = [*getattr(self, "sums", []), (loss.item() * self.batch_weight(batch), self.batch_weight(batch))]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows() -> list[dict[str, Tensor]]:
    """Return sequences of several lengths, padded."""
    ends = torch.randint(4, LENGTH + 1, (len(tokens()),), generator=torch.Generator().manual_seed(3))
    masks = (torch.arange(LENGTH) < ends[:, None]).long()
    return [
        {"input_ids": each, "attention_mask": mask, "labels": each.masked_fill(mask == 0, -100)}
        for each, mask in zip(tokens(), masks, strict=True)
    ]


def trained(kind: str, ranks: int, parallel: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    module: Any = Noted(model=model(kind))
    trainer = silent_trainer(
        devices=ranks, strategy="pipeline", parallel=parallel, max_steps=STEPS, accumulate_grad_batches=WINDOW
    )
    shards = trainer.fabric.resources.data_size
    data: Any = rows()
    trainer.fit(module, DataLoader(data, batch_size=GLOBAL_BATCH // WINDOW // shards))
    weights = {name: each.detach() for name, each in module.named_parameters()}
    return getattr(module, "sums", []), {} if any(each.is_meta for each in weights.values()) else weights


def by_hand(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    net = model(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data: Any = rows()
    losses = plain_steps(optimizer, lambda batch: net(**batch).loss, DataLoader(data, batch_size=GLOBAL_BATCH))
    return losses, dict(net.named_parameters())


@pytest.mark.parametrize(
    ("kind", "ranks", "parallel"), [("tied", 2, "pp=2"), ("gpt2", 4, "pp=2,dp_shard=2"), ("llama", 4, "pp=2,tp=2")]
)
def test_a_model_of_transformers_trains_as_in_a_plain_loop(kind: str, ranks: int, parallel: str) -> None:
    results = run_on_ranks(ranks, trained, kind, ranks, parallel, timeout=120.0)
    losses, weights = by_hand(kind)

    copies = resolve_degrees(parallel).lay_out(ranks).copies
    found = torch.tensor([sums for sums, _ in results[::copies]]).view(-1, STEPS, WINDOW, 2).sum((0, 2))
    torch.testing.assert_close(found[:, 0] / found[:, 1], torch.tensor(losses), rtol=1e-5, atol=0)
    assert len(results[0][1]) == len(weights)
    for name, weight in results[0][1].items():
        torch.testing.assert_close(weight, weights[name.removeprefix("model.")], rtol=1e-4, atol=1e-6)


# ---- a loop of the user's own ----------------------------------------------------------------------------------------


def window() -> list[dict[str, Tensor]]:
    return [{name: tensor[None] for name, tensor in row.items()} for row in rows()[:3]]


def looped() -> tuple[list[float], Tensor, dict[str, Tensor]]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="pipeline")
    fabric.launch()
    net = fabric.setup_module(model("tied"))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))

    def step(batch: dict[str, Tensor]) -> Tensor:
        # Batches may lose items in a step, which runs more than once.
        return net(batch.pop("input_ids"), **batch).loss  # type: ignore[no-any-return]

    losses = fabric.forward_backward(step, window())
    optimizer.step()
    with torch.no_grad():
        logits: Tensor = net(**window()[0]).logits
    return losses.tolist(), logits, dict(fabric.full_state_dict(net))


def test_a_loop_in_fabric_trains_and_evaluates_as_one_process() -> None:
    net = model("tied")
    losses = torch.stack([net(**batch).loss for batch in window()])
    losses.mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    results = run_on_ranks(2, looped)
    for found, logits, _ in results:
        assert found == pytest.approx(losses.tolist(), rel=1e-5)
        torch.testing.assert_close(logits, net(**window()[0]).logits, rtol=1e-4, atol=1e-5)
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(results[0][2][name], weight, rtol=1e-5, atol=1e-6, msg=name)
