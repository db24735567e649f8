"""torchmetrics without its own communication: the states of all metrics are part of the exchange at the epoch's end.

The states of all ranks are merged as in torchmetrics, except lists (``cat`` states): a rank's k-th update is placed
where a single process would have made it, so a metric over the full list sees the same list as in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.errors import MetricError
from ..core.wording import a_type
from ..distributed.user_collectives import parts_of_ranks, without_values
from ..distributed.world import World

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

States = dict[str, Any]
"""The data of a metric and its nested metrics, by position: the number of updates and the packed states of each."""
_NOTHING = object()


def is_metric(value: Any) -> bool:
    """Whether ``value`` is a torchmetrics ``Metric``; False if torchmetrics has not been imported."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def is_collection(value: Any) -> bool:
    """Whether ``value`` is a torchmetrics ``MetricCollection``."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.MetricCollection)


def logged_items(values: Mapping[str, Any] | MetricCollection) -> Iterable[tuple[str, Any]]:
    """Return the names and values of a mapping, or of a ``MetricCollection`` with its prefix and postfix."""
    # By default the collection copies the states that its metrics share at every call.
    return values.items(copy_state=False) if is_collection(values) else values.items()  # type: ignore[call-arg]


def _parts(metric: nn.Module) -> list[Any]:
    """Return the metric and the metrics inside it."""
    return [part for part in metric.modules() if is_metric(part)]


# ---- reduction over ranks -----------------------------------------------------------------------------------------


def packed_states(metric: Any) -> list[tuple[int, States]]:
    """Return the states of a metric and its nested metrics in compact form, for ``compute_over_ranks``."""
    return [
        (part.update_count, {name: _pack(state) for name, state in part.metric_state.items()})
        for part in _parts(metric)
    ]


def compute_over_ranks(name: str, metric: Any, ranks: Sequence[list[tuple[int, States]]] = ()) -> Tensor:
    """Return the value of a metric over the packed states of several ranks, or over its own state if none are given.

    The metric's own state is unchanged.

    Raises:
        MetricError: the value is not one number.
    """
    parts = _parts(metric)
    with _alone(parts):
        if len(ranks) > 1:
            for part, states in zip(parts, zip(*ranks, strict=True), strict=True):
                _put_together(part, states)
        with torch.no_grad():
            value = metric.compute()
    try:
        return torch.as_tensor(value).detach().float().cpu().reshape(())
    except (TypeError, ValueError, RuntimeError):
        shape = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is {a_type(value)}"
        raise MetricError(
            f"log({name!r}, ...) got {a_type(metric)} whose value {shape}; it must be one number: "
            "call compute() in the hook at the epoch's end, and log the parts of the result."
        ) from None


@contextmanager
def _alone(parts: list[Any]) -> Generator[None, None, None]:
    """Disable communication and caching of metrics within the context; on exit, restore their states."""
    kept = [(part.metric_state, part._update_count, part.distributed_available_fn) for part in parts]
    for part in parts:
        part.distributed_available_fn = _never
        part._computed = None
    try:
        yield
    finally:
        for part, (states, count, available) in zip(parts, kept, strict=True):
            _set(part, states, count)
            part.distributed_available_fn = available


def _never() -> bool:
    return False


def _set(part: Any, states: Mapping[str, Any], count: int) -> None:
    for name, state in states.items():
        setattr(part, name, state)
    part._update_count = count
    part._computed = None


def _put_together(part: Any, ranks: Sequence[tuple[int, States]]) -> None:
    """Set the states that a metric would have if it had processed the data of all ranks."""
    counts = [count for count, _ in ranks]
    # A state without any update may not be a neutral element of its reduction.
    filled = [states for count, states in ranks if count or not any(counts)]
    merged: States = {}
    for name, reduction in part._reductions.items():
        states = [_unpack(state[name], _device_of(part, state[name])) for state in filled]
        merged[name] = states[0] if len(states) == 1 else _reduced(reduction, states)
    _set(part, merged, sum(counts))


def _reduced(reduction: Callable[[Any], Any] | None, states: list[Any]) -> Any:
    if any(isinstance(state, list) for state in states):
        lists = [state if isinstance(state, list) else [state] for state in states]
        rows = chain.from_iterable(zip_longest(*lists, fillvalue=_NOTHING))
        merged = [item for item in rows if item is not _NOTHING]
        concatenates = getattr(reduction, "__name__", "") == "dim_zero_cat"
        return merged if reduction is None or concatenates else reduction(merged)
    stacked = torch.stack(states)
    return stacked if reduction is None else reduction(stacked)


def _device_of(part: Any, packed: Any) -> torch.device:
    return torch.device("cpu") if packed[0] == "list" and part.compute_on_cpu else part.device


def _pack(state: Any) -> tuple[Any, ...]:
    """Return a state as plain bytes: a pickled tensor takes several hundred of them."""
    kind, tensors = ("list", state) if isinstance(state, list) else ("tensor", [state])
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or len({tensor.dtype for tensor in tensors}) > 1:
        return "other", state
    if not tensors:
        return kind, None, [], b""
    # One transfer from the device for the entire list.
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return kind, str(flat.dtype).removeprefix("torch."), shapes, flat.view(torch.uint8).numpy().tobytes()


def _unpack(packed: tuple[Any, ...], device: torch.device) -> Any:
    if packed[0] == "other":
        return packed[1]
    kind, dtype, shapes, data = packed
    if not shapes:
        return []
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    flat = flat.view(getattr(torch, dtype)).to(device)
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    tensors = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return tensors if kind == "list" else tensors[0]


def _copied(states: Mapping[str, Any]) -> States:
    return {name: list(state) if isinstance(state, list) else state.clone() for name, state in states.items()}


@contextmanager
def metrics_set_aside(module: nn.Module) -> Generator[None, None, None]:
    """Discard the updates that the metrics of a module receive within this context."""
    parts = _parts(module)
    kept = [(part, part.metric_state, part._update_count, part._forward_cache) for part in parts]
    for part, states, count, _ in kept:
        _set(part, _copied(states), count)
    try:
        yield
    finally:
        for part, states, count, shown in kept:
            _set(part, states, count)
            part._forward_cache = shown


class _Gather:
    """Gathers a state of a metric over ranks, of which some have no batch. Its copy is None, for torchmetrics' own."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        # Of ranks that compute the same, such as those that split layers, one counts.
        with nullcontext() if self._world.counts_data else without_values(self._world):
            return parts_of_ranks(self._world, state)

    def __reduce__(self) -> Any:
        return type(None), ()


def gather_by(module: nn.Module, world: World) -> Callable[[], None]:
    """Let the metrics of a module that communicate themselves do so by ``world``; return a function that reverts it."""
    parts = [part for part in _parts(module) if part.dist_sync_fn is None and part.process_group is None]
    gather = _Gather(world)
    for part in parts if world.size > 1 else ():
        part.dist_sync_fn = gather

    def undo() -> None:
        for part in parts:
            if part.dist_sync_fn is gather:
                part.dist_sync_fn = None

    return undo


# ---- saving and loading -------------------------------------------------------------------------------------------


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Return the states of a module's metrics by name; metrics without updates are omitted.

    They include what wrappers of torchmetrics keep outside of states: the extremes of a ``MinMaxMetric``, and the
    metrics of each epoch of a ``MetricTracker``.
    """
    if "torchmetrics" not in sys.modules:
        return {}
    for part in module.modules():
        if is_collection(part):
            # Only the first of metrics that share their states is updated; this call passes the states to the others.
            list(part.values(copy_state=False))  # type: ignore[operator]
    states: dict[str, Any] = {}
    for name, part in module.named_modules():
        if is_metric(part) and (part.update_count or _kept(part)):
            states[name] = {"updates": part.update_count, "states": _copied(part.metric_state)}
            if kept := _copied(_kept(part)):
                states[name]["kept"] = kept
        elif _is_tracker(part):
            states[name] = {"metrics": len(part)}
    return states


def _is_tracker(part: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(part, torchmetrics.MetricTracker)


def _kept(part: Any) -> States:
    """Return the tensors that a wrapper of a metric keeps in plain attributes."""
    wrappers = sys.modules.get("torchmetrics.wrappers.abstract")
    if wrappers is None or not isinstance(part, wrappers.WrapperMetric):
        return {}
    known = {*part._defaults, "_computed", "_forward_cache"}
    return {name: value for name, value in vars(part).items() if isinstance(value, Tensor) and name not in known}


def load_metric_states(module: nn.Module, *saved: Mapping[str, Any]) -> None:
    """Restore states of ``metric_states`` from one rank, or merge those of several; reset other metrics."""
    trackers: list[tuple[str, Any]] = [item for item in module.named_modules() if _is_tracker(item[1])]
    for name, tracker in trackers:
        for _ in range(len(tracker), max((each[name]["metrics"] for each in saved if name in each), default=0)):
            tracker.increment()
    for name, part in module.named_modules():
        if not is_metric(part):
            continue
        found = [each[name] for each in saved if name in each]
        if not found:
            part.reset()
        elif len(found) == 1:
            states = {
                key: [item.to(part.device) for item in state] if isinstance(state, list) else state.to(part.device)
                for key, state in {**found[0]["states"], **found[0].get("kept", {})}.items()
            }
            _set(part, states, found[0]["updates"])
        else:
            packed = [({key: _pack(state) for key, state in each["states"].items()}, each["updates"]) for each in found]
            _put_together(part, [(updates, states) for states, updates in packed])
