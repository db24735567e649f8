"""Arguments of the DeepSpeed strategies and the user's JSON: refusals, and the resulting config of the engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from messages import refuses

from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.core.registry import STRATEGIES
from phalanx.strategies.deepspeed.arguments import check_swap_folder, resolve_options
from phalanx.strategies.deepspeed.config import check_precision, check_settings, engine_config

FP32 = resolve_precision("32-true")
MILLION = 1_000_000

# The example in Hugging Face's documentation of DeepSpeed, with "auto" throughout.
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def refusal(error: type[ConfigurationError] = ConfigurationError, **arguments: Any) -> str:
    """Return the error message for some arguments, which has to be one paragraph that ends like a sentence."""
    with refuses(error) as raised:
        check_swap_folder(resolve_options(**arguments))
    text = str(raised.value)
    assert "\n" not in text
    assert text[-1] in ".)?"
    return text


def zero_of(elements: int = 20 * MILLION, **arguments: Any) -> dict[str, Any]:
    """Return the ZeRO block of the engine's config for two ranks."""
    block: dict[str, Any] = engine_config(resolve_options(**arguments), FP32, 2, elements)["zero_optimization"]
    return block


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage": 4}, "stage=4"),
        ({"stage": 0}, "strategy='ddp'"),
        ({"stage": True}, "stage=True"),
        ({"stage": 2, "offload_parameters": True}, "offload_parameters='cpu'"),
        ({"offload_parameters": "cpu"}, "stage=2"),
        ({"stage": 1, "offload_optimizer": "nvme", "nvme_path": "/tmp"}, "offload_optimizer='nvme'"),
        ({"stage": 3, "offload_optimizer": "nvme"}, "nvme_path='/path"),
        ({"stage": 3, "offload_parameters": "nvme"}, "DeepSpeedStrategy(stage=3"),
        ({"stage": 3, "offload_optimizer": "nvme", "nvme_path": "/proc/swap"}, "/proc/swap"),
        ({"stage": 3, "offload_optimizer": "nvme", "nvme_path": 3}, "nvme_path=3"),
        ({"config": 3}, "config=3"),
        ({"thread_count": 2}, "intra_op_parallelism="),
        ({"loss_scale": 0}, "precision='16-mixed'"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence(arguments: dict[str, Any], words: str) -> None:
    assert words in refusal(**arguments)


@pytest.mark.parametrize(
    ("arguments", "closest"),
    [
        ({"offload_optimzer": True}, "offload_optimizer"),
        ({"offload_optimizer": "cpuu"}, "cpu"),
        ({"gather_weights": "rankzero"}, "rank_zero"),
        ({"grad_accum_dtype": "fp33"}, "fp32"),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest_known_one(arguments: dict[str, Any], closest: str) -> None:
    assert repr(closest) in refusal(ConfigurationError, **arguments)


def test_an_unwritable_nvme_path_is_detected_by_writing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "swap" in refusal(stage=3, offload_optimizer="nvme", nvme_path=tmp_path / "file" / "swap")
    options = resolve_options(stage=3, offload_optimizer="nvme", nvme_path=tmp_path / "made" / "later")
    assert options.nvme_path == tmp_path / "made" / "later"
    assert os.listdir(tmp_path) == ["file"]


def test_offload_true_means_cpu_and_false_means_device() -> None:
    assert resolve_options(offload_optimizer=True).offload_optimizer == "cpu"
    assert resolve_options(offload_optimizer=False).offload_optimizer is None
    assert not resolve_options().offloads


# ---- the user's JSON -----------------------------------------------------------------------------------------------


def test_one_message_names_all_owned_keys_and_every_auto() -> None:
    text = refusal(config=HUGGING_FACE)
    for key in (
        "fp16",
        "bf16",
        "optimizer",
        "scheduler",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ):
        assert f"{key}: " in text
    for advice in ("gradient_clip_val", "accumulate_grad_batches", "precision=", "configure_optimizers", "batch_size"):
        assert advice in text
    assert "10 entries" in text
    assert "offload_optimizer" not in text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 2}}, "stage=3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer="),
        ({"zero_optimization": {"overlap_comm": False}}, "overlap_comm=True"),
        ({"zero_optimization": True}, "zero_optimization"),
        ({"zero_optimisation": {}}, "'zero_optimization'"),
        ({"gradient_cliping": 1.0}, "'gradient_clipping'"),
        ({"amp": {"enabled": True}}, "precision="),
        ({"their_own": [{"a": "auto"}]}, "their_own[0].a: 'auto'"),
        ({"zero_optimization": {"cpu_offload": True}}, "offload_optimizer='cpu'"),
        ({"data_types": {"param_dtype": "bf16"}}, "precision="),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "no checkpoint"),
    ],
)
def test_a_config_entry_with_an_error_is_refused(config: dict[str, Any], words: str) -> None:
    assert words in refusal(config=config, stage=3, offload_optimizer="cpu", overlap_comm=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b" 2}', "line 2, column 6"),
        ('{"a": 1, // no\n}', "line 1, column 10"),
        ("[1]", "list"),
        ('{"a": 1, "a": 2}', "'a'"),
    ],
)
def test_invalid_json_is_reported_with_its_position(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "zero.json"
    assert "zero.json" in refusal(config=str(file))
    file.write_text(text)
    told = refusal(config=file)
    assert words in told
    assert "zero.json" in told


def test_stage_and_offload_are_read_from_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    file.write_text(json.dumps({"zero_optimization": zero}))
    options = resolve_options(config=str(file))
    assert (options.stage, options.offload_optimizer, options.offload_parameters) == (3, None, "nvme")
    assert options.nvme_path == tmp_path


def test_other_settings_reach_the_engine_unchanged() -> None:
    config = {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 2,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
            "reduce_bucket_size": 5e8,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "bf16"},
        "aio": {"block_size": 4096},
        "activation_checkpointing": {"partition_activations": True},
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 3},
        "prescale_gradients": True,
        "their_own": {"note": 1},
    }
    given = json.loads(json.dumps(config))
    engine = engine_config(resolve_options(config=config), FP32, 2, MILLION)
    assert config == given
    zero = engine["zero_optimization"]
    assert given["zero_optimization"].items() <= zero.items()
    assert {k: v for k, v in given.items() if k != "zero_optimization"}.items() <= engine.items()


def test_arguments_are_written_to_the_keys_that_deepspeed_reads() -> None:
    zero = zero_of(stage=3, reduce_bucket_size=77, prefetch_bucket_size=78, offload_optimizer=True, pin_memory=False)
    assert zero["reduce_bucket_size"] == 77
    assert zero["stage3_prefetch_bucket_size"] == 78
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert "offload_param" not in zero


# ---- the engine's config -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("elements", [10, 1001, 20 * MILLION, 7000 * MILLION])
def test_buckets_fit_the_model(stage: int, elements: int) -> None:
    zero = zero_of(elements, stage=stage)
    bucket = zero["reduce_bucket_size"]
    assert bucket <= max(2**18, elements // 32) or bucket <= elements + 1
    assert bucket <= 50 * MILLION
    assert all(size <= elements + 1 for size in zero.values() if isinstance(size, int) and size > 3)
    if stage < 3:  # DeepSpeed asserts this
        assert zero["allgather_bucket_size"] % 2 == 0


def test_phalanx_sets_batch_size_clipping_and_dtypes_of_the_engine() -> None:
    config = engine_config(resolve_options(), FP32, 4, MILLION)
    triple = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[key] for key in triple] == [4, 1, 1]
    assert config["gradient_clipping"] == 0.0
    assert config["data_types"]["grad_accum_dtype"] == config["communication_data_type"] == "fp32"
    # It would wait for the device in each step.
    assert config["timers"] == {"throughput": {"enabled": False}}
    assert not {"bf16", "fp16", "optimizer", "scheduler"} & set(config)
    bf16 = engine_config(resolve_options(), resolve_precision("bf16-mixed"), 4, MILLION)
    assert bf16["bf16"] == {"enabled": True}
    assert bf16["data_types"]["grad_accum_dtype"] == "fp32"


def test_disk_buffers_have_the_size_of_the_largest_parameter(tmp_path: Path) -> None:
    options = resolve_options(stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=tmp_path)
    config = engine_config(options, FP32, 2, 20 * MILLION, largest_elements=MILLION, swap_folder=tmp_path / "mine")
    zero = config["zero_optimization"]
    assert zero["offload_param"]["buffer_size"] == MILLION // 2
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == str(tmp_path / "mine")


@pytest.mark.parametrize(("precision", "device"), [("16-mixed", "cpu"), ("16-true", "cpu"), ("64-true", "cuda")])
def test_an_unsupported_precision_is_refused(precision: str, device: str) -> None:
    with refuses(ConfigurationError, "strategy='fsdp'"):
        check_precision(resolve_precision(precision), device)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"reduce_bucket_sise": 5}}, "'reduce_bucket_size'"),
        ({"zero_optimization": {"overlap_comm": "perhaps"}}, "overlap_comm='perhaps'"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin": 1}}},
            "zero_optimization.offload_optimizer.pin",
        ),
        ({"zero_optimization": {"reduce_bucket_size": "big", "allgather_bucket_size": -1}}, "allgather_bucket_size=-1"),
        ({"comms_logger": {"enabld": True}}, "comms_logger.enabld"),
        ({"tensorboard": {"enabled": "perhaps"}}, "tensorboard.enabled='perhaps'"),
        ({"communication_data_type": "fp99"}, "Got: fp99"),
        ({"elasticity": {}}, "elasticity"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "'zero_optimization.mics_shard_size'"),
    ],
)
def test_deepspeed_itself_checks_settings_before_a_process_starts(config: dict[str, Any], words: str) -> None:
    with refuses(ConfigurationError, words):
        check_settings(resolve_options(config=config), "cpu")


def test_deepspeed_is_imported_only_to_check_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.config", None)
    check_settings(STRATEGIES.load("zero3-offload")(gather_weights="all").options, "cpu")
    with pytest.raises(ImportError):
        check_settings(resolve_options(overlap_comm=True), "cpu")


def test_deepspeed_accepts_the_default_sizes_of_phalanx(tmp_path: Path) -> None:
    zero = zero_of(stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=tmp_path)
    check_settings(resolve_options(config={"zero_optimization": zero}), "cpu")


# ---- names ---------------------------------------------------------------------------------------------------------

NAMES = ["zero1", "zero1-offload", "zero2", "zero2-offload", "zero3", "zero3-offload"]


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_name_sets_stage_and_offload(name: str) -> None:
    strategy = STRATEGIES.load(name)(gather_weights="all")
    options = strategy.options
    offload = "cpu" if name.endswith("-offload") else None
    assert strategy.name == name
    assert options.stage == int(name[4])
    assert options.offload_optimizer == offload
    assert options.offload_parameters == (offload if options.stage == 3 else None)
    assert options.gather_weights == "all"


def test_lightning_names_are_aliases() -> None:
    for name in NAMES:
        theirs = f"deepspeed_stage_{name[4]}" + ("_offload" if name.endswith("-offload") else "")
        assert STRATEGIES.canonical(theirs) == name
    assert STRATEGIES.canonical("deepspeed_stage_3_offload_nvme") == "zero3-nvme"
    with refuses(UnknownNameError, "'deepspeed_stage3'", "'deepspeed_stage_3'"):
        STRATEGIES.canonical("deepspeed_stage3")


def test_nvme_path_comes_from_an_argument_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_NVME_PATH", raising=False)
    with refuses(ConfigurationError, "DeepSpeedStrategy", "stage=3"):
        STRATEGIES.load("zero3-nvme")().check(1, "cpu", 1, FP32)
    assert STRATEGIES.load("zero3-nvme")(nvme_path=tmp_path).options.nvme_path == tmp_path
    monkeypatch.setenv("PHALANX_NVME_PATH", str(tmp_path))
    assert STRATEGIES.load("zero3-nvme")().options.nvme_path == tmp_path
