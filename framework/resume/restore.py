"""Restoring a run from a checkpoint: weights, optimizers, schedulers, scaler and callbacks.

First every rank compares the checkpoint with the live objects, and all ranks agree on the result. Only then is
anything loaded: a mismatch on one rank would otherwise leave the ranks with different weights. ``assemble_fit`` lists
the steps of a resumed fit in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.codec import decode
from ..checkpoint.reader import Checkpoint
from ..core.errors import CheckpointError
from ..core.optimizer_config import parameters_of
from ..core.position_rng import mix_seed
from ..core.split_optimizer import kind_of
from ..data.accumulation_window import Windows
from ..distributed.collective_errors import on_all_ranks
from ..distributed.seed import seed_rank
from ..parallel.parameter_names import canonical_names, names_of, renamed
from ..run.run import Run
from ..state.frozen_base import check_base
from ..state.module_loading import loads_itself
from ..state.module_state import check_model, put_extra_state, put_model, saved_extra_state, shapes_of, stored_of
from ..state.optimizer_state import load_optimizer
from ..state.state_matching import (
    ModelMatch,
    OptimizerMatch,
    SavedModel,
    group_names,
    listed,
    match_model,
    match_optimizer,
    match_schedulers,
    refuse,
)
from ..state.user_entries import UserEntries

_ADVICE = "Resume with what it was saved with, or set strict_loading = False in the module to load what matches."


@dataclass
class Resumption:
    """The parts of a checkpoint that a run restores, determined before anything changes."""

    checkpoint: Checkpoint
    model: ModelMatch
    state: dict[str, Any]
    optimizers: dict[int, OptimizerMatch] = field(default_factory=dict)
    added_groups: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Parameter groups that were added to an optimizer after its start, as the checkpoint describes them."""
    num_schedulers: int = 0
    """The number of schedulers to restore: all of them, or 0 if they do not match."""
    not_loaded: list[str] = field(default_factory=list)
    """A sentence for each mismatch that ``strict_loading = False`` allows."""


def agree_on_resumption(run: Run, checkpoint: Checkpoint) -> Resumption:
    """Compare a checkpoint with a run's module, optimizers and schedulers without changing them. Collective.

    Raises:
        CheckpointError: on all ranks; the checkpoint holds only weights, or does not match. The message lists every
            mismatch. If the module's ``strict_loading`` is False, mismatches are only reported.
    """
    return on_all_ranks(run.world, lambda: _compared(run, checkpoint))


def _compared(run: Run, checkpoint: Checkpoint) -> Resumption:
    module, document = run.module, checkpoint.document
    if document.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint.path} holds only weights, so no training can be resumed from it. "
            "Start from its weights with load_from_checkpoint, or give a full checkpoint."
        )
    renames = module.checkpoint_renames
    match = match_model(module, shapes_of(run.strategy, module), SavedModel.of(checkpoint, renames))
    # Read and checked now, so that damage is found before anything changes.
    state = decode(document["state"], checkpoint.read_section("state"))
    plan = Resumption(checkpoint, match, state)
    problems = [*match.problems, *_match_optimizers(run, document["optimizers"], renames, plan)]
    kinds = document.get("schedulers", [""] * len(state["schedulers"]))
    different = match_schedulers([config.scheduler for config in run.schedulers], kinds)
    plan.num_schedulers = 0 if different else len(run.schedulers)
    problems += different
    if module.strict_loading:
        refuse(checkpoint.path, type(module).__name__, problems, _ADVICE)
    plan.not_loaded = problems
    return plan


def _match_optimizers(run: Run, saved: list[dict[str, Any]], renames: Mapping[str, str], plan: Resumption) -> list[str]:
    """Match each optimizer with the saved one at the same index; return the mismatches."""
    names, problems = names_of(run.module), list[str]()
    if len(saved) != len(run.optimizers):
        held = ", ".join(described["class"] for described in saved) or "none"
        given = ", ".join(map(kind_of, run.optimizers)) or "none"
        problems.append(f"optimizers: {held} in the checkpoint, {given} here")
    for index, (optimizer, described) in enumerate(zip(run.optimizers, saved, strict=False)):
        own = group_names(optimizer, names)
        free = set(names.values()) - {name for group in own for name in group}
        joined = _joined_groups(own, described, free, renames)
        plan.added_groups += [(index, group) for group in joined]
        own += [group["params"] for group in joined]
        match = match_optimizer(f"optimizer {index}", kind_of(optimizer), own, described, renames, plan.model.misshapen)
        plan.optimizers[index] = match
        problems += match.problems
    return problems


def _joined_groups(
    own: list[list[str]], described: Mapping[str, Any], free: set[str], renames: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the saved groups that were added to an optimizer later and whose parameters can be added here.

    The groups refer to parameters by their names in this module.
    """
    saved = (name for group in described["groups"] for name in group["params"])
    here = {old: new for new, old in renamed(saved, renames).items()}
    groups = [{**group, "params": [here[name] for name in group["params"]]} for group in described["groups"]]
    first, later = groups[: len(own)], groups[len(own) :]
    same = [sorted(group["params"]) for group in first] == [sorted(names) for names in own]
    return later if same and all(name in free for group in later for name in group["params"]) else []


# ---- before the strategy takes over ------------------------------------------------------------------------------


def restore_groups_and_freezing(run: Run, plan: Resumption) -> None:
    """Add the parameter groups that the saved run had added, and freeze and unfreeze parameters as in the checkpoint.

    Not collective: the plan is the same on all ranks. It must precede ``Strategy.setup``, which fixes the parameters of
    the optimizers and the trainable ones.
    """
    canonical = canonical_names(run.module)
    parameters = {canonical(name): parameter for name, parameter in run.module.named_parameters()}
    for index, group in plan.added_groups:
        members = [parameters[name] for name in group["params"]]
        for parameter in members:
            parameter.requires_grad_(True)
        run.optimizers[index].add_param_group({**decode(group["hyper"]), "params": members})
    changed = [
        f"{name} is {'trained' if trains else 'frozen'}"
        for index, match in plan.optimizers.items()
        for name, trains in _apply_frozen_flags(run, index, plan.checkpoint.document["optimizers"][index], match)
    ]
    if changed:
        run.note(f"As when {plan.checkpoint.path.name} was saved: {listed(changed)}")


def _apply_frozen_flags(
    run: Run, index: int, described: Mapping[str, Any], match: OptimizerMatch
) -> Iterator[tuple[str, bool]]:
    """Freeze and unfreeze parameters of an optimizer.

    Yields:
        The saved name of each parameter that was changed, and whether it is trained now.
    """
    frozen = {name for group in described["groups"] for name in group.get("frozen", ())}
    # Checkpoints of other frameworks do not record which parameters were frozen.
    recorded = {name for group in described["groups"] if "frozen" in group for name in group["params"]}
    parameters = parameters_of(run.optimizers[index])
    for position, name in match.parameters.items():
        trains = name not in frozen
        if name in recorded and parameters[position].requires_grad is not trains:
            parameters[position].requires_grad_(trains)
            yield name, trains


# ---- after the strategy has taken over ---------------------------------------------------------------------------


def restore_run(run: Run, plan: Resumption) -> None:
    """Restore weights, optimizers, schedulers, scaler and callbacks, then call ``on_load_checkpoint``.

    Collective. The state of each rank follows: see ``restore_rank``.

    Raises:
        CheckpointError: on all ranks; the checkpoint leaves out weights of another base than the module's.
    """
    checkpoint, strategy, state = plan.checkpoint, run.strategy, plan.state
    check_base(strategy, run.module, run.world, checkpoint, plan.model)
    # Weights first: under strategies with fp32 master copies this also writes the masters.
    put_model(strategy, run.module, stored_of(checkpoint, plan.model))
    run.module.use_sources(checkpoint.document.get("pretrained", ()))
    not_loaded = [*plan.not_loaded, *put_extra_state(run.module, state.get("extra", {}), run.module.checkpoint_renames)]
    for index, match in plan.optimizers.items():
        described = checkpoint.document["optimizers"][index]
        load_optimizer(strategy, run.optimizers[index], described, match, checkpoint, index)
    run.averages.load(checkpoint, plan.model.tensors, run.note)
    for config, scheduler_state in zip(run.schedulers[: plan.num_schedulers], state["schedulers"], strict=False):
        config.scheduler.load_state_dict(scheduler_state)
    if run.scaler is not None and state["scaler"] is not None:
        run.scaler.load_state_dict(state["scaler"])
    for callback in run.callbacks:
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
    unclaimed = set(state["callbacks"]) - {callback.state_key for callback in run.callbacks}
    forgotten = sorted(key for key in unclaimed if state["callbacks"][key])
    if forgotten:
        run.note(
            f"{checkpoint.path} holds the state of callbacks that this run does not have, or has with other arguments; "
            f"it is not loaded: {listed(forgotten)}"
        )
    run.metrics.values["callback"].update(state["metrics"])
    run.metrics.restore_measured(state.get("measured", {}))
    for kind, values in state.get("shown", {}).items():
        run.metrics.values[kind].update(values)
    # The user's hook runs after everything that it may read or change was restored; ``assemble_fit`` has restored
    # the counters before. Restored after it are the loggers, the metrics of the epoch, the state of loaders and the
    # generators.
    run.call("on_load_checkpoint", UserEntries("on_load_checkpoint", state["user"]))
    _report_not_loaded(run, checkpoint, not_loaded)


def load_model(run: Run, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights into a module for evaluation. Collective.

    Raises:
        CheckpointError: on all ranks; the weights do not match the module, or the checkpoint leaves out weights of
            another base. The module is unchanged.
    """
    module, strategy = run.module, run.strategy

    def compared() -> ModelMatch:
        own, strict = shapes_of(strategy, module), module.strict_loading
        return check_model(module, own, checkpoint, strict, module.checkpoint_renames, _ADVICE)

    # A mismatch on any rank raises on all of them, before the collective load begins.
    match = on_all_ranks(run.world, compared)
    check_base(strategy, module, run.world, checkpoint, match)
    put_model(strategy, module, stored_of(checkpoint, match))
    run.averages.load_into_module(checkpoint, match.tensors, run.note)
    extra = put_extra_state(module, saved_extra_state(checkpoint), module.checkpoint_renames)
    _report_not_loaded(run, checkpoint, [*match.problems, *extra])


def _report_not_loaded(run: Run, checkpoint: Checkpoint, not_loaded: list[str]) -> None:
    if loads_itself(run.module):
        run.note(
            f"{type(run.module).__name__}.load_state_dict was not called: the ranks load weights by their names, each "
            "its own part. Rename them with checkpoint_renames, and do the rest in on_load_checkpoint."
        )
    if not_loaded:
        why = "" if run.module.strict_loading else ", as strict_loading is False"
        run.note(f"Not loaded from {checkpoint.path}{why}: {listed(not_loaded)}")


# ---- the state of each rank ------------------------------------------------------------------------------------------


def restore_rank(run: Run, checkpoint: Checkpoint, windows: Windows) -> None:
    """Restore the metrics that ranks had accumulated, and hold the states of loaders and of random generators.

    With the same number of ranks each rank restores its own state. With another number the metric states of all ranks
    are distributed over the new ranks such that their sums stay the same; generators are seeded from the position of
    the run.

    ``Windows.begin`` opens the loaders with their states. After the hooks that the epoch repeats,
    ``run.repeated.restore_generators`` sets the generators: to those of the checkpoint, or to those seeded here if the
    data is distributed over another number of ranks.
    """
    world = run.world
    # A checkpoint converted from another library has no rank states.
    saved = [document for document in checkpoint.rank_documents if document is not None]
    num_data_ranks = checkpoint.document.get("data_ranks", len(saved))
    # Ranks that read the same batches, such as those of a tensor-parallel group, are neighbours.
    ranks_per_data_rank = max(1, len(saved) // (num_data_ranks or 1))
    # Ranks that read the same batches, and compute parts of them, still have metrics of their own.
    saved_groups = _first_of_groups(saved, checkpoint.document.get("identical_ranks", ranks_per_data_rank))
    group, num_groups = world.identical_group, world.size // world.identical
    inherited: list[dict[str, Any]] = [decode(document) for document in saved_groups[group::num_groups]]
    if inherited:
        run.train_log.load_state_dicts([state["log"] for state in inherited])
        run.evaluated_batches.update(inherited[0].get("evaluated", {}))
    if saved and num_data_ranks == world.data_size and len(saved_groups) == num_groups:
        windows.source.restore([inherited[0].get("data")], own=True)
        run.repeated.hold_generators(inherited[0]["random"])
        return
    loader_states = [decode(document.get("data")) for document in saved[::ranks_per_data_rank]]
    windows.source.restore(loader_states, own=False)
    seed_rank(mix_seed(run.seed, run.progress.steps_reached, group), world.device)
    run.repeated.hold_generators(None)


def _first_of_groups(documents: list[dict[str, Any]], identical: int) -> list[dict[str, Any]]:
    """Return the state of the first rank of each group of ranks that compute the same, in the order of groups.

    Args:
        documents: the states of all ranks.
        identical: the number of ranks next to one another in a group, if the states do not have their group.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank, document in enumerate(documents):
        found.setdefault(document.get("group", rank // identical), document)
    return [found[group] for group in sorted(found)]
