"""Bases of 4 bits: their values, their memory, and adapters on top of them under each strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import Adapted, by_hand, llama, row_loader, rows
from messages import refuses, says
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import hf
from phalanx.framework.core.errors import CheckpointError, ConfigurationError
from phalanx.framework.huggingface.four_bit import Linear4bit

STEPS, BATCH = 4, 12
# The values of NF4, to four digits.
VALUES = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
VALUES += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]


def nearest(weight: Tensor) -> Tensor:
    """Return weights rounded by hand: block by block, to the nearest value times the largest of the block."""
    values, rounded = torch.tensor(VALUES), torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], 64):
            block = weight[row, start : start + 64]
            largest = block.abs().max()
            choice = (block[:, None] / largest - values).abs().argmin(1)
            rounded[row, start : start + 64] = values[choice] * largest
    return rounded


@pytest.mark.parametrize("width", [64, 100, 192])
def test_weights_are_the_nearest_values_of_their_blocks(width: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(width, 5)
    torch.testing.assert_close(Linear4bit(layer).weight, nearest(layer.weight.detach()), rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        layer.weight.zero_()
    assert not Linear4bit(layer).weight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_and_the_gradient_are_those_of_an_ordinary_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = nn.Linear(100, 7, dtype=dtype)
    layer = Linear4bit(given)
    plain = nn.Linear(100, 7, dtype=dtype)
    plain.load_state_dict({"weight": layer.weight, "bias": given.bias})
    one, other = (torch.randn(3, 100, dtype=dtype, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    layer(one.requires_grad_()).square().sum().backward()
    plain(other.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(layer(one), plain(other))
    torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    assert layer.codes.grad is None


def test_weights_take_a_quarter_of_bf16_and_are_not_kept_for_backward() -> None:
    layer = nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16)
    four_bit = Linear4bit(layer)
    taken = sum(one.numel() * one.element_size() for one in four_bit.parameters())
    assert taken == layer.weight.numel() * 4.5 / 8
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        four_bit(torch.randn(2, 1024, dtype=torch.bfloat16, requires_grad=True))
    assert sum(one.numel() * one.element_size() for one in kept) == taken


def test_autocast_computes_in_its_dtype() -> None:
    layer = Linear4bit(nn.Linear(64, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16


# ---- adapters --------------------------------------------------------------------------------------------------------


def ordinary(module: Adapted) -> Adapted:
    """Replace layers of 4 bits by ordinary ones with the same weights."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear4bit):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False).requires_grad_(False)
                plain.load_state_dict({"weight": layer.weight})
                setattr(parent, name, plain)
    return module


class Tuned(Adapted):
    save_frozen = False

    def __init__(self) -> None:
        super().__init__("four_bit")


def expected() -> list[float]:
    return by_hand(ordinary(Tuned()), rows(STEPS * BATCH), BATCH, STEPS)


def three_runs(strategy: str, ranks: int, root: Path, precision: str = "32-true") -> list[list[float]]:
    """Return the losses of a run, and of the two parts of a run that is stopped and resumed."""
    found = []
    for folder, stop, start in (("whole", STEPS, None), ("parts", 2, None), ("parts", STEPS, root / "2.ckpt")):
        module = Tuned()
        trainer = silent_trainer(
            strategy=strategy, devices=ranks, max_steps=stop, precision=precision, default_root_dir=root / folder
        )
        trainer.fit(module, row_loader(STEPS * BATCH, BATCH // ranks), ckpt_path=start)
        if stop == 2:
            trainer.save_checkpoint(root / "2.ckpt")
        found.append(module.losses)
    return found


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2", "zero3"])
def test_adapters_train_as_on_ordinary_layers_and_resume_exactly(strategy: str, tmp_path: Path) -> None:
    ranks = 1 if strategy == "single" else 2
    arguments = (strategy, ranks, tmp_path)
    results = [three_runs(*arguments)] if ranks == 1 else run_on_ranks(ranks, three_runs, *arguments, timeout=120.0)
    for whole, first, rest in results:
        assert first + rest == whole
    means = torch.tensor([whole for whole, *_ in results], dtype=torch.float64).mean(0)
    # Sums in another order: a few units in the last place of float32.
    torch.testing.assert_close(means.tolist(), expected(), rtol=1e-6, atol=0.0)
    held = sum(path.stat().st_size for path in (tmp_path / "2.ckpt").rglob("*.safetensors"))
    adapters = sum(one.numel() for one in Tuned().parameters() if one.requires_grad)
    # Weights and two moments of each, beside headers and random generators.
    assert held < 3 * 4 * adapters + 60_000


def test_mixed_precision_is_the_same_under_ddp_and_fsdp(tmp_path: Path) -> None:
    one, other = (
        run_on_ranks(2, three_runs, name, 2, tmp_path / name, "bf16-mixed", timeout=120.0) for name in ("ddp", "fsdp")
    )
    # Rounding to bfloat16 enlarges differences in the order of sums.
    torch.testing.assert_close([each[0] for each in one], [each[0] for each in other], rtol=1e-2, atol=0.0)


def test_another_base_is_refused(tmp_path: Path) -> None:
    three_runs("single", 1, tmp_path)
    module = Tuned()
    next(each for each in module.modules() if isinstance(each, Linear4bit)).codes.data[0, 0] ^= 1
    with refuses(CheckpointError, "frozen weights of the base", "codes"):
        silent_trainer(devices=1, max_steps=4).fit(module, row_loader(48, 12), ckpt_path=tmp_path / "2.ckpt")


def written(strategy: str, ranks: int, directory: Path) -> Tensor:
    module = Tuned()
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=2)
    trainer.fit(module, row_loader(2 * BATCH, BATCH // ranks))
    hf.save_adapter(trainer, directory / "adapter")
    hf.save_adapter(trainer, directory / "merged", merge=True)
    return logits_of(module.net) if trainer.is_global_zero else torch.empty(0)


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    logits: Tensor = model.eval()(input_ids=rows(4)).logits
    return logits


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_the_adapter_and_a_merged_model_in_full_precision_are_written(strategy: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    ranks = 1 if strategy == "single" else 2
    arguments = (strategy, ranks, tmp_path)
    logits = written(*arguments) if ranks == 1 else run_on_ranks(ranks, written, *arguments)[0]
    again = PeftModel.from_pretrained(hf.quantize_4bit(llama()), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(again), logits)
    merged = LlamaForCausalLM.from_pretrained(str(tmp_path / "merged"))
    assert not any(isinstance(part, Linear4bit) for part in merged.modules())
    torch.testing.assert_close(logits_of(merged), logits, rtol=1e-4, atol=1e-5)


def test_a_merge_that_would_be_lost_is_refused() -> None:
    net = Tuned().net
    for merge in (net.merge_and_unload, partial(net.merge_and_unload, safe_merge=True)):
        with refuses(ConfigurationError, "merge=True"):
            merge()


def test_what_is_quantized_and_what_is_not() -> None:
    model = hf.quantize_4bit(llama(), skip=["lm_head", "model.layers.0.mlp.up_proj"])
    kept = {name for name, part in model.named_modules() if type(part) is nn.Linear}
    assert kept == {"lm_head", "model.layers.0.mlp.up_proj"}
    assert sum(isinstance(part, Linear4bit) for part in model.modules()) == 13
    with refuses(ConfigurationError, "get_peft_model"):
        hf.quantize_4bit(Tuned().net)
    with refuses(ConfigurationError, "no torch.nn.Linear", "Embedding"):
        hf.quantize_4bit(nn.Sequential(nn.Embedding(3, 4)))


class OfBitsandbytes(nn.Parameter):
    """A parameter with an attribute, as those of bitsandbytes."""

    quant_state = "scales"


def refused() -> str:
    module = Tuned()
    layer = module.net.base_model.model.lm_head
    layer.weight = OfBitsandbytes(layer.weight.detach(), requires_grad=False)
    try:
        silent_trainer(strategy="fsdp", devices=2, max_steps=1).fit(module, row_loader(BATCH, BATCH))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_base_of_bitsandbytes_is_refused_where_tensors_are_split() -> None:
    for message in run_on_ranks(2, refused):
        says(message, "lm_head", "quantize_4bit", "ddp")


# ---- a base from a file ----------------------------------------------------------------------------------------------


class FromFile(Adapted):
    """Builds the model without data, and reads its codes from a file."""

    def __init__(self, path: Any) -> None:
        super().__init__("four_bit", late=True)
        self.path = path

    def build(self) -> None:
        from peft import LoraConfig, get_peft_model

        self.net: Any = hf.quantize_4bit(llama())
        if self.path is not None:
            self.load_pretrained(self.path)
        self.net = get_peft_model(self.net, LoraConfig(r=3, target_modules=["q_proj"]))


def codes_from_file(strategy: str, path: Path | None) -> bool:
    module = FromFile(path)
    trainer = silent_trainer(strategy=strategy, devices=2, max_steps=1)
    trainer.fit(module, row_loader(BATCH, BATCH // 2))
    if not trainer.is_global_zero:
        return True
    wanted = {name: one for name, one in hf.quantize_4bit(llama()).named_parameters() if "codes" in name}
    found = {name: one for name, one in module.named_parameters() if "codes" in name}
    return len(found) == len(wanted) == 14 and all(
        torch.equal(one, other) for one, other in zip(wanted.values(), found.values(), strict=True)
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_each_rank_reads_its_part_of_a_base_of_4_bits_from_a_file(strategy: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(hf.quantize_4bit(llama()).state_dict(), tmp_path / "base.safetensors")
    assert run_on_ranks(2, codes_from_file, strategy, tmp_path / "base.safetensors") == [True, True]
