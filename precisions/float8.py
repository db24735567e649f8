"""``"fp8-mixed"``: matrix products of linear layers in fp8 by torchao, the rest as in ``"bf16-mixed"``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from ..framework.core.errors import ConfigurationError, closest_or_known, unknown
from ..framework.core.precision import Precision

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# The kernels of fp8 matrix products require it of both dims of a weight.
_MULTIPLE = 16
_OLDEST_CAPABILITY = (8, 9)

Skip = Sequence[str] | Callable[[str, nn.Module], bool]


class Float8Mixed(Precision):
    """``"fp8-mixed"``: fp32 parameters, autocast to bf16, and products of linear layers in fp8 (torchao).

    Converted are the layers whose class is exactly ``nn.Linear``, with ``in_features`` and ``out_features`` that are
    multiples of 16, except the first and the last layer of the module in the order of registration. Layers here are
    submodules without submodules that have a ``weight`` of at least two dims, embeddings and convolutions included. A
    converted layer remains the same object, with its parameters and hooks; after a Trainer's run it computes as before.

    Args:
        skip: further layers that are not converted: names of submodules, with all inside them, or a function that is
            called with name and layer, and returns whether to leave it.
        recipe: torchao's recipe for scales: ``"tensorwise"`` (one scale for each tensor), ``"rowwise"``, or
            ``"rowwise_with_gw_hp"``, which computes gradients of weights in bf16.

    Raises:
        ConfigurationError: torchao is not installed, or an argument is invalid.
    """

    name = "fp8-mixed"
    compute_dtype = torch.bfloat16
    replaces_layers = True
    libraries = (f"{__package__}.float8_library",)

    def __init__(self, skip: Skip = (), recipe: str = "tensorwise") -> None:
        if isinstance(skip, str):
            raise ConfigurationError(f"Float8Mixed(skip={skip!r}) must be a list of names: use skip=[{skip!r}].")
        if recipe not in _RECIPES:
            raise unknown("recipe", str(recipe), _RECIPES)
        try:
            version("torchao")
        except PackageNotFoundError:
            raise ConfigurationError(
                f"precision={self.name!r} needs torchao, which is not installed: pip install 'torchao>=0.18,<0.19'."
            ) from None
        self._skip = skip
        self._recipe = recipe

    def check_device(self, device: torch.device) -> None:
        """Refuse a CUDA device without fp8 matrix products, which came with compute capability 8.9.

        Raises:
            ConfigurationError: the device is older.
        """
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _OLDEST_CAPABILITY:
            raise ConfigurationError(
                f"precision={self.name!r} needs a GPU of compute capability 8.9 or newer (Ada, Hopper), and "
                f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: use precision='bf16-mixed'."
            )

    def convert_module(self, module: nn.Module) -> Callable[[], None]:
        """Make linear layers compute in fp8; return a function that reverts this.

        Raises:
            ConfigurationError: the module has no layer to convert, or a name in ``skip`` is not one of its submodules.
        """
        self._check_names(module)
        inner = _layers(module)[1:-1]
        layers = [layer for name, layer in inner if _is_suitable(layer) and not self._skips(name, layer)]
        if not layers:
            raise ConfigurationError(
                f"precision={self.name!r} computes nn.Linear layers in fp8 whose in_features and out_features are "
                f"multiples of {_MULTIPLE}, except the first and the last layer, and {type(module).__name__} has none "
                "that is not skipped: use precision='bf16-mixed'."
            )
        kind, attributes = float8_form(self._recipe)
        # Those of an earlier set-up in the same Fabric are converted already.
        plain = [layer for layer in layers if type(layer) is nn.Linear]
        for layer in plain:
            for name, value in attributes.items():
                setattr(layer, name, value)
            # No ordinary way: the user may hold references to the layer and hooks on it, so it has to stay the same
            # object; torchao's conversion puts new layers without these hooks into the module.
            layer.__class__ = kind

        def undo() -> None:
            for layer in plain:
                # No ordinary way: the layer, which is the user's object, gets its own class back.
                layer.__class__ = nn.Linear
                for name in attributes:
                    delattr(layer, name)

        return undo

    def _skips(self, name: str, layer: nn.Module) -> bool:
        if callable(self._skip):
            return bool(self._skip(name, layer))
        return any(name == one or name.startswith(f"{one}.") for one in self._skip)

    def _check_names(self, module: nn.Module) -> None:
        if callable(self._skip):
            return
        known = [name for name, _ in module.named_modules() if name]
        for name in self._skip:
            if name not in known:
                raise ConfigurationError(
                    f"Float8Mixed(skip=...): {name!r} is not a submodule of {type(module).__name__}."
                    f"{closest_or_known(name, known)}"
                )


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers with weights of at least two dims, in the order of registration."""
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if not layer._modules and (weight := layer._parameters.get("weight")) is not None and weight.dim() > 1
    ]


def _is_suitable(layer: nn.Module) -> bool:
    """Whether a layer can compute in fp8, or does so already. Other subclasses of ``nn.Linear`` compute otherwise."""
    if not isinstance(layer, nn.Linear):
        return False
    known = type(layer) is nn.Linear or hasattr(layer, "linear_mm_config")
    return known and layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def float8_form(recipe: str) -> tuple[type[nn.Linear], dict[str, Any]]:
    """Return the class that torchao's conversion gives a linear layer, and the attributes that it adds."""
    with quiet_import():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Gradients of weights are sums over the rows of a batch, whose number need not be a multiple of 16.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    plain = nn.Linear(_MULTIPLE, _MULTIPLE, device="meta")
    converted = convert_to_float8_training(plain, config=config)
    added = {name: value for name, value in vars(converted).items() if name not in vars(plain)}
    return type(converted), added


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Import torchao without its warnings about kernels of other devices, which fp8 training does not use."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(_drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
