"""What a GPU would be asked for does not grow: compiled kernels of the two main calls, launches and waits of others.

A bound that a change lowers is lowered here with it; one that it has to raise says why in `docs/decisions`.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from bench.gpu_counts import sass

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

PROGRAM = """
import json
import torch
from bench.gpu_counts.calls import CALLS
from bench.gpu_counts.claimed import claimed
from bench.gpu_counts.count import captured, recorded
from bench.gpu_counts.kernels import Launch, compiled
from bench.gpu_counts.recording import Operator, Product, Wait
from logitless.sample.rules import Rules

HOT = {
    "accumulate_slice", "accumulate_plain_slice", "weigh_plain_slice", "logits_grad_slice", "look_again",
    "weigh_products",
}
COMPILED = ("loss", "values", "odd-loss", "max-logit", "frozen", "frozen-kl", "ppo", "fp16", "jsd", "loss-weights")
found, kernels = {}, {}
with claimed() as recording:
    for name, call in CALLS.items():
        graph, late = captured(call, recording) if call.capture else ([], [])
        recorded(call, recording)
        found[name] = {
            "launches": recording.launches,
            "waits": len(list(recording.of(Wait))),
            "late": late,
            "in a graph": len(graph),
            "converted": [x.nbytes / 1e6 for x in recording.of(Operator) if x.converts and x.nbytes > 1e8],
            "largest_operator": max(x.nbytes / 1e6 for x in recording.of(Operator)),
            "kernels": [x.name for x in recording.of(Launch)],
            "explained": call.explained() if call.explained else "",
            "again": [x.programs for x in recording.of(Launch) if x.arguments.get("AGAIN")],
        }
        for launch in recording.of(Launch):
            if name in COMPILED and launch.name in HOT and f"{name} {launch.name}" not in kernels:
                kernels[f"{name} {launch.name}"] = compiled(launch).record()
    recording.events.clear()
    Rules(top_p=0.9).kept(torch.empty(50_257, device="cuda"), torch.empty((), device="cuda"))
    nucleus = sorted({x.name for x in recording.of(Operator)})
print(json.dumps({"calls": found, "kernels": kernels, "nucleus": nucleus}))
"""

# kernel: registers, instructions an entry, barriers a block
KERNELS = {
    "loss accumulate_plain_slice": (48, 9.0, 0),
    "loss logits_grad_slice": (38, 11.5, 1),
    "values accumulate_plain_slice": (64, 11.0, 0),
    "frozen weigh_plain_slice": (64, 11.75, 0),
    "fp16 logits_grad_slice": (40, 15.5, 1),
    "jsd look_again": (80, 132.0, 6),
}
LAUNCHES = {
    "loss": 71, "loss-qwen": 233, "values": 31, "values-qwen": 58, "frozen": 78, "ppo": 363, "sample": 21,
    "loss-default": 69, "autocast": 80, "fp16": 70, "upstream": 71, "odd-loss": 42, "max-logit": 22, "top-20": 23,
    "jsd": 271, "jsd-gradient": 446, "loss-weights": 60, "loss-qwen-weights": 150,
}  # fmt: skip
WAITS = 1  # of any call


@pytest.fixture(scope="module")
def found():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", KERNELS)
def test_hot_kernels_stay_as_lean(found, name):
    kernel, (registers, instructions, barriers) = found["kernels"][name], KERNELS[name]
    assert kernel["registers"] <= registers
    assert kernel["instructions"] <= instructions
    assert kernel["loop"]["barriers"] <= barriers
    assert kernel["spills"] == kernel["stack"] == 0
    assert kernel["loads"]["128"] >= 4


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_do_not_grow(found, name):
    assert found["calls"][name]["launches"] <= LAUNCHES[name]


def test_a_vocabulary_of_any_size_is_read_and_written_in_wide_vectors(found):
    """50,257 entries: the tile is padded, not the head."""
    for name in ("accumulate_plain_slice", "logits_grad_slice"):
        kernel = found["kernels"][f"odd-loss {name}"]
        assert kernel["loads"]["128"] >= 4, name
    assert found["kernels"]["odd-loss logits_grad_slice"]["stores"] == {"128": 2}


@pytest.mark.parametrize(
    ("name", "warps"),
    {
        "max-logit accumulate_slice": 16,
        "frozen weigh_plain_slice": 32,
        "frozen-kl accumulate_slice": 16,
        "ppo accumulate_slice": 16,
    }.items(),
)
def test_a_processor_has_enough_warps_to_hide_memory(found, name, warps):
    kernel = found["kernels"][name]
    assert kernel["per_processor"] * kernel["warps"] >= warps


def test_nothing_spills(found):
    assert {name: x["spills"] for name, x in found["kernels"].items() if x["spills"] or x["stack"]} == {}


@pytest.mark.parametrize("name", ["loss", "values", "sample"])
def test_a_graph_needs_no_kernel_that_other_numbers_of_tokens_have_not_compiled(found, name):
    assert found["calls"][name]["late"] == []


def test_a_decode_step_in_a_graph_is_a_few_launches(found):
    assert 0 < found["calls"]["sample"]["in a graph"] <= 15


def test_weights_are_converted_once_a_call(found):
    """fp32 weights under autocast: read once in fp32, written once in bf16; what it takes is said."""
    read_and_written = 128_256 * 4096 * (4 + 2) / 1e6
    large = [x for x in found["calls"]["autocast"]["converted"] if x > 1000]
    assert large == [pytest.approx(read_and_written)]
    assert "1002.0 MiB of these a converted copy of the head" in found["calls"]["autocast"]["explained"]


def test_an_fp16_heads_copy_in_fp32_is_made_once_a_call(found):
    """Which its gradient multiplies with: read in fp16, written in fp32; hidden states likewise once a chunk."""
    read_and_written = 128_256 * 4096 * (2 + 4) / 1e6
    assert found["calls"]["fp16"]["converted"] == [pytest.approx(read_and_written)]
    assert "2004.0 MiB of these a converted copy of the head" in found["calls"]["fp16"]["explained"]


@pytest.mark.parametrize("name", ["loss", "upstream"])
def test_the_heads_gradient_is_scaled_and_rounded_in_one_sweep(found, name):
    assert found["calls"][name]["largest_operator"] < 100
    assert found["calls"][name]["kernels"].count("scaled") == 2  # of hidden's, of the head's


def test_the_kernel_that_writes_weights_fits_a_processor(found):
    """Whose shared memory holds three blocks of each operand, and the one that is written."""
    kernel = found["kernels"]["loss-weights weigh_products"]
    assert kernel["tensor_cores"] > 0
    assert kernel["per_processor"] == 1
    assert kernel["spills"] == kernel["stack"] == 0


@pytest.mark.parametrize("name", ["loss-weights", "loss-qwen-weights"])
def test_a_second_launch_with_nothing_to_do_is_a_few_programs(found, name):
    """Each of which takes all of a processor's shared memory, one after another: some five on each of 132."""
    assert all(0 < programs < 5 * 132 for programs in found["calls"][name]["again"])


def test_a_nucleus_is_summed_in_the_same_order_every_time(found):
    assert "bincount" not in found["nucleus"]
    assert "index_put_" in found["nucleus"]


def test_the_host_waits_once_a_call(found):
    assert {name: x["waits"] for name, x in found["calls"].items() if x["waits"] > WAITS} == {}


LOOP = """
.L_x_0:
        /*0010*/                   LDG.E.128 R4, [R2.64] ;
        /*0020*/                   ISETP.GE.AND P0, PT, R1, R0, PT ;
        /*0030*/              @P0 BRA `(.L_x_1) ;
        /*0040*/                   MUFU.EX2 R5, R5 ;
        /*0050*/                   FADD R6, R6, R5 ;
.L_x_1:
        /*0060*/                   FADD R6, R6, R4 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/                   FADD R6, R6, R4 ;
        /*0090*/                   FADD R6, R6, R4 ;
        /*00a0*/                   FADD R6, R6, R4 ;
        /*00b0*/                   FADD R6, R6, R4 ;
        /*00c0*/                   FADD R6, R6, R4 ;
        /*00d0*/                   FADD R6, R6, R4 ;
        /*00e0*/                   ISETP.GE.AND P1, PT, R1, R0, PT ;
        /*00f0*/              @!P1 BRA `(.L_x_0) ;
        /*0100*/                   STL [R1], R6 ;
        /*0110*/                   STG.E.U16 [R2.64], R6 ;
        /*0120*/                   EXIT ;
"""


def test_a_loop_is_found_and_what_a_branch_skips_is_left_out():
    code = sass.parse(LOOP)
    loop = sass.hot_loop(code)
    assert loop == sass.Loop(instructions=15, always=13, barriers=1, half_rate=2, functions=0)
    assert sass.widths(code, ("LDG",)) == {"128": 1}
    assert sass.widths(code, ("STG",)) == {"16": 1}
    assert sum(i.opcode == "STL" for i in code) == 1
