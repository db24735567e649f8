"""Actions of the table of semantics: parameters and buffers of several dtypes, and of unusual sizes."""

from __future__ import annotations

from typing import Any

import torch
from actions_on_modules import STEP, with_extra
from semantic_program import Action
from torch import Tensor, nn

DTYPES = "using unusual parameters and buffers"
# In bfloat16 a difference in the last bit is 4e-3.
COARSE = 2e-2


def built(name: str, build: Any, loss: Any = None, **more: Any) -> Action:
    """Return an action that is a part of the module."""
    return Action(name, DTYPES, STEP, build=build, loss=loss, **more)


class Half(nn.Linear):
    """A layer with weights in bfloat16 among others in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def half_layers(module: Any) -> None:
    for block in module.blocks:
        block.widen = Half(32, 128, dtype=torch.bfloat16)


def half_head(module: Any) -> None:
    module.extra = Half(32, 8, dtype=torch.bfloat16)


def double_head(module: Any) -> None:
    module.extra = Half(32, 8, dtype=torch.float64)


def frozen_half(module: Any) -> None:
    module.extra = Half(32, 8, dtype=torch.float16).requires_grad_(False)


def complex_parameter(module: Any) -> None:
    module.phase = nn.Parameter(torch.polar(torch.full((32,), 0.1), torch.arange(32.0)))


def with_phase(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    return loss + 0.1 * (module.last * module.phase - 0.1).abs().square().mean()


def scalar_parameter(module: Any) -> None:
    module.scale = nn.Parameter(torch.tensor(1.5))


def with_scale(module: Any, rows: Tensor) -> Any:
    logits = module.scale * module(rows)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def scalars_in_blocks(module: Any) -> None:
    for block in module.blocks:
        block.gain = nn.Parameter(torch.tensor(0.9))
        block.register_forward_hook(lambda block, inputs, output: block.gain * output)


def single_element(module: Any) -> None:
    module.scale = nn.Parameter(torch.full((1,), 1.5))


def empty_parameter(module: Any) -> None:
    module.none = nn.Parameter(torch.empty(0, 32))


def transposed_parameter(module: Any) -> None:
    module.blocks[1].project.weight = nn.Parameter(module.blocks[1].project.weight.detach().T.contiguous().T)


def integer_buffer(module: Any) -> None:
    module.register_buffer("order_of_units", torch.arange(31, -1, -1))


def with_order(module: Any, rows: Tensor) -> Any:
    loss, hidden = module.loss(rows), module.last
    return loss + 0.1 * (hidden * hidden[..., module.order_of_units]).mean()


def frozen_block(module: Any) -> None:
    module.blocks[0].requires_grad_(False)


def parameter_list(module: Any) -> None:
    module.offsets = nn.ParameterList([torch.full((32,), 0.1), torch.full((32,), -0.1)])


def with_offsets(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.1 * ((module.last + module.offsets[0]) * module.offsets[1]).mean()


ACTIONS = [
    built("bf16 layers in fp32 blocks", half_layers, tolerance=COARSE),
    built("bf16 layer outside the blocks", half_head, with_extra, tolerance=COARSE),
    built("float64 layer outside the blocks", double_head, with_extra),
    built("frozen fp16 layer", frozen_half, with_extra),
    built("complex parameter", complex_parameter, with_phase),
    built("parameter without dimensions", scalar_parameter, with_scale),
    built("parameters without dimensions in blocks", scalars_in_blocks),
    built("parameter with one element", single_element, with_scale),
    built("parameter without elements", empty_parameter),
    built("non-contiguous parameter", transposed_parameter),
    built("integer buffer", integer_buffer, with_order),
    built("frozen block", frozen_block),
    built("`ParameterList`", parameter_list, with_offsets),
]
