"""The search: what it finds fits, nothing better would, and its reasons and command lines are true."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from itertools import product

import pytest
from rich.console import Console

from logitless.errors import OptionError
from logitless.models.catalog import HUB, from_config, shape_of
from logitless.models.presets import PRESETS
from logitless.workbench.plan.commands import (
    ALIGN,
    flags,
    hint,
    logitless_align,
    logitless_train,
    trl,
    with_its_own_step,
)
from logitless.workbench.plan.fit import LADDER, SHORTEST, Fit, beyond, fit
from logitless.workbench.plan.plan import plan
from logitless.workbench.plan.report import show_fits
from logitless.workbench.plan.setting import GIB, Setting

INTUITOR = Setting(
    shape_of("qwen2.5-1.5b"),
    "intuitor",
    batch_size=64,
    responses_per_prompt=8,
    prompt_length=2048,
    response_length=4096,
    gpus=8,
)
LONG = Setting(shape_of("4b"), batch_size=8, response_length=131_072, gpus=2)
SMALL_GPU = Setting(shape_of("gemma-2-2b"), gpu_bytes=24 * GIB)
WISHES = {"intuitor": INTUITOR, "long": LONG, "24 GiB": SMALL_GPU}


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_what_is_found_fits(wish):
    found = fit(wish)
    assert list(found) == ["conservative", "aggressive"]
    for name, part in (("conservative", 0.2), ("aggressive", 0.02)):
        result = found[name]
        assert result is not None
        assert result.plan.fits
        assert result.plan.peak <= result.allowed == pytest.approx(wish.gpu_bytes * (1 - part) - wish.reserve)
        assert result.plan.setting.batch_size <= wish.batch_size
        assert result.plan.setting.response_length <= wish.response_length
    assert found["aggressive"].plan.setting.tokens_per_step >= found["conservative"].plan.setting.tokens_per_step


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_nothing_cheaper_would_fit(wish):
    """One step back on any knob, with the others where they are, does not fit."""
    for result in fit(wish).values():
        s = result.plan.setting
        back = []
        if s.gradient_checkpointing:
            back.append({"gradient_checkpointing": False})
        if s.lora_rank and not wish.lora_rank:
            back.append({"lora_rank": 0})
        if s.sharding != wish.sharding:
            back.append({"sharding": LADDER[LADDER.index(s.sharding) - 1]})
        if s.micro_rows < s.rows:
            back.append({"micro_batch": 2 * s.micro_rows})
        assert back
        for change in back:
            assert plan(replace(s, **change)).peak > result.allowed, change


@pytest.mark.parametrize("accumulate", [False, True])
def test_where_all_that_is_asked_for_fits_the_aggressive_setting_takes_more(accumulate):
    wish = replace(SMALL_GPU, model=shape_of("smollm2-135m"), batch_size=6)
    if accumulate:
        wish = replace(INTUITOR, batch_size=8, gradient_checkpointing=True)
    careful, bold = (found.plan.setting for found in fit(wish).values())
    assert careful.batch_size == wish.batch_size
    assert bold.batch_size > wish.batch_size
    assert bold.accumulation == careful.accumulation
    assert bold.rollout_sequences == bold.rows
    allowed = fit(wish)["aggressive"].allowed
    rows = -(-(bold.batch_size + 1) * bold.responses_per_prompt // (bold.gpus * bold.accumulation))
    more = replace(bold, batch_size=bold.batch_size + 1, micro_batch=rows)
    assert plan(bold).peak <= allowed < plan(more).peak
    why = fit(wish)["aggressive"].reasons[0][2]
    assert why.startswith(f"{wish.batch_size} were asked for; {more.batch_size} in as many passes would need ")
    assert f"{allowed / GIB:.2f} GiB that are allowed" in why or f"{plan(more).peak / GIB:.2f} GiB" in why


def test_where_the_length_is_cut_the_aggressive_setting_has_the_longest_that_fits():
    wish = Setting(model=shape_of("qwen3-4b"), response_length=131_072, gpu_bytes=24 * 10**9)
    careful, bold = fit(wish).values()
    short, long = (found.plan.setting.response_length for found in (careful, bold))
    assert careful.plan.setting == replace(bold.plan.setting, response_length=short)
    assert short < long < wish.response_length
    more = plan(replace(bold.plan.setting, response_length=long + SHORTEST))
    assert bold.plan.peak <= bold.allowed < more.peak
    value, why = next((value, why) for knob, value, why in bold.reasons if knob == "response-length")
    assert value == str(long)
    assert why.startswith(f"{long + SHORTEST} would need {more.peak / GIB:.2f} GiB")


def test_where_nothing_more_fits_the_report_says_what_would(capsys):
    wish = Setting(model=shape_of("qwen2.5-1.5b"), response_length=131_072, batch_size=8, gpus=8)
    careful, bold = (found.plan.setting for found in fit(wish).values())
    assert careful == bold
    assert plan(replace(bold, batch_size=16, micro_batch=2)).peak > fit(wish)["aggressive"].allowed
    assert plan(replace(bold, batch_size=16, micro_batch=1)).peak <= fit(wish)["aggressive"].allowed
    show_fits(fit(wish), Console(width=200))
    said = "aggressive: as conservative; a pass with a row more would not fit, a larger batch is more passes"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("prompt", "size"), [(0, (1, 1024)), (512, (2, 512))])
def test_a_step_has_the_most_tokens_with_its_prompts_and_then_the_longer_response(prompt, size):
    """Where the whole wish is a byte too large, and half of either would fit."""
    light = {"lora_rank": 8, "gradient_checkpointing": True}
    wish = Setting(shape_of("smollm2-135m"), "sft", 2, prompt_length=prompt, response_length=1024, **light)
    allowed = plan(replace(wish, micro_batch=1, memory_budget=wish.memory_budget // 4)).peak - 1
    wish = replace(wish, gpu_bytes=(allowed + wish.reserve) * 50 // 49)
    found = fit(wish)["aggressive"]
    assert found.allowed <= allowed
    assert (found.plan.setting.batch_size, found.plan.setting.response_length) == size


@pytest.mark.parametrize(
    ("change", "more"),
    [({}, True), ({"sharding": "zero2"}, False), ({"lora_rank": 8}, False), ({"master_weights": False}, False)],
)
def test_it_is_said_where_lines_with_float32_weights_take_more_than_planned(change, more, capsys):
    setting = Setting(shape_of("qwen3-0.6b"), gpus=2, **change)
    show_fits({"aggressive": Fit("aggressive", plan(setting), 0, ())}, Console(width=200))
    assert ("TRL and accelerate take 2 to 13 % more than planned" in capsys.readouterr().out) == more


def test_reasons_carry_the_numbers():
    result = fit(LONG)["aggressive"]
    rows = {option: (value, why) for option, value, why in result.reasons}
    assert set(rows) >= {
        "batch-size",
        "response-length",
        "lora-rank",
        "gradient-checkpointing",
        "sharding",
        "micro-batch",
    }
    other = plan(replace(result.plan.setting, gradient_checkpointing=False))
    value, why = rows["gradient-checkpointing"]
    assert value == "on"
    assert f"{other.peak / GIB:,.2f} GiB in {other.peak_phase}" in why
    assert f"{result.allowed / GIB:.2f} GiB are allowed" in why
    why = next(why for option, _, why in fit(LONG, "GB")["aggressive"].reasons if option == "gradient-checkpointing")
    assert f"{other.peak / 10**9:,.2f} GB in {other.peak_phase}, {result.allowed / 10**9:.2f} GB are allowed" in why


@pytest.mark.parametrize(
    ("model", "gib", "change"),
    [
        ("qwen3-0.6b", 40, {"batch_size": 3, "response_length": 5000}),  # two rows would fit, and are not tried
        ("qwen3-0.6b", 8, {"batch_size": 3, "response_length": 2048, "gpus": 2}),
        ("qwen3-0.6b", 12, {"batch_size": 5, "response_length": 32_768}),
        ("qwen3-0.6b", 40, {"batch_size": 12, "response_length": 32_768}),  # the batch grows: other sizes halve
        ("qwen2.5-1.5b", 12, {"batch_size": 7, "response_length": 5000}),
        ("tiny", 80, {"batch_size": 1, "response_length": 512}),  # so far as it is searched
        ("tiny", 80, {"batch_size": 2, "rollout_batch": 1}),  # which sft does not have
    ],
)
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_no_reason_contradicts_itself(model, gib, change, algorithm):
    wish = Setting(shape_of(model), algorithm, gpu_bytes=gib * GIB, **change)
    if algorithm == "grpo":
        wish = replace(wish, responses_per_prompt=3, prompt_length=512)
    for found in filter(None, fit(wish).values()):
        for knob, _, why in found.reasons:
            if sizes := re.search(r"would need ([\d.]+) (\w+) in .*, ([\d.]+) (\w+) are allowed", why):
                assert sizes[2] == sizes[4]
                assert float(sizes[1]) > float(sizes[3]), (knob, why)


@pytest.mark.parametrize(
    ("wish", "knobs"),
    [
        (replace(INTUITOR, response_length=8192, gpus=4, gpu_bytes=24 * GIB), {"sharding", "rollout-batch"}),
        (Setting(shape_of("qwen2.5-1.5b"), batch_size=16, response_length=32_768, gpu_bytes=16 * GIB), {"lora-rank"}),
        (Setting(shape_of("qwen3-4b"), batch_size=8, response_length=1000, gpu_bytes=13 * GIB), {"response-length"}),
    ],
)
def test_a_reason_is_what_a_plan_with_the_other_value_gives(wish, knobs):
    """Of the next larger size, of which the search tried halves, or of the one cheaper way."""
    result = fit(wish)["conservative"]
    setting, told = result.plan.setting, set()
    for knob, value, why in result.reasons:
        if " would need " not in why:
            continue
        name, other = knob.replace("-", "_"), why.partition(" would need ")[0].rpartition(" ")[2]
        if other.isdigit():
            assert int(other) // 2 == int(value), (knob, why)
        else:
            assert knob in ("lora-rank", "gradient-checkpointing") or LADDER.index(other) + 1 == LADDER.index(value)
        cheaper = {"lora-rank": 0, "gradient-checkpointing": False, "sharding": other}
        made = plan(replace(setting, **{name: cheaper[knob] if knob in cheaper else int(other)}))
        assert made.peak > result.allowed
        assert why.endswith(f" would need {beyond(made.peak, result.allowed, 'GiB', made.peak_phase)}")
        told.add(knob)
    assert knobs | {"gradient-checkpointing"} <= told


def test_what_needs_no_reason_is_said():
    whys = {knob: (value, why) for knob, value, why in fit(Setting(shape_of("tiny")))["conservative"].reasons}
    assert whys["lora-rank"] == ("0", "all parameters can be trained")
    assert whys["gradient-checkpointing"] == ("off", "every activation fits: nothing is computed twice")
    assert whys["sharding"] == ("ddp", "one GPU")
    assert whys["accumulation"] == ("1", "1 pass of 64 rows makes a GPU's 64")
    assert whys["micro-batch"] == ("64", "the whole batch of a GPU at once")
    assert "rollout-batch" not in whys
    wish = Setting(shape_of("tiny"), lora_rank=4, gradient_checkpointing=True, gpus=4, sharding="zero3")
    asked = {knob: (value, why) for knob, value, why in fit(wish)["conservative"].reasons}
    assert asked["lora-rank"] == ("4", "as asked")
    assert asked["gradient-checkpointing"] == ("on", "as asked")
    assert asked["sharding"] == ("zero3", "as asked")
    wish = replace(INTUITOR, prompt_length=128, response_length=256)
    online = {knob: (value, why) for knob, value, why in fit(wish)["conservative"].reasons}
    assert online["accumulation"] == ("4", "4 passes of 16 rows make a GPU's 64")
    assert online["rollout-batch"] == ("64", "all of a GPU's sequences at once")


def test_a_wish_that_is_no_setting_is_refused():
    with pytest.raises(OptionError, match="--batch-size must be 1 to 2"):
        fit(replace(SMALL_GPU, batch_size=0))


@pytest.mark.parametrize(
    ("needed", "allowed", "said"),
    [
        (906 << 20, 904 << 20, "906 MiB in loss, 904 MiB are allowed"),
        ((80 << 30) + 4096, 80 << 30, "4 KiB more than the 80.00 GiB that are allowed in loss"),
    ],
)
def test_reasons_tell_sizes_apart(needed, allowed, said):
    assert beyond(needed, allowed, "GiB", "loss") == said


@pytest.mark.parametrize(
    ("size", "said", "quarter"),
    [
        (4 << 30, "4096MiB", "1024MiB"),
        (8 * 10**9, "8000MB", "2000MB"),
        (7_999_900_000, "7999900kB", "1999975kB"),
        (7_999_999_999, "7999999999", "1999999999"),
    ],
)
def test_a_budget_is_said_to_the_byte(size, said, quarter):
    """It was cut to whole MiB, and called as it was asked for."""
    long = replace(SMALL_GPU, batch_size=1, response_length=2**15, lora_rank=16, gradient_checkpointing=True)
    found = []
    for gib in (8, 12, 24):
        fits = fit(replace(long, memory_budget=size, gpu_bytes=gib * GIB))["conservative"]
        found += [row for row in (fits.reasons if fits else ()) if row[0] == "memory-budget"]
    assert ("memory-budget", said, "as asked") in found
    (why,) = (why for _, value, why in found if value == quarter)
    assert why.startswith(f"{said} would need ")


def test_rollouts_are_split_when_their_cache_is_too_large():
    wish = replace(INTUITOR, batch_size=512, gpu_bytes=48 * GIB)
    result = fit(wish)["conservative"]
    s = result.plan.setting
    assert s.rollout_sequences < s.rows
    assert plan(replace(s, rollout_batch=2 * s.rollout_sequences)).peaks["rollout"] > result.allowed


def test_nothing_fits_a_small_gpu():
    wish = replace(INTUITOR, model=shape_of("qwen3-8b"), algorithm="ppo", gpus=1, gpu_bytes=24 * GIB, memory_budget=1)
    assert fit(wish) == {"conservative": None, "aggressive": None}


def test_what_is_asked_for_stays():
    wish = replace(SMALL_GPU, lora_rank=4, gradient_checkpointing=True, gpus=4, sharding="zero3")
    s = fit(wish)["aggressive"].plan.setting
    assert (s.lora_rank, s.gradient_checkpointing, s.sharding) == (4, True, "zero3")
    short = fit(replace(SMALL_GPU, response_length=100))["conservative"].plan.setting
    assert short.response_length == 100


OWN = {"optimizer": "adamw-bf16", "master_weights": False}  # what logitless's own commands step with
TRAIN, ALIGNED = replace(SMALL_GPU, **OWN), replace(INTUITOR, **OWN)


def test_command_lines():
    single = replace(SMALL_GPU, lora_rank=16, gradient_checkpointing=True, micro_batch=4)
    assert logitless_train(single) == (
        "logitless train --model google/gemma-2-2b --context-length 2048 --loss logitless --batch-size 4 "
        "--gradient-accumulation-steps 16 --gradient-checkpointing --lora-rank 16 --memory-budget 256MiB "
        "--dtype bfloat16"
    )
    assert logitless_train(replace(single, gpus=2)).startswith("torchrun --nproc-per-node 2 -m logitless.cli train ")
    assert " --loss logitless --attention nsa " in logitless_train(
        replace(single, model=INTUITOR.model, attention="nsa")
    )
    light = logitless_train(replace(single, offload_activations=True, mlp_tiles=4))
    assert " --loss logitless --offload-activations --mlp-tiles 4 --batch-size 4 " in light
    two = replace(TRAIN, gpus=2, micro_batch=4)
    assert " --loss logitless --tensor-parallel 2 --batch-size 4 " in logitless_train(replace(two, tensor_parallel=2))
    shared = replace(two, model=INTUITOR.model, context_parallel=2, sharding="fsdp2")
    assert " --loss logitless --sharding fsdp2 --context-parallel 2 " in logitless_train(shared)
    assert logitless_train(replace(shared, response_length=2047)) is None
    assert logitless_train(replace(two, gpus=4, tensor_parallel=2)) is None  # two ranks with the same matrices
    both = replace(shared, gpus=4, tensor_parallel=2)
    assert " --sharding fsdp2 --tensor-parallel 2 --context-parallel 2 " in logitless_train(both)
    assert logitless_train(replace(both, sharding="ddp")) is None  # two ranks with the same matrices again
    assert logitless_train(replace(both, response_length=2047)) is None
    assert logitless_train(replace(both, attention="eager")) is None
    assert logitless_train(replace(both, model=SMALL_GPU.model)) is None  # a softcap in its attention
    assert logitless_train(replace(TRAIN, model=INTUITOR.model, gpus=4, tensor_parallel=4)) is None  # 2 heads of keys
    assert set(flags(replace(ALIGNED, attention="nsa"))) == set(flags(replace(ALIGNED, mlp_tiles=2))) == {"accelerate"}
    assert set(flags(ALIGNED)) == {"logitless align", "TRL", "accelerate"}
    changes = (
        {"sharding": "zero2"},
        {"tensor_parallel": 2},
        {"responses_per_prompt": 1},
        {"micro_batch": 3},
        {"batch_size": 4},  # a group of 8 lies on two GPUs
        {"mlp_tiles": 2},
        {"gradient_checkpointing": True, "offload_activations": True},
        {"prompt_length": 0},
        {"rollout_batch": 1},
        {"attention": "eager"},
        {"critic": "yes"},
        {"algorithm": "dpo", "reference": "no"},
    )
    for change in changes:
        assert "logitless align" not in flags(replace(ALIGNED, **change)), change
    for change in ({"prompt_length": 64}, {"reference": "yes"}, {"response_length": 1}, {"algorithm": "ppo"}):
        assert logitless_train(TRAIN) is not None
        assert logitless_train(replace(TRAIN, **change)) is None, change


def test_a_model_is_what_the_command_can_start_from(tmp_path, monkeypatch):
    def model(line):
        return shlex.split(line)[3]

    for name, trained, aligned in (
        ("tiny", "tiny", "runs/tiny/model"),
        ("qwen3-4b", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("gemma-3-1b", "google/gemma-3-1b-pt", "google/gemma-3-1b-pt"),
    ):
        short = {"gpus": 1, "prompt_length": 64, "response_length": 64}
        assert model(logitless_train(replace(TRAIN, model=shape_of(name)))) == trained
        assert model(logitless_align(replace(ALIGNED, model=shape_of(name), **short))) == aligned
    adapted = replace(TRAIN, lora_rank=8, optimizer="adamw-fp32")  # whose other weights stay what they are
    assert model(logitless_train(replace(adapted, model=shape_of("qwen3-4b")))) == "Qwen/Qwen3-4B"
    assert logitless_train(replace(adapted, model=shape_of("tiny"))) is None
    assert logitless_align(replace(ALIGNED, model=shape_of("small"), **short)) is None
    place = tmp_path / "a model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    for path, weights in ((place / "config.json", False), (place, False), (place, True)):
        (place / "model.safetensors").touch() if weights else None
        setting = replace(TRAIN, model=shape_of(str(path)))
        if path == place and not weights:
            assert logitless_train(setting) is None
            assert hint(setting).startswith(f"{path} names no weights to start from")
        else:
            assert model(logitless_train(setting)) == str(path)
    named = replace(TRAIN, model=replace(TRAIN.model, name="Qwen/Qwen3-4B"))
    assert model(logitless_train(named)) == "Qwen/Qwen3-4B"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-4B").mkdir(parents=True)  # a directory of that name comes first, and has no weights
    assert logitless_train(named) is None


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({"optimizer": "adamw-fp32"}, False),  # its state would be in the weights' bf16
        ({"optimizer": "adamw-8bit"}, False),
        ({"optimizer": "sgd"}, False),
        ({"optimizer": "none"}, False),
        ({"master_weights": True}, False),
        ({"lora_rank": 8}, False),
        ({"lora_rank": 8, "optimizer": "adamw-fp32"}, True),  # adapters are fp32
        ({"lora_rank": 8, "optimizer": "adamw-fp32", "master_weights": True}, True),
        ({}, True),
    ],
)
def test_the_optimizer_is_what_the_commands_step_with(change, own):
    for setting, tool in ((TRAIN, "logitless train"), (ALIGNED, "logitless align")):
        setting = replace(setting, **change)
        assert (tool in flags(setting)) == own
        options = "adamw-fp32" if setting.lora_rank else "adamw-bf16"
        options += " --no-master-weights" * setting.master_weights
        said = f"{tool} has another optimizer than this plan: --optimizer {options} plans that one"
        assert hint(setting) == (None if own else said)
        assert with_its_own_step(setting).keys() <= (set() if own else {tool})
    assert with_its_own_step(SMALL_GPU) == {"logitless train": logitless_train(TRAIN)}  # bf16 state, no fp32 copy
    assert not with_its_own_step(replace(SMALL_GPU, optimizer="sgd", master_weights=False))  # has no state to keep
    assert hint(replace(TRAIN, algorithm="ppo")) is None  # no optimizer would make it one of these


def test_contexts_beyond_the_positions():
    long = replace(LONG, gpus=1, batch_size=1, **OWN)
    assert " --context-length 131072 --rope-scaling yarn:4 --loss" in logitless_train(long)
    assert "--rope-scaling" not in logitless_train(replace(long, response_length=40_960))
    assert logitless_train(replace(long, model=shape_of("llama-3.2-1b"), response_length=131_073)) is None
    older = {key: x for key, x in PRESETS["qwen3-0.6b"].items() if key != "rope_parameters"} | {"rope_theta": 1e6}
    assert "yarn:4" in logitless_train(replace(long, model=from_config(older, "someone/older")))
    aligned = replace(ALIGNED, model=LONG.model, response_length=40_960 - 2048)
    assert logitless_align(aligned) is not None
    assert logitless_align(replace(aligned, response_length=40_960)) is None


def test_command_lines_of_others():
    assert "trl grpo" in trl(INTUITOR)
    assert "--num_generations 8 --max_completion_length 4096 --beta 0.04" in trl(INTUITOR)
    assert "--dtype float32 --attn_implementation sdpa" in trl(INTUITOR)
    assert "--beta 0.0" in trl(replace(INTUITOR, algorithm="reinforce"))
    assert "--steps_per_generation" not in trl(INTUITOR)  # all at once, as the trainers do unless told otherwise
    split = replace(INTUITOR, micro_batch=4, rollout_batch=16)
    assert "--steps_per_generation 4" in trl(split)
    assert "--steps_per_generation 1 " in f"{trl(replace(split, rollout_batch=2))} "
    adapted = trl(replace(INTUITOR, lora_rank=8))
    assert "--dtype bfloat16" in adapted
    assert "--lora_r 8 --lora_alpha 16 --lora_target_modules all-linear" in adapted
    assert "--completion_only_loss true" in trl(replace(INTUITOR, algorithm="sft"))
    assert "--precompute_ref_log_probs true" in trl(replace(INTUITOR, algorithm="dpo", reference="no"))
    assert "--use_deepspeed --zero_stage 2" in flags(replace(INTUITOR, sharding="zero2"))["accelerate"]
    assert "--gradient_accumulation_steps 16" in flags(replace(INTUITOR, sharding="fsdp2", micro_batch=4))["accelerate"]
    line = flags(replace(INTUITOR, tensor_parallel=2, context_parallel=2, sharding="fsdp2"))["accelerate"]
    assert "dp_shard_size 2 --parallelism_config_tp_size 2 --parallelism_config_cp_size 2" in line
    assert set(flags(replace(INTUITOR, algorithm="grade"))) == {"accelerate"}
    texts = replace(INTUITOR, algorithm="sft", prompt_length=0, gradient_checkpointing=True, offload_activations=True)
    assert trl(replace(texts, attention="eager", lora_rank=8)) == (
        "trl sft --model_name_or_path Qwen/Qwen2.5-1.5B --dataset_name DATASET --dtype bfloat16 "
        "--attn_implementation eager --per_device_train_batch_size 64 --gradient_accumulation_steps 1 "
        "--gradient_checkpointing true --bf16 true --optim adamw_torch_fused --activation_offloading true "
        "--max_length 4096 --use_peft true --lora_r 8 --lora_alpha 16 --lora_target_modules all-linear"
    )
    assert trl(replace(INTUITOR, algorithm="dpo")) == (
        "trl dpo --model_name_or_path Qwen/Qwen2.5-1.5B --dataset_name DATASET --dtype float32 "
        "--attn_implementation sdpa --per_device_train_batch_size 64 --gradient_accumulation_steps 1 "
        "--gradient_checkpointing false --bf16 true --optim adamw_torch_fused --max_length 6144"
    )
    assert trl(replace(texts, algorithm="grpo", prompt_length=8)) is None  # whose trainer offloads nothing
    assert trl(replace(INTUITOR, mlp_tiles=2)) is None
    assert "--model_name_or_path MODEL " in trl(replace(INTUITOR, model=replace(INTUITOR.model, name="mine")))
    start = "accelerate launch --num_processes 8 --num_machines 1 --mixed_precision bf16"
    assert flags(INTUITOR)["accelerate"] == f"{start} --multi_gpu SCRIPT"
    assert flags(replace(INTUITOR, gpus=1))["accelerate"] == f"{start.replace('8', '1', 1)} SCRIPT"
    split = flags(replace(INTUITOR, tensor_parallel=2))["accelerate"].removeprefix(f"{start} --multi_gpu ")
    sizes = "--parallelism_config_dp_replicate_size 4 --parallelism_config_tp_size 2"
    assert split == f"--use_parallelism_config {sizes} SCRIPT"
    whole = flags(replace(INTUITOR, gpus=2, context_parallel=2))["accelerate"]
    assert whole.endswith(" --use_parallelism_config --parallelism_config_cp_size 2 SCRIPT")
    zero = flags(replace(INTUITOR, sharding="zero1", tensor_parallel=2))["accelerate"]
    assert zero == f"{start} --use_deepspeed --zero_stage 1 --gradient_accumulation_steps 1 SCRIPT"
    assert "--responses-per-prompt 4" in hint(replace(INTUITOR, responses_per_prompt=1))


def test_the_whole_batch_at_once_can_need_less_than_accumulated_rows():
    """Gradients that accumulate are all alive in every phase."""
    wish = Setting(
        shape_of("qwen2.5-1.5b"),
        batch_size=2,
        gradient_checkpointing=True,
        gpu_bytes=25 * GIB,
        reserve=512 << 20,
    )
    found = fit(wish)["aggressive"]
    assert (found.plan.setting.lora_rank, found.plan.setting.micro_rows) == (0, 2)
    assert found.plan.peak <= found.allowed < plan(replace(found.plan.setting, micro_batch=1)).peak


def test_all_parameters_can_need_less_than_adapters():
    """Which keep copies of their inputs: of long sequences more than gradients are."""
    wish = Setting(
        shape_of("qwen3-0.6b"),
        batch_size=1,
        prompt_length=32_768,
        response_length=128,
        gpu_bytes=13 * GIB // 2,
        reserve=256 << 20,
        optimizer="sgd",
        master_weights=False,
        gradient_checkpointing=True,
    )
    found = fit(wish)["aggressive"]
    assert plan(wish).peak <= found.allowed
    assert found.plan.setting == replace(wish, micro_batch=1)


def test_a_batch_of_unequal_passes_has_no_command():
    """Commands fill up every rank's last pass: 16 sequences would be trained in the place of 10."""
    uneven = replace(TRAIN, batch_size=10, gpus=8)
    for setting in (uneven, replace(TRAIN, batch_size=5, micro_batch=2)):
        assert set(flags(setting)) == {"accelerate"}
        assert not with_its_own_step(replace(setting, optimizer="adamw-fp32"))
    assert hint(uneven).startswith("commands make equal passes on every GPU, so 6 rows more than the batch has: give ")
    assert hint(replace(uneven, algorithm="ppo")) is None  # which no command runs
    even = flags(replace(uneven, batch_size=16))
    assert " --batch-size 2 --gradient-accumulation-steps 1 " in even["logitless train"]
    assert " --per_device_train_batch_size 2 --gradient_accumulation_steps 1 " in even["TRL"]


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({"optimizer": "adamw-fp32"}, "float32"),
        ({"optimizer": "adamw-bf16"}, None),  # its state would be fp32, as the weights that it steps are
        ({"optimizer": "adamw-8bit"}, "float32"),
        ({"optimizer": "none"}, None),
        ({"optimizer": "adamw-fp32", "master_weights": False}, None),
        ({"optimizer": "adamw-bf16", "master_weights": False}, "bfloat16"),
        ({"optimizer": "sgd", "master_weights": False}, "bfloat16"),
        ({"optimizer": "adamw-fp32", "lora_rank": 8}, "bfloat16"),  # adapters are fp32
        ({"optimizer": "adamw-bf16", "lora_rank": 8}, None),
    ],
)
def test_trl_steps_as_planned(change, dtype):
    line = trl(replace(SMALL_GPU, **change))
    assert line is None if dtype is None else f" --dtype {dtype} " in line


def own_lines():
    """Every line of logitless's own commands that a range of settings gives."""
    for wish, model in product((TRAIN, ALIGNED), ("tiny", "qwen2.5-1.5b", "llama-3.2-1b")):
        for change in (
            {},
            {"algorithm": "dpo"},
            {"algorithm": "grpo"},
            {"algorithm": "reinforce"},
            {"lora_rank": 8},
            {"optimizer": "adamw-fp32", "lora_rank": 8},
            {"memory_budget": 1000},
            {"attention": "nsa"},
            {"prompt_length": 0, "response_length": 100_000},
            {"gpus": 4, "sharding": "fsdp2"},
            {"micro_batch": 4},
            {"prompt_length": 0, "response_length": 1},
            {"gpus": 2, "context_parallel": 2},
            {"responses_per_prompt": 1},
            {"gradient_checkpointing": True, "offload_activations": True, "mlp_tiles": 4},
            {"attention": "eager"},
        ):
            setting = replace(wish, model=shape_of(model), **change)
            yield from ((s, line) for s, line in flags(setting).items() if s.startswith("logitless"))


def test_own_command_lines_parse_and_pass_the_commands_checks():
    """Its parser, its checks, and where the model is named its positions and its tokenizer."""
    from logitless.cli import align, train
    from logitless.workbench.sources.model import load_tokenizer, reaching, resolve

    tools, loaded = set(), set()
    for tool, line in sorted(set(own_lines())):
        command = tool.split()[1]
        words = shlex.split(line)
        config = {"train": train, "align": align}[command].parse(words[words.index(command) + 1 :])
        assert config.memory_budget_bytes in (256 << 20, 1000)
        if config.model in PRESETS:
            source = resolve(config.model)
            reaching(source, config.context_length, config.rope_scaling)
            if config.model not in loaded:
                load_tokenizer(source)
            loaded.add(config.model)
        tools.add((tool, config.model))
    assert {("logitless train", "tiny"), ("logitless train", "Qwen/Qwen2.5-1.5B")} <= tools
    assert {("logitless align", "meta-llama/Llama-3.2-1B"), ("logitless align", "Qwen/Qwen2.5-1.5B")} <= tools


def test_logitless_train_knows_its_flags():
    from logitless.cli.train import parse

    line = logitless_train(replace(SMALL_GPU, lora_rank=16, gradient_checkpointing=True))
    config = parse(line.split()[2:])
    assert (config.context_length, config.lora_rank, config.memory_budget_bytes) == (2048, 16, 256 << 20)
    line = logitless_train(replace(TRAIN, sharding="fsdp2", gpus=4))
    assert parse(line.split()[6:]).sharding == "fsdp2"
    assert logitless_train(replace(TRAIN, sharding="zero3", gpus=4)) is None


@pytest.mark.parametrize("algorithm", ["intuitor", "dpo", "grpo", "reinforce"])
def test_logitless_align_knows_its_flags(algorithm):
    from logitless.cli.align import parse

    wish = replace(INTUITOR, algorithm=algorithm, micro_batch=8, lora_rank=16)
    line = logitless_align(wish)
    assert line.startswith("torchrun --nproc-per-node 8 -m logitless.cli align ")
    config = parse(line.split()[6:])
    assert (config.method, config.prompt_length, config.completion_length) == (ALIGN[algorithm], 2048, 4096)
    assert (config.batch_size, config.gradient_accumulation_steps) == (8, wish.accumulation)
    if algorithm != "dpo":
        assert (config.generations_per_prompt, config.kl_weight) == (8, 0.0 if algorithm == "reinforce" else 0.04)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "reinforce"])
def test_trl_knows_its_flags(algorithm):
    import trl as package

    configs = {"sft": "SFTConfig", "dpo": "DPOConfig", "grpo": "GRPOConfig", "reinforce": "RLOOConfig"}
    kinds = [getattr(package, kind) for kind in (configs[algorithm], "ModelConfig", "ScriptArguments")]
    known = {f.name for kind in kinds for f in fields(kind)}
    line = trl(replace(INTUITOR, algorithm=algorithm, lora_rank=16))
    online = algorithm in ("grpo", "reinforce")
    assert ("--reward_funcs REWARDS" in line) == online
    assert set(re.findall(r"--(\w+)", line)) <= known | {"reward_funcs"}
    assert f"--model_name_or_path {HUB[INTUITOR.model.name]} --dataset_name DATASET " in line
    assert (trl(replace(INTUITOR, algorithm=algorithm, responses_per_prompt=1)) is None) == online


def test_accelerate_knows_its_flags():
    code = (
        "import sys, shlex\nfrom accelerate.commands.launch import launch_command_parser\n"
        "for line in sys.stdin:\n    launch_command_parser().parse_args(shlex.split(line)[2:] + ['x.py'])\n"
    )
    asked = [replace(INTUITOR, sharding=s) for s in ("ddp", "zero1", "zero3", "fsdp2")]
    asked += [replace(s, tensor_parallel=2, context_parallel=2) for s in asked]
    lines = "\n".join(flags(s)["accelerate"] for s in asked)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], input=lines, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
