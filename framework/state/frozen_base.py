"""Frozen weights that checkpoints leave out: fingerprints of those with which a fit begins, and their comparison.

A module that sets ``save_frozen = False`` is built with its base by the user's code, such as from the files of a
pretrained model. Its checkpoints hold a fingerprint of each parameter that is frozen and has the values with which the
fit began, instead of the values. A program that loads one builds the module with the base again, and the fingerprints
are compared before anything is loaded. All other tensors are saved: those that are trained, were trained
or have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from ..checkpoint.fingerprint import fingerprint_sum, fingerprint_text
from ..checkpoint.manifest import TensorRecord
from ..checkpoint.reader import Checkpoint
from ..checkpoint.safetensors_io import code_of
from ..checkpoint.write_plan import Shard
from ..core.errors import CheckpointError
from ..distributed.world import World
from ..parallel.parameter_names import canonical_names
from ..parallel.strategy import Strategy
from .module_state import model_state
from .state_matching import ModelMatch


class Fingerprints:
    """Computes the fingerprints of full tensors from the pieces that ranks hold. Constructing it is collective.

    Args:
        shards: this rank's pieces by name; the layout must be the same for later calls.
        names: the names of the tensors, the same on all ranks.
        replicated: whether every rank holds full tensors. Then nothing is collective.
        world: the ranks.
    """

    def __init__(self, shards: Mapping[str, Shard], names: Collection[str], replicated: bool, world: World) -> None:
        self.names = [*names]
        self._world = None if replicated else world
        self._counted = {name for name in self.names if name in shards}
        if self._world is not None:
            mine = {name: (shards[name].offsets, tuple(shards[name].tensor.shape)) for name in self._counted}
            boxes_of_ranks = world.all_gather_object(mine)
            # If several ranks hold the same piece, the first one counts it.
            firsts = {name: [rank.get(name) for rank in boxes_of_ranks].index(box) for name, box in mine.items()}
            self._counted = {name for name, rank in firsts.items() if rank == world.rank}

    def of(self, shards: Mapping[str, Shard]) -> dict[str, str]:
        """Return the fingerprint of each tensor. Collective, unless every rank holds full tensors."""
        if not self.names:
            return {}
        sums = [fingerprint_sum(shards[name]) if name in self._counted else torch.tensor(0) for name in self.names]
        if self._world is None:
            # Tensors of one device are fetched together.
            return dict(zip(self.names, map(fingerprint_text, _fetched(sums)), strict=True))
        total = self._world.all_reduce(torch.stack([one.to(self._world.device) for one in sums]))
        return dict(zip(self.names, map(fingerprint_text, total.tolist()), strict=True))


def _fetched(sums: list[Tensor]) -> list[int]:
    devices = {one.device for one in sums}
    found: list[int] = torch.stack(sums).tolist() if len(devices) == 1 else [int(one) for one in sums]
    return found


class FrozenBase:
    """The parameters with which a fit begins, as fingerprints. Constructing it is collective."""

    def __init__(self, strategy: Strategy, module: nn.Module, world: World) -> None:
        state = model_state(strategy, module)
        self._module = module
        self._fingerprints = Fingerprints(state, _parameters(module), strategy.traits.replicates, world)
        self._at_start = self._fingerprints.of(state)

    def left_out(self, state: Mapping[str, Shard]) -> dict[str, TensorRecord]:
        """Return records of the parameters that a checkpoint of ``state`` leaves out.

        These are frozen and have the values of the start. Collective, unless every rank holds full tensors.
        """
        now, parameters = self._fingerprints.of(state), _parameters(self._module)
        return {
            name: _record(name, state.get(name), parameters[name], fingerprint)
            for name, fingerprint in now.items()
            if not parameters[name].requires_grad and fingerprint == self._at_start[name]
        }

    @staticmethod
    def frozen_names(module: nn.Module) -> set[str]:
        """Return the names of the parameters that are frozen now."""
        return {name for name, parameter in _parameters(module).items() if not parameter.requires_grad}


def check_base(strategy: Strategy, module: nn.Module, world: World, checkpoint: Checkpoint, match: ModelMatch) -> None:
    """Compare a module with the fingerprints of the tensors that a checkpoint leaves out. Collective if there are any.

    Raises:
        CheckpointError: on all ranks; the module was built with another base.
    """
    wanted = {name: checkpoint.left_out[saved] for name, saved in match.tensors.items() if saved in checkpoint.left_out}
    if not wanted:
        return
    state = model_state(strategy, module)
    found = Fingerprints(state, wanted, strategy.traits.replicates, world).of(state)
    dtypes = {name: code_of(shard.tensor.dtype, name) for name, shard in state.items()}
    refuse_other_base(checkpoint, wanted, found, dtypes)


def refuse_other_base(
    checkpoint: Checkpoint, wanted: Mapping[str, TensorRecord], found: Mapping[str, str], dtypes: Mapping[str, str]
) -> None:
    """Raise if fingerprints differ from those of a checkpoint.

    Raises:
        CheckpointError: the module was built with another base, or in another dtype.
    """
    different = [name for name, record in wanted.items() if record.fingerprint != found[name]]
    if not different:
        return
    name, more = different[0], f" and {len(different) - 1} more" if len(different) > 1 else ""
    saved, own = wanted[name].dtype, dtypes.get(name, wanted[name].dtype)
    why = f"is {own} here and {saved} there" if own != saved else "has other values here"
    sources = "".join(f", {source['path']}" for source in checkpoint.document.get("pretrained", ()))
    raise CheckpointError(
        f"{checkpoint.path} leaves out {len(wanted)} frozen weights of the base it was trained from{sources}, and "
        f"{name} {why}{more}: build the module with the same base, in the same precision."
    )


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module's state by canonical name; a tied one under each of its names."""
    canonical = canonical_names(module)
    return {canonical(name): one for name, one in module.named_parameters(remove_duplicate=False)}


def _record(name: str, shard: Shard | None, parameter: nn.Parameter, fingerprint: str) -> TensorRecord:
    # A stage of a pipeline has no part of the parameters of other stages, but knows their shapes.
    tensor, shape = (parameter, parameter.shape) if shard is None else (shard.tensor, shard.shape)
    return TensorRecord(code_of(tensor.dtype, name), tuple(shape), (), fingerprint)
