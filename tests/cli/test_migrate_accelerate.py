"""Scripts of Accelerate: import lines that ``phalanx migrate`` rewrites, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrations import assert_becomes, assert_left_again, assert_losses_by_hand, rewritten
from ranks import run_script

from phalanx.cli.main import main


def test_import_lines_name_the_compatible_package() -> None:
    before = """
    import accelerate
    from accelerate import Accelerator, DistributedType  # both
    from accelerate.logging import get_logger
    from accelerate.utils import (
        ProjectConfiguration,
        set_seed as seed,
    )

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    state = accelerate.PartialState()
    accelerate.utils.set_seed(1)
    """
    after = """
    import phalanx.compat.accelerate as accelerate
    from phalanx.compat.accelerate import Accelerator, DistributedType  # both
    from phalanx.compat.accelerate.logging import get_logger
    from phalanx.compat.accelerate.utils import (
        ProjectConfiguration,
        set_seed as seed,
    )

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    state = accelerate.PartialState()
    accelerate.utils.set_seed(1)
    """
    assert_becomes(before, after)


def test_an_import_of_what_exists_and_what_does_not_is_divided() -> None:
    found = rewritten("from accelerate import Accelerator, prepare_pippy\n")
    assert found.text == "from phalanx.compat.accelerate import Accelerator\nfrom accelerate import prepare_pippy\n"
    assert found.left == [
        (
            1,
            "phalanx.compat.accelerate has no prepare_pippy: Trainer(parallel={'pp': 2}) divides the blocks of a model "
            "into a pipeline.",
        )
    ]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("Accelerator(rng_type=1)", "Did you mean 'rng_types'?"),
        ("Accelerator(megatron_lm_plugin=plugin)", "Megatron"),
        ("DataLoaderConfiguration(data_seed=3)", "set_seed"),
        ("FullyShardedDataParallelPlugin(state_dict_config=None)", "there is no such argument"),
    ],
)
def test_an_argument_that_is_refused_is_left_with_its_reason(call: str, reason: str) -> None:
    name = call.partition("(")[0]
    module = "accelerate" if name == "Accelerator" else "accelerate.utils"
    found = rewritten(f"from {module} import {name}\n\nx = {call}\n")
    ((line, sentence),) = found.left
    assert line == 3
    assert reason in sentence
    assert_left_again(found)


def test_an_attribute_without_a_counterpart_is_left() -> None:
    script = "from accelerate import Accelerator\n\nmine = Accelerator()\n{0}.lomo_backward(loss)\n"
    assert rewritten(script.format("other")).left == []
    found = rewritten(script.format("mine"))
    ((line, reason),) = found.left
    assert line == 4
    assert reason.startswith("Accelerator has no 'lomo_backward': LOMO updates weights in backward")
    assert_left_again(found)


def test_a_method_of_what_a_function_returns_is_not_left() -> None:
    found = rewritten("from accelerate.utils import gather\n\nvalues = gather(tensor).tolist()\n")
    assert found.left == []


SCRIPT = '''
"""A loop, written for Accelerate."""
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(7)
    inputs = torch.randn(32, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for epoch in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).item())
    accelerator.print("losses", json.dumps(losses))


if __name__ == "__main__":
    main()
'''


def test_a_script_trains_to_the_losses_of_a_loop_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert main(["migrate", str(file), "--write"]) == 0
    text = file.read_text()
    assert "from phalanx.compat.accelerate import Accelerator\n" in text
    assert_losses_by_hand(run_script(text), halved_every=2)
