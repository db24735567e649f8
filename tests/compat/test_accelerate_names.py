"""Each name, argument and field of Accelerate works, or one sentence says what to use instead."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from torch import nn

from phalanx.compat import accelerate as compat
from phalanx.compat.accelerate import Accelerator, utils
from phalanx.errors import ConfigurationError
from phalanx.strategies import DeepSpeedStrategy, FSDPStrategy

accelerate = pytest.importorskip("accelerate")
theirs_utils = importlib.import_module("accelerate.utils")


def public(module: Any) -> list[str]:
    return [n for n in sorted(vars(module)) if not n.startswith("_") and not inspect.ismodule(getattr(module, n))]


def create(kind: Any, **arguments: Any) -> Any:
    return kind(**arguments)


def sentence(owner: Any, name: str) -> str:
    """Return "works", or the sentence of a name that has no counterpart."""
    try:
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        return str(error)
    return "works"


@pytest.mark.parametrize(("theirs", "ours"), [(accelerate, compat), (theirs_utils, utils)])
def test_each_public_name_exists_or_its_import_says_what_to_use(theirs: Any, ours: Any) -> None:
    for name in public(theirs):
        if name == "is_rich_available" and theirs is accelerate:
            continue
        assert sentence(ours, name).startswith(("works", f"{ours.__name__} has no {name}: "))


def test_each_attribute_of_an_accelerator_exists_or_a_sentence_says_what_to_use() -> None:
    ours = Accelerator(cpu=True)
    of_instances = {"state", "gradient_state", "project_configuration", "dataloader_config", "trackers", "scaler"}
    for name in {name for name in dir(accelerate.Accelerator) if not name.startswith("_")} | of_instances:
        assert sentence(ours, name).startswith(("works", f"Accelerator has no {name}: "))
    with refuses(AttributeError, "is_main_proces.", "'is_main_process'"):
        _ = ours.is_main_proces


# The first argument, which programs give by position, and arguments whose names programs do not use.
FREE = {"self", "args", "kwargs", "load_kwargs", "load_model_func_kwargs", "save_model_func_kwargs", "tensor", "model"}


def test_the_methods_of_an_accelerator_take_the_same_arguments() -> None:
    for name in dir(accelerate.Accelerator):
        theirs, ours = getattr(accelerate.Accelerator, name), getattr(Accelerator, name, None)
        if name.startswith("_") or not inspect.isroutine(theirs) or ours is None:
            continue
        parameters = inspect.signature(ours).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        lacking = set(inspect.signature(theirs).parameters) - set(parameters) - FREE
        assert takes_any or not lacking, (name, lacking)


@pytest.mark.parametrize("name", sorted(inspect.signature(accelerate.Accelerator).parameters))
def test_each_argument_of_an_accelerator_is_taken_or_refused_with_a_sentence(name: str) -> None:
    if name not in inspect.signature(Accelerator).parameters:
        with refuses(ConfigurationError, f"{name}="):
            create(Accelerator, cpu=True, **{name: object()})


@pytest.mark.parametrize(
    "name",
    [
        *("DataLoaderConfiguration", "ProjectConfiguration", "GradientAccumulationPlugin", "AutocastKwargs"),
        *("DistributedDataParallelKwargs", "GradScalerKwargs", "ProfileKwargs"),
        *("FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "TorchDynamoPlugin"),
    ],
)
def test_each_field_of_a_configuration_is_taken_or_refused(name: str) -> None:
    ours = getattr(utils, name)
    for field in dataclasses.fields(getattr(theirs_utils, name)):
        if field.name not in inspect.signature(ours).parameters:
            with refuses(ConfigurationError, name, field.name):
                ours(**{field.name: object()})


def test_options_without_effect_are_refused() -> None:
    with refuses(ConfigurationError, "sync_each_batch=True", "GradientAccumulationPlugin"):
        create(utils.GradientAccumulationPlugin, num_steps=2, sync_each_batch=True)
    with refuses(ConfigurationError, "sync_with_dataloader=False", "GradientAccumulationPlugin"):
        utils.GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    with refuses(ConfigurationError, "set_seed"):
        create(utils.DataLoaderConfiguration, data_seed=3)
    with refuses(ConfigurationError, "slice_fn_for_dispatch"):
        Accelerator(cpu=True).prepare_data_loader([], slice_fn_for_dispatch=len)


def test_plugins_describe_strategies() -> None:
    plugin = utils.FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP", transformer_cls_names_to_wrap=["Linear"], cpu_offload=True
    )
    fsdp: Any = plugin.strategy
    assert type(fsdp) is FSDPStrategy
    is_unit: Any = fsdp.units
    assert (fsdp.reshard_after_forward, fsdp.cpu_offload) == (False, True)
    assert [is_unit(nn.Linear(1, 1)), is_unit(nn.Tanh())] == [True, False]
    sized: Any = utils.FullyShardedDataParallelPlugin(min_num_params=100).strategy
    assert sized.units == 100
    zero = utils.DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", offload_param_device="cpu").strategy
    assert isinstance(zero, DeepSpeedStrategy)
    assert zero.name == "zero3-offload"
    configured = utils.DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}).strategy
    assert configured.name == "zero1"


def test_the_dynamo_plugin_describes_what_is_compiled() -> None:
    plugin = utils.TorchDynamoPlugin(backend="AOT_EAGER", dynamic=True, use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    found = accelerator.fabric.compilation
    assert found is not None
    assert found.given == {"backend": "aot_eager", "blocks": True, "dynamic": True}
    assert Accelerator(cpu=True, dynamo_backend="no").fabric.compilation is None
    whole = Accelerator(cpu=True, dynamo_backend=utils.DynamoBackend.EAGER)
    model = whole.prepare(nn.Linear(2, 1))
    assert "forward" in vars(model)
    assert model(torch.ones(1, 2)).shape == (1, 1)
    with refuses(ConfigurationError, "dynamo_backend", "dynamo_plugin"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=plugin)


def test_helpers_return_what_those_of_accelerate_do(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = {"a": torch.ones(2, 3, dtype=torch.float16), "b": [torch.zeros(2)], "c": "text"}
    for name, arguments in (
        ("find_batch_size", (nested,)),
        ("listify", ({"a": torch.ones(2)},)),
        ("concatenate", ([{"a": torch.ones(1, 2)}, {"a": torch.zeros(2, 2)}],)),
        ("is_torch_version", (">=", "2.0")),
        ("compare_versions", ("torch", "<", "2.0")),
        ("str_to_bool", ("Yes",)),
        ("is_torch_tensor", (torch.ones(1),)),
        ("is_tensorboard_available", ()),
        ("is_npu_available", ()),
        ("is_bf16_available", ()),
        ("gather", (torch.arange(3),)),
        ("gather_object", ([1, 2],)),
        ("broadcast_object_list", ([1, 2],)),
        ("send_to_device", (torch.ones(2), "cpu")),
    ):
        ours, theirs = getattr(utils, name)(*arguments), getattr(theirs_utils, name)(*arguments)
        assert str(ours) == str(theirs), name
    assert utils.is_wandb_available() == bool(theirs_utils.is_wandb_available())
    assert utils.convert_to_fp32(nested)["a"].dtype == torch.float32
    model = Accelerator(cpu=True).prepare(nn.Linear(1, 1))
    assert type(utils.extract_model_from_parallel(model)) is nn.Linear
    # Otherwise tqdm starts a thread.
    monkeypatch.setattr(importlib.import_module("tqdm").tqdm, "monitor_interval", 0)
    assert list(utils.tqdm(range(3), disable=True)) == [0, 1, 2]


def exchanged() -> Any:
    state = compat.PartialState(cpu=True)
    rank = state.process_index
    mine = torch.full((rank + 1,), float(rank))
    shown = state.on_local_process(lambda: "shown", local_process_index=1)()
    padded = utils.pad_across_processes(mine).tolist()
    reduced = utils.reduce(torch.tensor(float(rank)), "sum").item()
    utils.wait_for_everyone()
    return (
        utils.gather(mine).tolist(),
        utils.gather_object([rank]),
        utils.broadcast(torch.tensor(float(rank)), 1).item(),
        (padded, reduced, shown, state.distributed_type.value),
    )


def test_functions_exchange_between_ranks() -> None:
    first, second = run_on_ranks(2, exchanged)
    assert first[:3] == second[:3] == ([0.0, 1.0, 1.0], [0, 1], 1.0)
    assert (first[3], second[3]) == (([0.0, 0.0], 1.0, None, "MULTI_CPU"), ([1.0, 1.0], 1.0, "shown", "MULTI_CPU"))


def test_a_hook_may_save_and_load_a_model_itself(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True)
    own, other = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
    calls: list[Any] = []

    def before_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        calls.append((len(models), sorted(weights[0]), output_dir))
        weights.pop()

    def before_load(models: list[Any], input_dir: str) -> None:
        calls.append((len(models), input_dir))
        models.pop()

    saving = accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)
    path = str(tmp_path / "state")
    accelerator.save_state(path)
    values = [own.weight.item(), 0.0]
    with torch.no_grad():
        own.weight.zero_()
        other.weight.zero_()
    accelerator.load_state(path)
    assert [own.weight.item(), other.weight.item()] == values
    assert calls == [(2, ["bias", "weight"], path), (2, path)]
    saving.remove()
    accelerator.save_state(path)
    assert len(calls) == 2


def sharded_weights(strategy: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, devices=2, strategy=strategy)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(4, 4))
    held = accelerator.get_state_dict(model)
    return {name: (tuple(value.shape), value.abs().sum().item()) for name, value in held.items()}


def test_a_full_state_dict_under_every_strategy() -> None:
    torch.manual_seed(0)
    expected = {n: (tuple(p.shape), p.abs().sum().item()) for n, p in nn.Linear(4, 4).named_parameters()}
    assert run_on_ranks(2, sharded_weights, "ddp") == [expected, expected]
    assert run_on_ranks(2, sharded_weights, "fsdp") == [expected, {}]


def reduced_late() -> list[float]:
    accelerator = Accelerator(cpu=True, devices=2)
    net = nn.Linear(1, 1, bias=False)
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    seen = []
    with accelerator.no_sync(model):
        loss = model(torch.full((1, 1), float(accelerator.process_index))).sum()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
        seen.append(float(net.weight.grad))  # type: ignore[arg-type]
        accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
        seen.append(float(net.weight.grad))  # type: ignore[arg-type]
    return seen


def test_gradients_are_reduced_where_it_is_triggered() -> None:
    assert run_on_ranks(2, reduced_late) == [[0.5, 0.5], [0.5, 1.5]]


def test_traces_of_the_profiler_have_accelerates_names(tmp_path: Path) -> None:
    settings = utils.ProfileKwargs(output_trace_dir=str(tmp_path / "traces"))
    with Accelerator(cpu=True, kwargs_handlers=[settings]).profile() as profiler:
        torch.ones(2).sum()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["profile_0.json"]
    assert any(event.key == "aten::sum" for event in profiler.key_averages())
