"""What a user's settings of ZeRO are worth, asked of DeepSpeed itself, so that a typo does not wait for the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...framework.core.errors import ConfigurationError, did_you_mean
from ...framework.system.environment import library_environment
from .config import ZeroOptions

_BLOCK = "zero_optimization"
_CUDA_ONLY = {
    **dict.fromkeys(
        ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
        "DeepSpeed quantizes on CUDA only; leave it out on a CPU",
    ),
    # Driven by hand it ends in a RuntimeError at the first steps on gloo, with stages 2 and 3, in fp32 and bf16.
    "zenflow": "DeepSpeed's ZenFlow fails on a CPU; leave it out there",
}


def check_values(options: ZeroOptions, device_type: str) -> None:
    """Refuse settings that DeepSpeed does not know or take. DeepSpeed is imported where there are any.

    Raises:
        ConfigurationError: naming all of them.
    """
    settings = options.config.get(_BLOCK)
    if not settings:
        return
    wrong = list(_complaints({**settings, "stage": options.stage}, device_type))
    if device_type == "cpu":
        wrong += [f"{_BLOCK}.{name}: {_CUDA_ONLY[name]}" for name in _CUDA_ONLY if settings.get(name)]
    if wrong:
        raise ConfigurationError(f"DeepSpeed does not take these settings. {'; '.join(wrong)}.")


def _complaints(settings: Mapping[str, Any], device_type: str) -> Iterator[str]:
    # Importing DeepSpeed sets the second of these for good.
    with library_environment(DS_ACCELERATOR=device_type, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from pydantic import ValidationError

        try:
            DeepSpeedZeroConfig(**settings)
        except ValidationError as error:
            names = list(_names(DeepSpeedZeroConfig))
            for each in error.errors(include_url=False):
                where = ".".join(map(str, (_BLOCK, *each["loc"])))
                if each["type"] == "extra_forbidden":
                    guess = did_you_mean(str(each["loc"][-1]), names).rstrip("?")
                    yield f"{where}: not known.{guess}" if guess else f"{where}: not known"
                elif each["loc"]:
                    yield f"{where}={each['input']!r}: {each['msg']}"
                else:
                    yield each["msg"].removeprefix("Assertion failed, ").rstrip(".")


def _names(model: Any) -> Iterator[str]:
    """Yield the names of a model's settings and of those inside it."""
    for name, field in model.model_fields.items():
        yield field.alias or name
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if hasattr(inner, "model_fields"):
                yield from _names(inner)
