"""What a snapshot's copy holds while training goes on: all of one moment, whoever is quicker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from messages import refuses
from torch import Tensor, nn

from phalanx.framework.checkpoint.staging import Staging
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.core.errors import StorageError


class Stepped:
    """A layer after one step of AdamW, its state as a snapshot, and memory for copies."""

    def __init__(self) -> None:
        self.layer = nn.Linear(3, 5)
        self.optimizer = torch.optim.AdamW(self.layer.parameters())
        self.step()
        self.staging = Staging(torch.device("cpu"))

    def step(self) -> None:
        self.layer(torch.randn(2, 3)).square().sum().backward()
        self.optimizer.step()

    @property
    def moment(self) -> Tensor:
        found: Tensor = self.optimizer.state[self.layer.weight]["exp_avg"]
        return found

    def snapshot(self) -> CheckpointContents:
        model = {"weight": Shard.whole(self.layer.weight.detach())}
        return CheckpointContents({"model": model, "optimizer": {"0/exp_avg/weight": Shard.whole(self.moment)}})


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    made = Stepped()
    yield made
    made.staging.close()


def taken(snapshot: CheckpointContents) -> tuple[Tensor, Tensor]:
    return snapshot.sections["model"]["weight"].tensor, snapshot.sections["optimizer"]["0/exp_avg/weight"].tensor


def test_an_update_waits_until_its_state_is_copied(stepped: Stepped) -> None:
    weight, moment = stepped.layer.weight.detach().clone(), stepped.moment.clone()
    copy = stepped.staging.take(stepped.snapshot(), [stepped.optimizer])
    update = threading.Thread(target=stepped.step, daemon=True)
    update.start()
    update.join(0.2)
    assert update.is_alive()
    assert torch.equal(stepped.moment, moment)
    stepped.staging.finish()
    update.join(5.0)
    assert not update.is_alive()
    assert not torch.equal(stepped.moment, moment)
    assert torch.equal(taken(copy)[0], weight)
    assert torch.equal(taken(copy)[1], moment)


def test_what_an_evaluation_has_saved_is_copied_after_it_too(stepped: Stepped) -> None:
    # The first save makes the memory, the second finds it; the third finds what an evaluation has left.
    for _ in range(2):
        with torch.inference_mode():
            copy = stepped.staging.take(stepped.snapshot(), [stepped.optimizer])
        stepped.staging.finish()
        assert torch.equal(taken(copy)[1], stepped.moment)
        stepped.step()
    copy = stepped.staging.take(stepped.snapshot(), [stepped.optimizer])
    stepped.staging.finish()
    assert torch.equal(taken(copy)[1], stepped.moment)


def test_weights_are_copied_at_once(stepped: Stepped) -> None:
    weight = stepped.layer.weight.detach().clone()
    copy = stepped.staging.take(stepped.snapshot(), [stepped.optimizer])
    with torch.no_grad():
        stepped.layer.weight.zero_()
    stepped.staging.finish()
    assert torch.equal(taken(copy)[0], weight)


@pytest.mark.parametrize("known", [False, True])
def test_without_a_step_that_can_be_held_all_is_copied_at_once(stepped: Stepped, known: bool) -> None:
    class Unwrapped(torch.optim.AdamW):
        """Replaces the method that torch has wrapped."""

    optimizer: Any = None
    if known:
        optimizer = Unwrapped(stepped.layer.parameters())
        Unwrapped.step = lambda self, closure=None: None  # type: ignore[method-assign]
    moment = stepped.moment.clone()
    copy = stepped.staging.take(stepped.snapshot(), [optimizer])
    stepped.step()
    stepped.staging.finish()
    assert not torch.equal(stepped.moment, moment)
    assert torch.equal(taken(copy)[1], moment)


def test_state_that_something_else_changes_is_not_saved(stepped: Stepped) -> None:
    stepped.staging.take(stepped.snapshot(), [stepped.optimizer])
    stepped.moment.mul_(2)
    with refuses(StorageError, "asynchronous=False"):
        stepped.staging.finish()
    stepped.step()
    copy = stepped.staging.take(stepped.snapshot(), [stepped.optimizer])
    stepped.staging.finish()
    assert torch.equal(taken(copy)[1], stepped.moment)


def test_giving_up_releases_updates_and_leaves_no_hook(stepped: Stepped) -> None:
    hooks: Any = stepped.optimizer._optimizer_step_pre_hooks
    stepped.staging.take(stepped.snapshot(), [stepped.optimizer])
    stepped.staging.finish()
    stepped.staging.take(stepped.snapshot(), [stepped.optimizer])
    assert len(hooks) == 1
    stepped.staging.close()
    assert not hooks
    stepped.step()
