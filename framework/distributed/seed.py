"""Seeding, and a snapshot of every random generator of this process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError
from ..core.position_rng import mix_seed, seed_generators
from ..system.environment import assigned_run
from .devices import taken_device
from .world import placement

_MAX_SEED = 2**32 - 1


@names_arguments
def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = False) -> int:
    """Seed Python, torch on every device and, if loaded, numpy, the same on all ranks. Return the seed.

    None means a seed of 0. ``workers`` is accepted for compatibility with Lightning: the workers of a loader are always
    seeded. ``verbose`` prints the seed on rank 0. In a repetition of ``phalanx try --seeds``, the seed is another one,
    which this seed and the number of the repetition determine.

    Raises:
        ConfigurationError: the seed is not an integer from 0 to 2**32 - 1.
    """
    seed = 0 if seed is None else seed
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _MAX_SEED:
        raise ConfigurationError(f"seed={seed!r} is not allowed: give a whole number from 0 to {_MAX_SEED}.")
    if (assigned := assigned_run()) is not None and assigned.repeat:
        seed = mix_seed(seed, assigned.repeat) & _MAX_SEED
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    if verbose and placement().rank == 0:
        print(f"seed set to {seed}", flush=True)
    return seed


def seed_rank(seed: int, device: torch.device) -> None:
    """Seed the generators of this rank: those of the CPU, and that of its device."""
    seed_generators(seed)
    if device.type != "cpu":
        # The device is the current one of this rank. All ranks share the seed that it had so far.
        torch.get_device_module(device).manual_seed(seed)


def capture() -> dict[str, Any]:
    """Return the state of every random generator of this process, as tensors and JSON values.

    Covers Python, torch on the CPU, numpy if loaded, and this rank's device if one is in use. Another rank, or a later
    run with other devices, may have it under another index, so that no index is stored.
    """
    return Generators().state()


class Generators:
    """The state of every random generator of this process at one moment, as the generators return it.

    This is faster than ``capture``, which converts the state as well.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)
        self._device = taken_device()
        self._drawn = None if self._device is None else _device_state(self._device)

    def put_back(self) -> None:
        """Set the generators of this process to this state."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._device is not None and self._drawn is not None:
            _set_device_state(self._device, self._drawn)

    def digest(self) -> int:
        """Return a checksum of the states of torch's generators."""
        total = 0
        for state in (self._torch, self._drawn):
            if state is not None:
                words = state[: len(state) // 8 * 8].view(torch.int64)
                # Odd factors, so that a change of one word changes the sum, which wraps around.
                total = mix_seed(total, int((words * torch.arange(1, 2 * len(words), 2)).sum()))
        return total

    def state(self) -> dict[str, Any]:
        """Return the state as ``capture`` does."""
        version, words, gauss = self._python
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "torch": self._torch,
        }
        if self._numpy is not None:
            legacy = self._numpy
            state["numpy"] = {
                "bit_generator": legacy["bit_generator"],
                "key": torch.tensor(legacy["state"]["key"].tolist(), dtype=torch.int64),
                "position": int(legacy["state"]["pos"]),
                "has_gauss": int(legacy["has_gauss"]),
                "gauss": float(legacy["gauss"]),
            }
        if self._device is not None and self._drawn is not None:
            state[self._device.type] = self._drawn
        return state


def _device_state(device: torch.device) -> Tensor | None:
    """Return the state of a device's generator; None of a backend that does not give it."""
    module = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return None
    # There is one MPS device, and its functions take no index.
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device.index)
    return state


def _set_device_state(device: torch.device, state: Tensor) -> None:
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device.index)


def restore(state: dict[str, Any]) -> None:
    """Restore the generators to a state that ``capture`` returned.

    The state of a device is restored on this rank's device of that type, and skipped without one; generators that were
    not captured are skipped as well.
    """
    python = state["python"]
    random.setstate((int(python["version"]), tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    device = taken_device()
    if device is not None and device.type in state:
        _set_device_state(device, state[device.type].cpu())


def _restore_numpy(saved: dict[str, Any]) -> None:
    # Imported even if no other module has yet: a script may import numpy later and continue its random numbers.
    import numpy

    key = numpy.array(saved["key"].tolist(), dtype=numpy.uint32)
    numpy.random.set_state(
        {
            "bit_generator": saved["bit_generator"],
            "state": {"key": key, "pos": saved["position"]},
            "has_gauss": saved["has_gauss"],
            "gauss": saved["gauss"],
        }
    )
