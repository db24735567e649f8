"""Private names of torch: each is listed here with its users, so that a new one is a decision."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from test_layers import package_sources, parsed
from test_style import imported

# Names that modules of torch keep private, by the modules of phalanx that use them.
OF_MODULES = {
    "torch._amp_foreach_non_finite_check_and_unscale_": ["framework.checkpoint.finite_check"],
    "torch._C._distributed_c10d": ["framework.core.torch_groups"],
    "torch._subclasses": ["framework.core.torch_internals"],
    "torch.autograd.Variable._execution_engine": ["framework.loop.manual_optimizer"],
    "torch.autograd.graph._engine_run_backward": ["strategies.context.attention"],
    "torch.distributed._composable_state": ["strategies.fsdp.torch_fsdp"],
    "torch.distributed.tensor.experimental._context_parallel": ["strategies.context.attention"],
    "torch.utils._python_dispatch": ["framework.core.torch_internals"],
    "torch.utils._pytree": ["framework.core.torch_internals"],
}
# Private attributes of objects of torch, by the module that uses them. For none there is a public way to the same.
OF_OBJECTS = {
    # Whether a tensor or a module has hooks.
    "_backward_hooks": "strategies.pipeline.other_stages",
    "_backward_pre_hooks": "strategies.pipeline.other_stages",
    "_post_accumulate_grad_hooks": "strategies.pipeline.other_stages",
    "_load_state_dict_post_hooks": "framework.state.module_loading",
    "_load_state_dict_pre_hooks": "framework.state.module_loading",
    # The hooks that `parallelize_module` adds, which it does not return.
    "_forward_hooks": "strategies.fsdp.tensor_parallel",
    "_forward_pre_hooks": "strategies.fsdp.tensor_parallel",
    # The hooks around the step of an optimizer that an engine replaces, and their order.
    "_optimizer_step_post_hooks": "strategies.deepspeed.optimizer strategies.fsdp.strategy",
    "_optimizer_step_pre_hooks": "strategies.deepspeed.optimizer",
    # The tables of process groups, which a process cannot leave for a while.
    "_default_pg_init_method": "framework.core.torch_groups",
    "_group_count": "framework.core.torch_groups",
    "_pg_names": "framework.core.torch_groups",
    "_register_process_group": "framework.core.torch_groups",
    "_set_global_rank": "framework.core.torch_groups",
    "_unregister_all_process_groups": "framework.core.torch_groups",
    "_World": "framework.core.torch_groups",
    # The ring of attention: its public function cuts the tensors of a batch itself.
    "_cp_options": "strategies.context.attention",
    "_enable_cp_dtensor_dispatcher": "strategies.context.attention",
    # FSDP's records of its parameters, and the modules that it refuses to shard again.
    "_fsdp_param_group": "framework.core.torch_versions",
    "_fsdp_param_groups": "framework.core.torch_versions",
    "_module_state_mapping": "strategies.fsdp.torch_fsdp",
    # Set-up of FSDP, which would run in the first forward pass.
    "_lazy_init": "strategies.fsdp.torch_fsdp",
    # Hooks of FSDP, which run for calls through the outermost module only, and the part of a pass in which it is.
    "_post_forward": "strategies.fsdp.outside_calls",
    "_pre_backward": "strategies.fsdp.model",
    "_pre_forward": "strategies.fsdp.outside_calls",
    "_root_post_backward_final_callback": "strategies.pipeline.shards",
    "_training_state": "strategies.fsdp.outside_calls",
    # The place where FSDP frees gathered parameters, also in its own hooks of `state_dict`.
    "_to_sharded": "strategies.fsdp.in_place_changes",
    # `to_local` returns a view of a parameter's shard, through which no memory can be assigned to it.
    "_local_tensor": "strategies.fsdp.local_shards",
    # The order of DDP's buckets, for which it has no argument.
    "_push_all_rebuilt_params": "strategies.ddp",
    # The helper of PowerSGD that does not take a single matrix in some versions.
    "_orthogonalize": "strategies.ddp",
    # What `Module.compile` has made.
    "_compiled_call_impl": "framework.parallel.compilation",
    # Whether a tensor is a view.
    "_is_view": "strategies.deepspeed.sharded",
    # The buffers that a state dict leaves out.
    "_non_persistent_buffers_set": "framework.resume.step_record",
    # The mark by which schedulers know that their optimizer has stepped.
    "_opt_called": "strategies.deepspeed.strategy",
    # The nodes that are in a rendezvous.
    "_state_holder": "framework.launch.node_rendezvous",
    # The cache of layouts by mesh, in which groups of an earlier rehearsal remain.
    "_clear_sharding_prop_cache": "framework.rehearsal.absent_ranks",
}
OF_DEEPSPEED = {
    "_PartitionedParameterCoordinator__params_to_release": "strategies.deepspeed.engine",
    "_broadcast_model": "strategies.deepspeed.engine",
}
# Private attributes of objects of Python, and of other libraries.
OF_OTHERS = {
    "_DummyThread": "framework.diagnostics.collective_trace",
    "_SubParsersAction": "cli.command_parser cli.completion",
    "_choices_actions": "cli.command_parser",
    "_defaults": "framework.metrics.torchmetrics_state",
    "_ex_iterable": "framework.data.stateful_loader",
    "_forward_cache": "framework.metrics.metric_log framework.metrics.torchmetrics_state",
    "_from_config": "framework.huggingface.adapter_export",
    "_get_file_writer": "loggers.tensorboard",
    "_keys_to_ignore_on_load_missing": "framework.pretrained.transformers_models",
    "_keys_to_ignore_on_load_unexpected": "framework.pretrained.transformers_models",
    "_keys_to_ignore_on_save": "framework.pretrained.saving",
    "_original_object_hash": "framework.huggingface.model_config",
    "_reductions": "framework.metrics.torchmetrics_state",
    "_run_exitfuncs": "framework.launch.exit_hooks",
    "_subcommands_action": "framework.configuration.refusals",
    "_tp_plan": "framework.parallel.tensor_plan",
    "_trial_id": "cli.sweep_study",
    "_update_count": "framework.metrics.torchmetrics_state",
}
# The documentation of Python and of torch describes these.
_PUBLIC = {"_fields", "_getframe", "_is_in_bad_fork", "_metadata"}
# torch's documentation describes these: foreach functions, operators by their names in ATen, tables of modules, and the
# context in which tensor subclasses are not asked ("Extending PyTorch").
_DOCUMENTED = ("torch._foreach_", "torch.ops.", "torch.nn.Module().", "torch._C.DisableTorchFunctionSubclass")


_OPERATORS = ("_foreach_", "_scaled_", "_grouped_mm", "_local_scalar_dense")
_BY_STRING = ("getattr", "hasattr", "setattr", "delattr", "patch")


def private_names(source: str) -> set[str]:
    """Return the private names of modules of torch that a source imports or reads.

    A name ends with its first private part, in ``torch._C`` with the next one.
    """
    tree = parsed(source)
    aliases = dict(imported(tree))
    return set(filter(None, map(_private, _names(tree, aliases))))


def _names(tree: ast.AST, aliases: Mapping[str, str]) -> Iterator[str]:
    yield from aliases.values()
    for node in ast.walk(tree):
        # A dotted name is reported up to its first private part, and under `torch._C` up to the part after it.
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        is_of_c = isinstance(owner, ast.Attribute) and owner.attr == "_C"
        if node.attr.startswith("_") or isinstance(owner, ast.Name) or is_of_c:
            head, _, rest = ast.unparse(node).partition(".")
            yield f"{aliases.get(head, head)}.{rest}"


def _private(name: str) -> str:
    parts = name.split(".")
    if parts[0] != "torch" or name.startswith(_DOCUMENTED):
        return ""
    private = [number for number, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
    if not private:
        return ""
    return ".".join(parts[: private[0] + (2 if parts[1] == "_C" else 1)])


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines, attributes of its objects included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def used_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes that a module reads or sets, also those that it names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_STRING:
            yield from (each.value for each in node.args if isinstance(each, ast.Constant) and type(each.value) is str)


def foreign_attributes(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the private attributes that no source defines, each with its users."""
    trees = {module: parsed(source) for module, source in sorted(sources.items())}
    known = {name for tree in trees.values() for name in own_names(tree)}
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for name in sorted(set(used_attributes(tree)) - known - _PUBLIC):
            if name.startswith("_") and not name.startswith("__") and name.isidentifier():
                found[name].append(module)
    return {name: " ".join(modules) for name, modules in found.items()}


def test_private_names_of_torch_are_listed() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module, source in sorted(package_sources().items()):
        for name in private_names(source) - {"torch._C"}:
            found[name].append(module)
    assert found == OF_MODULES


def test_private_attributes_are_listed() -> None:
    # Those of modules are listed above, with the names of the modules.
    of_modules = {part for name in OF_MODULES for part in name.split(".")}
    of_modules |= {name.rpartition(".")[2] for name in _DOCUMENTED}
    found = {
        name: users
        for name, users in foreign_attributes(package_sources()).items()
        if name not in of_modules and name != "_C" and not name.startswith(_OPERATORS)
    }
    assert found == OF_OBJECTS | OF_DEEPSPEED | OF_OTHERS


def test_planted_private_names_are_found() -> None:
    assert private_names("from torch._a import b") == {"torch._a"}
    assert private_names("from torch.a import _b as c") == {"torch.a._b"}
    assert private_names("import torch\ntorch.a._b.c()") == {"torch.a._b"}
    assert private_names("from torch import a as b\nb._c") == {"torch.a._c"}
    assert not private_names("import torch\ntorch._foreach_add_(a)\ntorch.a.b\nself._torch\ntorch.__version__")
    sources = {"a": "record._unsharded.grad\nself._own = 1\nother._own", "b": "getattr(each, '_x')"}
    assert foreign_attributes(sources) == {"_unsharded": "a", "_x": "b"}
