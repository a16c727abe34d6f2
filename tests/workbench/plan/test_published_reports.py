"""Figures of widely copied reports: reproduced, or listed in docs/where-reports-go-wrong.md with the right value.

Every row computes a figure and gives the text that the page must show for it.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.logits.peaks import chunked, half_error, peak_bytes
from bench.logits.table import batched, row_loop
from logitless.models.catalog import shape_of
from logitless.workbench.plan.activations import activations
from logitless.workbench.plan.plan import both, plan
from logitless.workbench.plan.setting import GIB, Setting

PAGE = Path(__file__).parents[3] / "docs" / "where-reports-go-wrong.md"
GB, MB, KB = 10**9, 10**6, 10**3
LOGITS = (8, 912, 50_000)
LONG = Setting(shape_of("4b"), batch_size=1, response_length=131_072, gradient_checkpointing=True, optimizer="none")
SMALL = shape_of("qwen2.5-1.5b")
SELF = Setting(SMALL, "intuitor", batch_size=64, response_length=6144, gpu_bytes=10**15)
TUTORIAL = Setting(SMALL, batch_size=56, response_length=912, gpus=7)
GRADE = Setting(shape_of("4b"), "grade", batch_size=1, prompt_length=32, response_length=64, lora_rank=16)
CHECKPOINTED = replace(GRADE, gradient_checkpointing=True)


def part(setting: Setting, name: str, way: str = "dense") -> int:
    return next(c.nbytes for c in plan(setting, way).components if c.name == name)


def phase(setting: Setting, name: str, way: str = "logitless") -> int:
    return plan(setting, way).peaks[name]


def logits(tokens: int) -> int:
    return part(replace(LONG, response_length=tokens), "logits")


def intuitor(tokens: int) -> float:
    """The report's own formula for sequences of `tokens`: PPO's 12 GB, one hidden state, logits and gradients."""
    return 12 * GB + 64 * tokens * (1536 * 2 + 2 * 152_000 * 4)


def ppo(tokens: int) -> float:
    return 12 * GB + 64 * tokens * 1536 * 2


def mass(power: int) -> float:
    """The probability of the 256 most likely of 32,000 entries, falling as a power of their rank."""
    weights = [rank**-power for rank in range(1, 32_001)]
    return sum(weights[:256]) / sum(weights)


after = ("parameters", "layers' inputs", "last norm and hidden states", "rotary tables")
held = sum(part(LONG, name) for name in after)
two = replace(LONG, batch_size=2, gpus=2, sharding="fsdp2")
adam = {"optimizer": "adamw-fp32"}
wide = part(LONG, "log-softmax")
flat = replace(SELF, gradient_checkpointing=True)
steps = [64 * 32 + 64 * 65 // 2, 128 * 32 + 128 * 129 // 2]

FIGURES = {
    # the profiling report
    "logits": (logits(131_072) / GIB, "37.09 GiB"),
    "logits in GB": (logits(131_072) / GB, "39.83 GB"),
    "logits at 4,096": (logits(4096) / GIB, "1.16"),
    "logits at 40,000": (logits(40_000) / GIB, "11.32"),
    "3.92B parameters": (3.92e9 * 2 / GB, "7.84 GB"),
    "parameters": (part(LONG, "parameters") / GB, "8.04 GB"),
    "parameters in GiB": (part(LONG, "parameters") / GIB, "7.49 GiB"),
    "embedding": (131_072 * 2560 * 2 / 2**20, "640 MiB"),
    "embedding in MB": (131_072 * 2560 * 2 / MB, "671 MB"),
    "logits and a copy": ((logits(131_072) + wide) / GIB, "111.28 GiB"),
    "dense loss": ((logits(131_072) + 2 * wide) / GIB, "185.47 GiB"),
    "dense backward": (3 * wide / GIB, "222.56 GiB"),
    "dense peak": (phase(LONG, "loss backward", "dense") / GIB, "256.47 GiB"),
    "logitless there": (phase(LONG, "loss backward") / GIB, "35.36 GiB"),
    "saved": ((phase(LONG, "loss backward", "dense") - phase(LONG, "loss backward")) / GIB, "221.11 GiB"),
    "kept by a loop": (wide / GIB, "74.19 GiB"),
    "after the forward pass": (held / GIB, "32.56 GiB"),
    "its peak": (plan(LONG).peak / GIB, "56.99 GiB"),
    "two GPUs": (plan(two).peak / GIB, "54.34 GiB"),
    "with AdamW": (plan(replace(LONG, **adam)).peak / GIB, "101.94 GiB"),
    "with AdamW on two": (plan(replace(two, **adam)).peak / GIB, "76.82 GiB"),
    "after embedding": ((part(LONG, "parameters") + 131_072 * 2560 * 2) / GIB, "8.12 GiB"),
    "beside parameters": ((plan(LONG).peak - part(LONG, "parameters")) / GIB, "49.49 GiB"),
    # the tutorial
    "batch of logits": (8 * 912 * 50_000 * 2 / MB, "729.6 MB"),
    "a row": (912 * 50_000 * 2 / MB, "91.2 MB"),
    "both": (2 * 729.6, "1459.2 MB"),
    "logits and a row": (729.6 + 91.2, "820.8 MB"),
    "saving": (100 * (1 - 820.8 / 1459.2), "43.75 %"),
    "token log-probs": (8 * 912 * 2 / KB, "14.6 kB"),
    "index": (8 * 912 * 8 / KB, "58.4 kB"),
    "batch in training": (peak_bytes(batched, LOGITS, torch.bfloat16, train=True) / GB, "2.92 GB"),
    "loop in training": (peak_bytes(row_loop, LOGITS, torch.bfloat16, train=True) / GB, "2.19 GB"),
    "saved in training": (
        100
        - 100
        * peak_bytes(row_loop, LOGITS, torch.bfloat16, train=True)
        / peak_bytes(batched, LOGITS, torch.bfloat16, train=True),
        "25 %",
    ),
    "chunks of two in training": (peak_bytes(chunked, LOGITS, torch.bfloat16, train=True) / GB, "3.28 GB"),
    "chunks of two": (peak_bytes(chunked, LOGITS, torch.bfloat16, train=False) / MB, "912.1 MB"),
    "optimizer under ZeRO-2": (part(replace(TUTORIAL, sharding="zero2"), "optimizer state") / GB, "1.76 GB"),
    "gradients under ZeRO-2": (part(replace(TUTORIAL, sharding="zero2"), "gradients") / MB, "441 MB"),
    "master weights under ZeRO-2": (part(replace(TUTORIAL, sharding="zero2"), "master weights") / MB, "882 MB"),
    "optimizer": (part(TUTORIAL, "optimizer state") / GB, "12.35 GB"),
    "gradients": (part(TUTORIAL, "gradients") / GB, "3.09 GB"),
    "forward on one GPU": (3 + 2 + 0.73 + 0.73, "6.5 GB"),
    "with the loop": (3 + 2 + 0.73 + 0.091, "5.8 GB"),
    "times 7": (7 * 5.8, "40.6 GB"),
    "a row's token log-probs": (912 * 2 / KB, "1.8 kB"),
    "checkpoints of 8 rows": (part(replace(TUTORIAL, gradient_checkpointing=True), "layers' inputs") / GB, "0.63 GB"),
    "activations of 8 rows": (part(TUTORIAL, "activations of the layers") / GB, "21.14 GB"),
    "left": (40 - 3 - 6 - 2 - 3 - 2 * 0.7296, "24.54"),
    "left by a loop": (40 - 3 - 6 - 2 - 3 - 2 * 0.0912, "25.82"),
    # Intuitor against PPO
    "bf16 moments": (part(replace(SELF, optimizer="adamw-bf16"), "optimizer state") / GB, "6.17 GB"),
    "one hidden state": (64 * 6144 * 1536 * 2 / GB, "1.21 GB"),
    "checkpoints": (part(flat, "layers' inputs") / GB, "33.82 GB"),
    "activations": (part(SELF, "activations of the layers") / GB, "1139.32 GB"),
    "its logits": (64 * 6000 * 152_000 * 4 / GB, "233.5 GB"),
    "exact logits": (part(SELF, "logits in fp32") / GB, "238.97 GB"),
    "exact logits in GiB": (part(SELF, "logits in fp32") / GIB, "222.56 GiB"),
    "PPO's logits": (part(replace(SELF, algorithm="ppo"), "logits in fp32") / GB, "238.97 GB"),
    "temporaries": (64 * 6000 * 4 * 3 / MB, "4.6 MB"),
    "log-probs": (64 * 6000 * 2 / MB, "0.77 MB"),
    "PPO's total": (ppo(6000) / GB, "13.2"),
    "additional": (2 * 64 * 6000 * 152_000 * 4 / GB + 1, "468"),
    "PPO at 2K": (ppo(2000) / GB, "12.4"),
    "PPO at 4K": (ppo(4000) / GB, "12.8"),
    "PPO at 8K": (ppo(8000) / GB, "13.6"),
    "Intuitor at 2K": (intuitor(2000) / GB, "168.0"),
    "Intuitor at 4K": (intuitor(4000) / GB, "324.1 GB"),
    "Intuitor at 6K": (intuitor(6000) / GB, "480.1"),
    "Intuitor at 8K": (intuitor(8000) / GB, "636.2 GB"),
    "Intuitor at 18K": (intuitor(18_000) / GB / 1000, "1.42 TB"),
    "ratio at 2K": (intuitor(2000) / ppo(2000), "13.6"),
    "ratio at 4K": (intuitor(4000) / ppo(4000), "25.3"),
    "ratio at 6K": (intuitor(6000) / ppo(6000), "36.4"),
    "ratio at 8K": (intuitor(8000) / ppo(8000), "46.9"),
    "from 18K to 4K": (100 * (1 - intuitor(4000) / intuitor(18_000)), "77 %"),
    # GRADE
    "soft tokens": (64 * 32_000 * 2 / MB, "4.1 MB"),
    "soft tokens in fp32": (64 * 32_000 * 4 / MB, "8.2 MB"),
    "weights of 256": (64 * 256 * 2 / KB, "33 kB"),
    "their ids": (64 * 256 * 8 / KB, "131 kB"),
    "reduction": (32_000 * 2 / (256 * (2 + 8)), "25 times"),
    "reward embedding": (64 * 4096 * 2 / MB, "0.52 MB"),
    "gathered": (64 * 256 * 4096 * 2 / MB, "134 MB"),
    "activations without a cache": (part(GRADE, "activations of the layers") / GB, "33.74 GB"),
    "with one": (part(GRADE, "activations of the layers", "logitless") / MB, "785 MB"),
    "half the steps": (steps[1] / steps[0], "3.0 times"),
    "slices of both heads": (part(GRADE, "slices of both heads' logits", "logitless") / MB, "117 MB"),
    "reference at work": (activations(GRADE.model, replace(GRADE, lora_rank=0)).forward * 96 / MB, "6.8 MB"),
    "reference": (part(replace(GRADE, reference="yes"), "reference model") / GB, "8.04 GB"),
    "checkpoints without a cache": (part(CHECKPOINTED, "layers' inputs") / MB, "761 MB"),
    "total": (plan(GRADE, "dense").peak / GB, "50.84 GB"),
    "total, few entries": (plan(GRADE).peak / GB, "17.80 GB"),
    "total, checkpointed": (plan(CHECKPOINTED).peak / GB, "17.04 GB"),
    "two models": ((part(GRADE, "parameters") + part(GRADE, "reward model")) / GB, "16.09 GB"),
    "mass of 256": (100 * mass(2), "99.76 %"),
    "mass of 256 at temperature 2": (100 * mass(1), "55.9 %"),
    # the sampler
    "a sample": (2048 * 256_000 * 4 / GB, "2.10 GB"),
    "a sample in GiB": (2048 * 256_000 * 4 / GIB, "1.95 GiB"),
    "top ten": (256_000 * 4 / (10 * (4 + 4)), "12,800 times"),
}


@pytest.mark.parametrize("figure", FIGURES)
def test_the_page_shows_what_the_arithmetic_gives(figure):
    value, text = FIGURES[figure]
    number = text.split()[0].replace(",", "")
    decimals = len(number.partition(".")[2])
    assert f"{value:.{decimals}f}" == number
    assert text in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("response", "prompts", "each", "dense_fits"), [(1024, 16, 4, True), (2048, 32, 8, False)])
def test_recommended_settings(response, prompts, each, dense_fits):
    setting = Setting(
        SMALL,
        "intuitor",
        batch_size=prompts,
        responses_per_prompt=each,
        prompt_length=2048,
        response_length=response,
        gpus=8,
        gradient_checkpointing=True,
    )
    dense, ours = both(setting)
    assert (dense.fits, ours.fits) == (dense_fits, True)
    page = PAGE.read_text(encoding="utf-8")
    assert f"{dense.peak / GIB:.2f} GiB, {'fits' if dense_fits else 'does not fit'}" in page
    assert f"{ours.peak / GIB:.2f} GiB, fits" in page


@pytest.mark.parametrize("length", [2048, 4096, 6144, 8192])
def test_intuitor_against_ppo(length):
    """The page's table: Intuitor needs less than PPO at every length, dense or not."""
    intuitor = replace(flat, prompt_length=0, response_length=length)
    cells = [f"{length:,}"]
    for way in ("dense", "logitless"):
        ours, ppo = plan(intuitor, way).peak, plan(replace(intuitor, algorithm="ppo"), way).peak
        cells += [f"{ppo / GB:.1f} GB", f"{ours / GB:.1f} GB", f"{ours / ppo:.2f}"]
        assert ours < ppo
    page = PAGE.read_text(encoding="utf-8")
    assert f"| {' | '.join(cells)} |" in page


def test_self_certainty_has_no_gradient_of_its_own():
    """Intuitor's plan differs from GRPO's in nothing: its reward is read off the scoring pass."""
    assert plan(SELF, "dense").peaks == plan(replace(SELF, algorithm="grpo"), "dense").peaks


def test_memory_is_linear_in_the_sequence():
    """The scaling table's shape: without the fixed part, twice the tokens take twice the bytes."""
    fixed = phase(replace(SELF, response_length=1), "loss backward", "dense")
    one, two, four = (
        phase(replace(SELF, response_length=n), "loss backward", "dense") - fixed for n in (2048, 4096, 8192)
    )
    assert math.isclose(two / one, 2, rel_tol=1e-3)
    assert math.isclose(four / one, 4, rel_tol=1e-3)


def test_half_precision_on_the_result():
    assert half_error() == pytest.approx(7.8e-3, rel=0.05)
    assert "7.8e-3 nat" in PAGE.read_text(encoding="utf-8")


def test_averaged_log_sum_exps_are_too_small():
    chunks = [[1.0, 2.0, 3.0], [4.0, 0.0, 1.0]]
    each = [math.log(sum(math.exp(z) for z in chunk)) for chunk in chunks]
    whole = math.log(sum(math.exp(z) for chunk in chunks for z in chunk))
    assert whole >= sum(each) / 2 + math.log(2)
