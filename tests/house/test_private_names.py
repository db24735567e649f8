"""Private names of torch: each is listed here with its users, so that a new one is a decision."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from test_layers import package_sources
from test_style import imported

# Names that modules of torch keep private, by the modules of phalanx that use them.
OF_MODULES = {
    "torch._C._distributed_c10d": ["framework.core.torch_groups"],
    "torch._amp_foreach_non_finite_check_and_unscale_": ["framework.checkpoint.finite_check"],
    "torch._lazy_clone": ["framework.parallel.deferred"],
    "torch._subclasses": ["framework.core.torch_internals"],
    "torch.autograd.Variable._execution_engine": ["framework.loop.manual_optimizer"],
    "torch.autograd.graph._engine_run_backward": ["strategies.context.attention"],
    "torch.distributed._composable_state": ["strategies.fsdp.torch_fsdp"],
    "torch.distributed.tensor.experimental._context_parallel": ["strategies.context.attention"],
    "torch.utils._python_dispatch": ["framework.core.torch_internals"],
    "torch.utils._pytree": ["framework.core.torch_internals"],
}
# Attributes of torch's objects, each used in one module.
OF_OBJECTS = {
    "_cdata",
    "_compiled_call_impl",
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_get_fsdp_state",
    "_init_mp_dtypes",
    "_lazy_init",
    "_local_tensor",
    "_module_info",
    "_post_forward",
    "_pre_backward",
    "_pre_forward",
    "_root_post_backward_final_callback",
    "_sharded_local_tensor",
    "_to_sharded",
    "_training_state",
    "_unsharded_param",
}
# torch's documentation describes these: foreach functions, operators by their names in ATen, tables of modules, and the
# context in which tensor subclasses are not asked ("Extending PyTorch").
_DOCUMENTED = ("torch._foreach_", "torch.ops.", "torch.nn.Module().", "torch._C.DisableTorchFunctionSubclass")


def private_names(source: str) -> set[str]:
    """Return the private names of modules of torch that a source imports or reads.

    A name ends with its first private part, in ``torch._C`` with the next one.
    """
    tree = ast.parse(source)
    aliases = dict(imported(tree))
    return set(filter(None, map(_private, _names(tree, aliases))))


def _names(tree: ast.AST, aliases: Mapping[str, str]) -> Iterator[str]:
    yield from aliases.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
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


def private_attributes(source: str) -> set[str]:
    """Return the private attributes of torch's objects that a source uses."""
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)} & OF_OBJECTS


def test_private_names_of_torch_are_listed() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module, source in sorted(package_sources().items()):
        for name in private_names(source) - {"torch._C"}:
            found[name].append(module)
    assert found == OF_MODULES


def test_private_attributes_of_torch_are_used_in_one_module_each() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for module, source in package_sources().items():
        for name in private_attributes(source):
            users[name].add(module)
    assert not {name: modules for name, modules in users.items() if len(modules) > 1}


def test_planted_private_names_are_found() -> None:
    assert private_names("from torch._a import b") == {"torch._a"}
    assert private_names("from torch.a import _b as c") == {"torch.a._b"}
    assert private_names("import torch\ntorch.a._b.c()") == {"torch.a._b"}
    assert private_names("from torch import a as b\nb._c") == {"torch.a._c"}
    assert not private_names("import torch\ntorch._foreach_add_(a)\ntorch.a.b\nself._torch\ntorch.__version__")
    assert private_attributes("record._unsharded_param.grad") == {"_unsharded_param"}
