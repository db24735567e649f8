"""``generate`` of sharded models: ranks with different prompts, or none, generate what one process does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hugging_face import MODELS, POSITIONS, causal
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather
from torch.utils.data import DataLoader

from phalanx import Callback, Fabric, TrainModule
from phalanx.strategies import FSDPStrategy

# The first prompt leaves two positions. On two or three ranks, one of them has no prompt in its last turn.
PROMPTS = [list(range(3, 3 + POSITIONS - 2)), [5], [8, 9, 10, 11, 12], [4, 13, 14], [20, 21]]
# With greedy search the model generates an end token first for some prompts, and several tokens for others.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "eos_token_id": [1, 6]},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "without cache": {"use_cache": False},
}


class Writer(TrainModule):
    """Continues prompts at the end of a validation, and notes how many passes that took."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = MODELS[kind]()
        self.written: dict[tuple[str, int], list[list[int]]] = {}
        self.passes = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.model.register_forward_hook(self.count)
        own = range(len(PROMPTS))[self.global_rank :: self.trainer.world_size]
        for way, arguments in WAYS.items():
            turns = range(-(-len(PROMPTS) // self.trainer.world_size))
            for turn in turns if way == "greedy" else turns[1:]:
                if turn < len(own):
                    torch.manual_seed(own[turn])
                    prompt = torch.tensor([PROMPTS[own[turn]]])
                    length = POSITIONS if way == "greedy" else 9
                    found = self.model.generate(prompt, max_length=length, **arguments)
                    self.written[way, own[turn]] = found.tolist()
                else:
                    assert self.model.generate(torch.empty(0, 1, dtype=torch.long)).shape == (0, 1)

    def count(self, *_: Any) -> None:
        self.passes += 1


def written(kind: str, ranks: int, strategy: str) -> tuple[dict[tuple[str, int], list[list[int]]], int]:
    module = Writer(kind)
    silent_trainer(devices=ranks, strategy=strategy).validate(module, list(torch.arange(3)), verbose=False)
    assert "generate" not in vars(module.model)
    return module.written, module.passes


@pytest.mark.parametrize(("kind", "ranks", "strategy"), [("gpt2", 3, "fsdp"), ("llama", 2, "zero3"), ("t5", 2, "fsdp")])
def test_each_rank_generates_what_one_process_does(kind: str, ranks: int, strategy: str) -> None:
    expected, _ = written(kind, 1, "single")
    lengths = {len(found[0]) for (way, _), found in expected.items() if way == "greedy"}
    assert len(lengths) > 1, "some texts must end before others"
    answers = run_on_ranks(ranks, written, kind, ranks, strategy)
    found = {key: text for answer, _ in answers for key, text in answer.items()}
    assert found == {key: expected[key] for key in found}
    assert len(found) > len(PROMPTS)
    assert len({passes for _, passes in answers}) == 1


class Reporter(Callback):
    """Generates between updates, and at the end of an epoch: outside of all steps."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.texts.append(module.text(5 + trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.texts.append(module.text(3))


class Learner(TrainModule):
    """Generates in its validation steps and while it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = causal()
        self.losses: list[float] = []
        self.texts: list[Any] = []

    def text(self, token: int) -> Any:
        """Continue a prompt of this rank, of a length that no other rank has."""
        prompt = torch.full((1, 1 + self.global_rank), token)
        return self.global_rank, self.model.generate(prompt, max_new_tokens=4 + 3 * self.global_rank).tolist()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.texts += self.model.generate(batch[:, :3], max_new_tokens=2 + int(batch[0, 0]) % 9).tolist()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model.generate(batch[:, :2], max_new_tokens=2 + int(batch[0, 0]) % 9).tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(count: int, size: int) -> DataLoader[Any]:
    rows: Any = torch.randint(3, 31, (count, 8), generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=size)


def learned(ranks: int, strategy: str, between: bool) -> Any:
    """Return the loss of each epoch, the texts of steps and of the callback, and the predictions."""
    module, reporter = Learner(), Reporter()
    settings: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [reporter] if between else []}
    trainer = silent_trainer(devices=ranks, strategy=strategy, **settings)
    # Of three batches the second rank has one, and repeats it.
    trainer.fit(module, batches(12, 4 // ranks), batches(5, 2))
    loss = float(trainer.callback_metrics["loss"])
    predicted = trainer.predict(Learner(), batches(5, 2))
    return loss, module.texts, reporter.texts, predicted


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_generation_in_steps_and_hooks_of_a_fit_leaves_training_as_it_is(strategy: str) -> None:
    loss, texts, _, predicted = learned(1, "single", between=False)
    answers = run_on_ranks(2, learned, 2, strategy, True)
    for own_loss, *_ in answers:
        assert own_loss == pytest.approx(loss, rel=1e-5)
    assert {tuple(text) for _, own, *_ in answers for text in own} == set(map(tuple, texts))
    assert [answer[3] for answer in answers] == [predicted, predicted]
    # The ranks differ in the length of their prompts, of which the shorter one ends first.
    for own in zip(*(reported for _, _, reported, _ in answers), strict=True):
        assert [(rank, len(text[0])) for rank, text in own] == [(0, 5), (1, 9)]


@contextmanager
def fabric_model(strategy: Any) -> Iterator[tuple[Fabric, Any]]:
    """Return a Fabric and its model, which leave no hooks in these ranks."""
    fabric = Fabric(accelerator="cpu", devices="auto", strategy=strategy)
    original = causal()
    model, _ = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=0.1))
    try:
        yield fabric, model.eval()
    finally:
        fabric.free_memory()


def continued(model: Any, rank: int) -> list[Any]:
    """Return what a model generates for the prompts of a rank, of which the shorter one is padded on the left."""
    own = PROMPTS[1:3] if rank == 0 else PROMPTS[3:5]
    ids = torch.tensor([[2] * (max(map(len, own)) - len(prompt)) + prompt for prompt in own])
    texts = model.generate(input_ids=ids, attention_mask=ids.ne(2).long(), max_new_tokens=6 + 3 * rank)
    whole = model.generate(ids[:1], max_new_tokens=3, return_dict_in_generate=True, output_scores=True)
    return [texts.tolist(), whole.sequences.tolist(), len(whole.scores)]


def continued_by_fabric(strategy: str) -> list[Any]:
    with fabric_model(strategy) as (fabric, model):
        return continued(model, fabric.global_rank)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_a_module_of_a_fabric_generates_what_the_plain_model_does(strategy: str) -> None:
    plain = causal().eval()
    assert run_on_ranks(2, continued_by_fabric, strategy) == [continued(plain, 0), continued(plain, 1)]


def dropped(model: Any, rank: int) -> list[Any]:
    """Return two texts that a model samples with dropout, which draws from the generators in each pass."""
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.3
    torch.manual_seed(rank)
    prompt = torch.tensor([PROMPTS[1 + rank]])
    return [model.generate(prompt, max_new_tokens=3 + 4 * rank, do_sample=True).tolist() for _ in range(2)]


def dropped_by_fabric(strategy: str) -> list[Any]:
    with fabric_model(strategy) as (fabric, model):
        return dropped(model, fabric.global_rank)


def test_passes_for_other_ranks_draw_no_random_numbers() -> None:
    assert run_on_ranks(2, dropped_by_fabric, "fsdp") == [dropped(causal(), 0), dropped(causal(), 1)]


def gathers(reshards: bool) -> list[int]:
    """Return the number of gathers of two calls, of 3 and of 9 tokens."""
    counts = []
    with fabric_model(FSDPStrategy(reshard_after_forward=reshards)) as (_, model):
        for length in (3, 9):
            with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=foreach_all_gather) as gather:
                model.generate(torch.tensor([[5]]), max_new_tokens=length, min_new_tokens=length)
            counts.append(gather.call_count)
    return counts


def test_weights_that_stay_gathered_are_gathered_once_per_call() -> None:
    (few, many), (once, same) = run_on_ranks(2, gathers, True)[0], run_on_ranks(2, gathers, False)[0]
    assert many - few == 12, "two blocks for each of six more tokens"
    assert once == same > 0


def failed(strategy: str) -> str:
    """Return the error of this rank, of which the second stops between two passes."""
    with fabric_model(strategy) as (fabric, model):

        def stop(token: int, ids: Tensor) -> list[int]:
            if fabric.global_rank == 1 and ids.shape[-1] == 4:
                raise ValueError("a wrong token")
            return list(range(31))

        try:
            model.generate(torch.tensor([[4, 5]]), max_new_tokens=9, prefix_allowed_tokens_fn=stop)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_an_error_between_two_passes_is_raised_on_all_ranks(strategy: str) -> None:
    first, second = run_on_ranks(2, failed, strategy)
    assert first.startswith("LoopError: rank 1 raised an error between two forward passes")
    assert second == "ValueError: a wrong token"


def test_a_copy_of_a_model_generates_by_itself() -> None:
    with fabric_model("single") as (_, model):
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert each.generate.__self__ is each
        assert model.generate.plain.__self__ is not model
