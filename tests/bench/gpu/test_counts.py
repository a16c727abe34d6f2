"""What a GPU would be asked for does not grow: compiled kernels, launches and waits against the committed file.

A bound that a change lowers is lowered by `make gpu-counts`; one that it has to raise says why in `docs/decisions`.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import torch

from bench.gpu.counts import sass
from bench.gpu.device import Device
from bench.gpu.timing import Bench
from bench.harness import read_lines, write_line
from logitless.versions import version_of
from logitless.vocab.backends.triton.tuned import table

pytest.importorskip("triton")
calls, machine = (import_module(f"bench.gpu.counts.{name}") for name in ("calls", "machine"))
PROGRAM = """
import json, sys
import torch
import logitless as ll
from bench.gpu.counts.calls import CALLS
from bench.gpu.counts.claimed import claimed
from bench.gpu.counts.count import Seen, captured, late_with_rows, recorded
from bench.gpu.counts.kernels import Launch
from bench.gpu.counts.machine import traffic
from bench.gpu.counts.recording import Operator, Product, Wait
from logitless.multi_token import multi_token_cross_entropy
from logitless.sample.rules import Rules

capability, calls, hot = json.loads(sys.argv[1])
found, seen = {}, Seen()
with claimed(capability) as recording:
    for name, call in CALLS.items():
        graph, late = captured(call, recording) if call.capture else ([], [])
        late_rows = late_with_rows(call, recording)
        recorded(call, recording)
        found[name] = {
            "launches": recording.launches,
            "waits": len(list(recording.of(Wait))),
            "late": late,
            "late with rows": late_rows,
            "in a graph": len(graph),
            "waits in a graph": [x.what for x in graph if isinstance(x, Wait)],
            "converted": [x.nbytes / 1e6 for x in recording.of(Operator) if x.converts and x.nbytes > 1e8],
            "largest_operator": max(x.nbytes / 1e6 for x in recording.of(Operator)),
            "kernels": [x.name for x in recording.of(Launch)],
            "explained": call.explained() if call.explained else "",
            "bytes": sum(traffic(x)[1] for x in recording.of(Launch)),
            "again": [x.programs for x in recording.of(Launch) if x.arguments.get("AGAIN")],
        }
        if name in calls:
            recording.events = [x for x in recording.of(Launch) if not hot or x.name in hot]
            seen.add(name, recording)
    recording.events.clear()
    Rules(top_p=0.9).kept(torch.empty(50_257, device="cuda"), torch.empty((), device="cuda"))
    nucleus = sorted({x.name for x in recording.of(Operator)})
    recording.events.clear()
    head = ll.LMHead(torch.empty(301, 16, device="cuda"))
    multi_token_cross_entropy(torch.empty(2, 7, 16, device="cuda"), head, torch.ones(7, device="cuda").long())
    depths = sorted({x.name for x in recording.of(Operator)})
print(json.dumps({"calls": found, "kernels": seen.records(capability), "sums": {"nucleus": nucleus, "depths": depths}}))
"""

OUT = Path(__file__).parents[3] / "bench/results/gpu_counts.jsonl"
COMMITTED = read_lines(OUT)
BOUNDS = {r["call"]: r for r in COMMITTED if r["kind"] == "gpu-count"}
# what the fast test compiles: calls that have a kernel of their own, and kernels that go over all entries or rows
FAST = (
    "loss", "values", "odd-loss", "max-logit", "frozen", "frozen-entropy", "frozen-kl", "ppo", "sample",
    "frozen-slices", "odd-loss-slices",
)  # fmt: skip
HOT = (
    "accumulate_slice", "accumulate_plain_slice", "weigh_plain_slice", "logits_grad_slice", "look_again",
    "weigh_products", "scatter", "dot", "best_of_groups", "look_for_tokens", "count_above",
    "draw_tokens",
)  # fmt: skip
CHECKS_SETS = ("sets", "sets-gradient")  # by asking the device
# of sums and of weights, persistent, for which a processor has too few registers: off there, where nobody has measured
SPILLS = {(100, "weigh_products")}


def counted(capability, calls, hot=()):
    """What the program finds; of kernels those that are named, or all."""
    return json.loads(compiling("-c", PROGRAM, json.dumps([capability, list(calls), hot]))[-1])


def compiling(*arguments):
    """The lines that Python prints where Triton has its compiler."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def found():
    return counted(90, FAST, HOT)


def kernel_of(found, call, name):
    """The first such kernel of a call."""
    return next(r for r in found["kernels"] if r["kernel"] == name and call in r["calls"])


def bound(call):
    """The committed count of a call."""
    if call not in BOUNDS:
        pytest.skip(f"{call} is not in {OUT.name} yet: make gpu-counts")
    return BOUNDS[call]


def grown(kernels):
    """What a kernel takes more of than the committed ones of its name, switches and calls; nothing is good."""
    if COMMITTED[0]["versions"]["triton"] != version_of("triton"):
        pytest.skip(f"{OUT.name} has the machine code of Triton {COMMITTED[0]['versions']['triton']}")
    for kernel in kernels:
        calls = set(kernel["calls"]) & set(BOUNDS)
        same = ("kind", "capability", "kernel", "switches")
        alike = [r for r in COMMITTED if all(r.get(x) == kernel[x] for x in same) and calls & set(r["calls"])]
        if calls and not alike:
            yield f"{kernel['kernel']} {kernel['switches']} is not in {OUT.name}: make gpu-counts"
        for name, of in FIGURES.items() if alike else ():
            if of(kernel) > max(map(of, alike)):
                yield f"{kernel['kernel']} {kernel['switches']}: {name} {of(kernel)}, {max(map(of, alike))} before"


FIGURES = {
    "registers": lambda r: r["registers"],
    "spills": lambda r: r["spills"] + r["stack"],
    "loads and stores": lambda r: sum(r["loads"].values()) + sum(r["stores"].values()),
    "shared memory": lambda r: r["shared"],
    "instructions an entry": lambda r: r["instructions"] or 0.0,
    "barriers": lambda r: (r["loop"] or {"barriers": 0})["barriers"],
    "programs that a processor lacks": lambda r: -r["per_processor"],
    "instructions outside of loops": lambda r: r["way"]["once"],
    "instructions a turn of its loops": lambda r: r["way"]["turn"],
    "barriers on its way": lambda r: r["way"]["barriers_once"] + r["way"]["barriers_a_turn"],
}


def test_kernels_stay_as_lean(found):
    assert list(grown(found["kernels"])) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("capability", [90, 80, 100])
def test_every_kernel_of_every_call_stays_as_lean(capability):
    assert list(grown(counted(capability, BOUNDS)["kernels"])) == []


@pytest.mark.parametrize("name", calls.CALLS)
def test_launches_and_waits_do_not_grow(found, name):
    now, before = found["calls"][name], bound(name)
    assert now["launches"] <= before["launches"]
    assert now["waits"] <= len(before["waits"])
    if before["graph"] is not None:
        assert now["in a graph"] <= before["graph"]["launches"]


def test_a_look_for_tokens_counts_its_noise(found):
    """Philox runs for each entry: its ten rounds of two products for four are no branch that is mostly skipped."""
    assert 20 < kernel_of(found, "sample", "look_for_tokens")["instructions"] <= 24.5


def test_a_vocabulary_of_any_size_is_read_and_written_in_wide_vectors(found):
    """50,257 entries: the tile is padded, not the head."""
    for name in ("accumulate_plain_slice", "logits_grad_slice"):
        assert kernel_of(found, "odd-loss-slices", name)["loads"]["128"] >= 4, name
    assert kernel_of(found, "odd-loss-slices", "logits_grad_slice")["stores"] == {"128": 2}


@pytest.mark.parametrize(
    ("name", "warps"),
    {
        "max-logit accumulate_slice": 20,
        "frozen-slices weigh_plain_slice": 32,
        "frozen-entropy accumulate_plain_slice": 32,
        "frozen-kl accumulate_slice": 20,
        "ppo accumulate_slice": 16,
    }.items(),
)
def test_a_processor_has_enough_warps_to_hide_memory(found, name, warps):
    kernel = kernel_of(found, *name.split())
    assert kernel["per_processor"] * kernel["warps"] >= warps


@pytest.mark.parametrize("name", ["frozen-entropy accumulate_plain_slice", "frozen-kl accumulate_slice"])
def test_a_processor_holds_several_programs_that_write_weights(found, name):
    """None of which has a whole row in its registers: decision 0050."""
    kernel = kernel_of(found, *name.split())
    assert kernel["per_processor"] >= 4
    assert kernel["switches"]["BLOCK"] <= 4096


def test_nothing_spills_but_what_is_off(found):
    """Of the kernels compiled here for 9.0, and of the committed ones for every capability."""
    kernels = [r for r in (*found["kernels"], *COMMITTED) if r["kind"] == "gpu-kernel" and (r["spills"] or r["stack"])]
    assert {(r["capability"], r["kernel"]) for r in kernels} <= SPILLS
    assert table("default")["weights"]["used"] == 0


def test_a_graph_needs_no_kernel_that_other_numbers_of_tokens_have_not_compiled(found):
    assert {name: x["late"] for name, x in found["calls"].items() if x["late"]} == {}


def test_in_a_graph_nobody_waits(found):
    assert {name: x["waits in a graph"] for name, x in found["calls"].items() if x["waits in a graph"]} == {}


def test_a_decode_step_of_other_rows_compiles_four_kernels_at_most(found):
    """The sizes of two are those of a number of parts, and a third tells addresses apart: `docs/gpu-counts.md`."""
    late = found["calls"]["sample"]["late with rows"]
    assert set(late) == {"1 after 64", "2 after 64", "3 after 64", "62 after 63"}
    assert set().union(*late.values()) <= {"merge_parts", "look_for_tokens", "count_above", "draw_tokens"}


def test_a_decode_step_in_a_graph_is_a_few_launches(found):
    assert 0 < found["calls"]["sample"]["in a graph"] <= 14


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
    """No operator reads all of it; one product is all of it, in the head's own dtype."""
    of_hidden = 4096 * 4096 * (4 + 4 + 4) / 1e6  # read, written, and what it is added to
    assert found["calls"][name]["largest_operator"] < 1.01 * of_hidden
    assert found["calls"][name]["kernels"].count("scaled") == 2  # of hidden's, of the head's


def test_the_kernel_that_writes_weights_fits_a_processor(found):
    """Whose shared memory holds three blocks of each operand, and the one that is written."""
    kernel = kernel_of(found, "loss", "weigh_products")
    assert kernel["tensor_cores"] > 0
    assert kernel["per_processor"] == 1
    assert kernel["spills"] == kernel["stack"] == 0


@pytest.mark.parametrize("name", ["loss", "loss-qwen"])
def test_a_second_launch_with_nothing_to_do_is_a_few_programs(found, name):
    """Each of which takes all of a processor's shared memory, one after another: some five on each of 132."""
    assert all(0 < programs < 5 * 132 for programs in found["calls"][name]["again"])


@pytest.mark.parametrize("name", ["nucleus", "depths"])
def test_numbers_are_added_up_in_the_same_order_every_time(name, found):
    assert {"bincount", "index_add_"}.isdisjoint(found["sums"][name])
    assert "index_put_" in found["sums"][name]


def test_no_kernel_uses_atomics(found):
    """Of those compiled here, and of all of every call as committed."""
    kernels = [r for r in (*found["kernels"], *COMMITTED) if r["kind"] == "gpu-kernel"]
    assert {r["kernel"] for r in kernels if r["atomics"]} == set()


@pytest.mark.parametrize("name", ["values", "loss"])
def test_the_kernel_of_the_products_reads_the_head_and_writes_weights(name, found):
    tokens, hidden, entries = BOUNDS[name]["shape"]
    head, weights = 2 * entries * hidden, 2 * tokens * entries * (name == "loss")
    assert found["calls"][name]["bytes"] == BOUNDS[name]["bytes"]["kernels"] > head + weights
    assert BOUNDS[name]["bytes"]["through the cache"] > head


def test_the_host_waits_once_a_call(found):
    assert {name: x["waits"] for name, x in found["calls"].items() if x["waits"] > 1}.keys() == set(CHECKS_SETS)


FORMS = """
from bench.gpu.counts.forms import described, forms
for sizes, kernel in forms("sums", 90, ((128, 128, 64, 8, 4),)):
    print(kernel.kernel, *kernel.switches, described(sizes, kernel), sep=" | ")
"""


@pytest.mark.slow
def test_each_form_that_tuning_tries_is_compiled_with_its_sizes():
    persistent, apart = compiling("-c", FORMS)
    assert persistent.startswith("weigh_products | LABEL | WITH_T | PERSISTENT | ROWS | BLOCK | INNER | 128 tokens")
    assert apart.startswith("weigh_products | LABEL | WITH_T | ROWS | BLOCK | INNER | 128 tokens")
    assert "4 stages, persistent: " in persistent
    assert "4 stages, a block a program: " in apart
    assert all(" 0 spills, 13" in line and "too much" not in line for line in (persistent, apart))


def test_sets_launch_few_kernels_and_gather_rows_alone(found):
    sets, gradient = (found["calls"][name] for name in CHECKS_SETS)
    assert sets["launches"] <= 15
    assert gradient["launches"] <= 51
    assert sets["waits"] == gradient["waits"] == 2  # for the mask's offsets, and for one look at sets and labels
    assert sets["kernels"] == ["look_at_sets", "dot", "accumulate_sets", "finish"]
    assert sets["largest_operator"] < 100  # MB: no row of an entry is gathered


def test_what_a_gpu_has_measured_takes_the_place_of_each_constant(tmp_path):
    file, stated = tmp_path / "gpu.jsonl", machine.Machine()
    own = {"name": "NVIDIA H100", "bandwidth": 2.9e12, "launch": 3e-6, "rate_own": 5e14}
    for device, figures in (("cpu", {"bandwidth": 1e10}), ("cuda", own)):
        write_line(file, {"kind": "environment"})
        write_line(file, {"kind": "gpu-device", "device": device, **figures, "failed": {"clock": "no nvidia-smi"}})
    found = machine.with_measured(stated, file)
    assert {name: getattr(found, name) for name in own} == own
    assert set(found.measured) == set(own)
    assert (found.clock, found.rate, found.shown) == (stated.clock, stated.rate, stated.shown)
    assert machine.with_measured(stated, tmp_path / "none.jsonl") == stated


def test_a_devices_figures_are_constants_of_a_prediction():
    device = Device(Bench("cpu", time.monotonic() + 100), tiny=True)
    found = device.measure()
    assert set(device.steps()) <= {field.name for field in fields(machine.Machine)}
    assert set(found) | set(found["failed"]) == {*device.steps(), "failed"}
    assert min(found[name] for name in ("launch", "bandwidth", "rate", "rate_tf32", "rate_fp32")) > 0
    if not torch.cuda.is_available():
        assert "launch_in_graph" in found["failed"]


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
    assert sass.way(code) == sass.Way(once=2, barriers_once=0, turn=13, barriers_a_turn=1)
    loop = sass.hot_loop(code)
    assert loop == sass.Loop(instructions=15, always=13, barriers=1, half_rate=2, functions=0)
    assert sass.widths(code, ("LDG",)) == {"128": 1}
    assert sass.widths(code, ("STG",)) == {"16": 1}
    assert sum(i.opcode == "STL" for i in code) == 1


def test_loops_that_go_over_the_same_entries_count_together():
    code = sass.parse(LOOP + LOOP.replace("L_x", "L_y"))
    once, twice = (sass.hot_loop(code, reads) for reads in (1, 2))
    assert (once.always, twice.always) == (13, 26)
    assert (once.barriers, twice.barriers) == (1, 2)


ARMS = """
        /*0010*/              @P0 BRA `(.L_x_0) ;
        /*0020*/                   FADD R6, R6, R5 ;
        /*0030*/                   FADD R6, R6, R5 ;
        /*0040*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0050*/                   FADD R6, R6, R4 ;
.L_x_1:
        /*0060*/              @P1 BRA `(.L_x_2) ;
        /*0070*/                   MUFU.EX2 R5, R5 ;
.L_x_2:
        /*0080*/                   EXIT ;
"""


def test_of_two_arms_the_longer_one_is_taken():
    assert sass.way(sass.parse(ARMS)) == sass.Way(once=5, barriers_once=0, turn=0, barriers_a_turn=0)
