"""``Contents``: the objects in a dict that is saved or loaded, and the snapshot of them that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.codec import encode, encode_inline
from ..checkpoint.write_plan import CheckpointContents, Shard
from ..core.errors import ConfigurationError, unknown
from ..core.torch_internals import tree_map
from ..data.stateful_loader import is_stateful
from ..distributed.world import World
from ..parallel.full_tensors import whole_tensors
from ..parallel.parameter_names import buffer_names, names_of
from ..parallel.strategy import Strategy
from ..state.hyperparameters import class_names, encode_known
from ..state.module_state import extra_state, model_state
from ..state.optimizer_state import optimizer_state, whole
from .engine import Engine, FabricOptimizer, FabricScheduler
from .module import engine_of, unwrap

Filter = Mapping[str, Callable[[str, Any], bool]]

FABRIC_TABLE = "fabric"


@dataclass
class Contents:
    """The values of a user's dict by kind: modules, optimizers, other objects with a state, plain values."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    strategies: dict[str, Strategy] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    keepers: dict[str, Strategy] = field(default_factory=dict)
    """The strategy that holds each optimizer's state."""
    stateful: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def prefix(self, key: str) -> str:
        """Return the prefix of a module's tensor names; empty if it is the only module."""
        return f"{key}." if len(self.modules) > 1 else ""


def contents_of(state: Mapping[str, Any], strategy: Strategy, engines: Sequence[Engine]) -> Contents:
    """Sort the values of a dict by kind.

    Args:
        state: the user's dict; its modules and optimizers may be set up, or the originals of those that are.
        strategy: used for modules that were not set up.
        engines: those of all modules that were.

    Raises:
        ConfigurationError: a key is not a string.
    """
    contents = Contents()
    for key, value in state.items():
        if not isinstance(key, str):
            raise ConfigurationError(f"state has the key {key!r}; the keys of what is saved are strings.")
        if isinstance(value, nn.Module):
            engine = engine_of(value) or _holder(engines, value)
            contents.modules[key] = unwrap(value)
            contents.strategies[key] = strategy if engine is None else engine.strategy
        elif isinstance(value, Optimizer):
            contents.optimizers[key] = plain_optimizer(value)
            contents.keepers[key] = _keeper(engines, value) or strategy
        elif is_stateful(value):
            contents.stateful[key] = value.scheduler if type(value) is FabricScheduler else value
        else:
            contents.values[key] = value
    return contents


def full_state(contents: Contents, world: World) -> dict[str, Tensor]:
    """Return the weights of the only module in full; see ``Fabric.full_state_dict``. Collective."""
    ((key, module),) = contents.modules.items()
    strategy = contents.strategies[key]
    if strategy.traits.replicates:
        return module.state_dict()
    return dict(whole_tensors(model_state(strategy, module), world))


def _holder(engines: Sequence[Engine], module: nn.Module) -> Engine | None:
    return next((engine for engine in engines if engine.module is unwrap(module)), None)


def _keeper(engines: Sequence[Engine], optimizer: Any) -> Strategy | None:
    if type(optimizer) is FabricOptimizer:
        return optimizer.engine.strategy
    found = (engine for engine in engines if any(one.optimizer is optimizer for one in engine.optimizers))
    return next((engine.strategy for engine in found), None)


def plain_optimizer(optimizer: Any) -> Optimizer:
    """Return the original of a set-up optimizer, any other as it is."""
    original: Optimizer = optimizer.optimizer if type(optimizer) is FabricOptimizer else optimizer
    return original


def parameter_names(contents: Contents, others: Iterable[nn.Module]) -> dict[int, str]:
    """Return the names of all parameters by identity, of the modules in ``contents`` and of ``others``.

    An optimizer may be saved without its module: its state is still stored by parameter name.
    """
    names: dict[int, str] = {}
    rest = list(others)
    for number, module in enumerate(rest):
        prefix = f"module_{number}." if len(rest) > 1 else ""
        names.update({identity: prefix + name for identity, name in names_of(module).items()})
    for key, module in contents.modules.items():
        prefix = contents.prefix(key)
        names.update({identity: prefix + name for identity, name in names_of(module).items()})
    return names


def snapshot_of(
    contents: Contents,
    names: Mapping[int, str],
    own: Mapping[str, Any],
    steps: int,
    filter: Filter,
    rank_state: Any,
    is_global_zero: bool,
) -> CheckpointContents:
    """Return the snapshot that a checkpoint is written from. Collective.

    Args:
        contents: the objects to save.
        names: the names of parameters by identity.
        own: the state of the Fabric itself.
        steps: the number of updates so far.
        filter: functions of name and value by key; what they return False for is not saved.
        rank_state: the state of this rank, None for none.
        is_global_zero: whether this is rank 0, which writes the tensors of ``stateful`` and ``values``.
    """
    known = [*contents.modules, *contents.optimizers, *contents.stateful, *contents.values]
    for key in filter:
        if key not in known:
            raise unknown("filter", key, known)
    shards = _model_section(contents, filter)
    states = [
        optimizer_state(contents.keepers[key], one, names, number)
        for number, (key, one) in enumerate(contents.optimizers.items())
    ]
    stateful = {key: _filtered(value.state_dict(), filter.get(key)) for key, value in contents.stateful.items()}
    stateful, values = tree_map(_whole_tensor, (stateful, contents.values))
    extra = {key: extra_state(module) for key, module in contents.modules.items()}
    encoded, tensors = encode({"stateful": stateful, "values": values, "own": dict(own), "extra": extra})
    only = next(iter(contents.modules.values())) if len(contents.modules) == 1 else None
    given = dict(getattr(only, "hparams", None) or {})
    hparams, _ = encode_known(given)
    return CheckpointContents(
        sections={
            "model": shards,
            "optimizer": {name: shard for _, each in states for name, shard in each.items()},
            # The document is rank 0's, and so are the tensors that it names.
            "state": whole(tensors) if is_global_zero else {},
        },
        document={
            "module": "" if only is None else f"{type(only).__module__}.{type(only).__qualname__}",
            "hparams": hparams,
            "class_hparams": class_names(given),
            "hparams_container": getattr(only, "hparams_container", None),
            "weights_only": True,
            "progress": {"global_step": steps},
            "optimizers": [described for described, _ in states],
            "state": encoded,
            FABRIC_TABLE: {
                "modules": {key: contents.prefix(key) for key in contents.modules},
                "optimizers": list(contents.optimizers),
            },
        },
        rank_document=None if rank_state is None else encode_inline(rank_state),
        buffers={
            contents.prefix(key) + name for key, module in contents.modules.items() for name in buffer_names(module)
        },
    )


def _whole_tensor(value: Any) -> Any:
    """Return a sharded tensor, as in the ``state_dict()`` of a sharded module, in full. Collective."""
    # By its method: importing DTensor takes 0.7 s, which a program without one would pay at each start.
    return value.full_tensor() if isinstance(value, Tensor) and hasattr(value, "full_tensor") else value


def _model_section(contents: Contents, filter: Filter) -> dict[str, Shard]:
    shards: dict[str, Shard] = {}
    for key, module in contents.modules.items():
        held = model_state(contents.strategies[key], module)
        found = _filtered({name: shard.tensor for name, shard in held.items()}, filter.get(key))
        shards.update({contents.prefix(key) + name: held[name] for name in found})
    return shards


def _filtered(state: Mapping[str, Any], keep: Callable[[str, Any], bool] | None) -> dict[str, Any]:
    return {name: value for name, value in state.items() if keep is None or keep(name, value)}
