"""Linear layers with frozen weights of 4 bits, as the base of adapters (Dettmers et al. 2023, "QLoRA").

Codes and scales are ordinary parameters of bytes. Strategies shard, send and save them as any frozen parameter, without
casting them, so that a layer computes with the same weights under every strategy and precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError
from ..parallel.parameter_names import canonical_names

T = TypeVar("T", bound=nn.Module)

BLOCK = 64
"""The number of consecutive weights of a row that share a scale, their largest absolute value."""
# NF4: the quantiles of a normal distribution, with an exact zero, divided by the largest (appendix E of the paper).
_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Linear4bit(nn.Linear):
    """A linear layer whose weights are frozen numbers of 4 bits. The product has the dtype of the inputs.

    Forward and backward each compute the weights again from their codes, one layer at a time.

    Args:
        layer: the layer with the weights; its bias is kept. On the meta device, the weights must be loaded later.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight_dtype = layer.weight.dtype
        codes, scales = quantized(layer.weight.detach())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.register_parameter("bias", layer.bias)
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weights ``[out_features, in_features]`` that the codes stand for, computed when it is read."""
        values = dequantized(self.codes, self.scales, self.in_features, self.weight_dtype)
        return values.as_subclass(_ReadOnly)

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of ``[..., in_features]`` with the weights, plus the bias."""
        device, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Any = _Product.apply
        outputs: Tensor = product(input.to(dtype), self.codes, self.scales, bias, self.in_features)
        return outputs

    def reset_parameters(self) -> None:
        """Refuse to choose initial values: codes stand for weights that exist.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "quantize_4bit got layers without data, and nothing has loaded their codes: build the model with its "
            "weights in __init__, or load a file of its 4-bit weights with self.load_pretrained after quantize_4bit."
        )


@names_arguments
def quantize_4bit(model: T, skip: Sequence[str] = ("lm_head",)) -> T:
    """Replace the linear layers of a model by layers with frozen weights of 4 bits, in place; return the model.

    The weights take 4.5 bits each: NF4, and a scale of 32 bits for each 64 weights of a row. Call it before
    ``get_peft_model``, as adapters are trained in full precision::

        base = quantize_4bit(AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16))
        model = get_peft_model(base, LoraConfig(target_modules="all-linear"))

    Embeddings, norms, layers tied to others and layers of classes derived from ``nn.Linear`` stay as they are. If
    embeddings are tied, save the weights of 4 bits with ``safetensors.torch.save_model``, not with ``save_file``.

    Args:
        model: a model, with its weights.
        skip: layers that stay as they are, by the last part of their names or by their whole names.

    Raises:
        ConfigurationError: the model has adapters, or no layer to replace.
    """
    if hasattr(model, "peft_config"):
        raise ConfigurationError(
            "quantize_4bit(model): the model has adapters of peft, which are trained in full precision: call "
            "quantize_4bit(base) before get_peft_model."
        )
    uses = Counter(id(one) for part in model.modules() for one in part._parameters.values() if one is not None)
    found = [
        (parent, name, layer)
        for path, parent in model.named_modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
        and uses[id(layer.weight)] == 1
        and not {name, f"{path}.{name}".lstrip(".")} & {*skip}
    ]
    if not found:
        kinds = ", ".join(sorted({type(part).__name__ for part in model.modules()} - {"ModuleList"}))
        raise ConfigurationError(
            f"quantize_4bit(model, skip={list(skip)!r}) finds no torch.nn.Linear in {type(model).__name__}, which is "
            f"made of {kinds}: pass a model with linear layers, without the adapters."
        )
    while found:
        # One at a time, so that at most one layer is held in both forms.
        parent, name, layer = found.pop()
        setattr(parent, name, Linear4bit(layer))
    return model


def restore_weights(model: nn.Module, tensors: MutableMapping[str, Tensor]) -> None:
    """Replace the codes and scales in a model's state by the weights that they stand for, under their usual names."""
    canonical = canonical_names(model)
    for path, part in model.named_modules():
        if isinstance(part, Linear4bit):
            codes, scales, weight = (canonical(f"{path}.{name}") for name in ("codes", "scales", "weight"))
            tensors[weight] = dequantized(tensors.pop(codes), tensors.pop(scales), part.in_features, part.weight_dtype)


@torch.no_grad()
def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes ``[out, blocks * 32]`` and scales ``[out, blocks * 4]`` of weights ``[out, in]``, as bytes.

    A byte of the codes has two weights, the first in its upper half. Four bytes of the scales are a float32. Rows are
    filled with zeros to whole blocks.
    """
    if weight.is_meta:
        blocks = -(-weight.shape[1] // BLOCK)
        sizes = (weight.shape[0], blocks * BLOCK // 2), (weight.shape[0], blocks * 4)
        codes, scales = (torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes)
        return codes, scales
    values = torch.tensor(_VALUES, device=weight.device)
    rows = nn.functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = rows.abs().amax(-1)
    # A block of zeros has the code of zero.
    shares = rows / torch.where(largest > 0, largest, 1.0).unsqueeze(-1)
    numbers = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True).flatten(1).to(torch.uint8)
    return numbers[:, ::2] * 16 + numbers[:, 1::2], largest.view(torch.uint8)


@torch.no_grad()
def dequantized(codes: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """Return the weights ``[out, in_features]`` of codes and scales."""
    values = torch.tensor(_VALUES, device=codes.device)
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)
    rows = nn.functional.embedding(codes.int(), pairs).view(codes.shape[0], -1, BLOCK)
    # A copy, as a part of a larger tensor may begin at any byte.
    rows = rows * scales.clone().view(torch.float32).unsqueeze(-1)
    return rows.flatten(1)[:, :in_features].to(dtype)


class _Product(torch.autograd.Function):
    """The product with weights of 4 bits. Backward has the codes, and not the weights, in memory until it runs."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, in_features: int
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.in_features = in_features
        return nn.functional.linear(inputs, dequantized(codes, scales, in_features, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [gradient] = gradients
        codes, scales = ctx.saved_tensors
        wanted, _, _, wants_bias, _ = ctx.needs_input_grad
        of_inputs = gradient @ dequantized(codes, scales, ctx.in_features, gradient.dtype) if wanted else None
        of_bias = gradient.flatten(0, -2).sum(0) if wants_bias else None
        return of_inputs, None, None, of_bias, None


class _ReadOnly(Tensor):
    """Weights that were computed from codes: setting their values, as a merge by peft does, would have no effect."""

    # Operations return ordinary tensors.
    __torch_function__ = nn.Parameter.__torch_function__

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        raise ConfigurationError(
            "the weights of a layer of 4 bits cannot be set, as a merge of adapters does: "
            "hf.save_adapter(trainer, directory, merge=True) writes a merged model in full precision."
        )
