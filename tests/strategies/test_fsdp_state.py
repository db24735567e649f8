"""State under ``fsdp`` is saved from where it lies."""

from __future__ import annotations

from typing import Any

from ranks import run_on_ranks
from small_gpt import Language, connected

from phalanx.strategies import FSDPStrategy


def test_nothing_is_copied_to_be_saved() -> None:
    assert all(run_on_ranks(2, shares_memory))


def shares_memory() -> bool:
    strategy = connected(FSDPStrategy())
    module = Language()
    strategy.setup(module, [], training=False)
    held_here: dict[str, Any] = dict(module.named_parameters())
    shards = strategy.state.model_state(module)
    return all(
        shards[name].tensor.data_ptr() == parameter._local_tensor.data_ptr() for name, parameter in held_here.items()
    )
