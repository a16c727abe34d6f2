"""The kernels through Triton's real compiler, for a GPU that is not here: wide loads, tensor cores, no spills."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [  # slow, since the fast tests of bench/gpu/counts compile those of every call, and bound their spills
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]

PROGRAM = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from logitless.vocab.backends.triton import accumulate_kernels, draw_kernels, logits_grad_kernels, rows_kernels
from logitless.vocab.backends.triton import plain_kernels, topk_kernels
from bench.gpu.counts import sass
from logitless.vocab.backends.triton.tuned import launch, table
from logitless.vocab.backends.triton.written import finisher, label_coefficient_kernel

sizes = table("default")
MODULES = (draw_kernels, accumulate_kernels, plain_kernels, rows_kernels, topk_kernels, logits_grad_kernels)
NARROW = {"out0", "out1", "tokens", "entries", "table", "x"}
NARROW_OF = {("logits_grad_slice", "out"), ("scaled", "out"), ("weigh_plain_slice", "weights")}
LONG = {"labels", "best_keys", "keys", "ids", "of", "order", "seeds", "positions", "best_ids", "kept"}
SHORT = {"peaks", "room", "lives", "places", "aboves", "whole", "shown"}
NUMBERS = {
    "n", "width", "padded", "start", "n_parts", "part_width", "depth", "n_out", "group", "count", "k", "n_groups",
    "n_best", "n_topk", "keep",
}
REALS = {"far"}


def compiled(kernel, size, flags, **more):
    found = [getattr(module, kernel) for module in MODULES if hasattr(module, kernel)]
    return compiled_function(found[0], size, flags, **more)


def compiled_function(function, size, flags, **more):
    kernel, names = function.__name__, function.arg_names
    upper = {name: 0.3 if name == "BETA" else False for name in names if name.isupper()} | flags
    constants = {(names.index(name),): value for name, value in upper.items()}
    def type_of(name):
        if name in upper:
            return "constexpr"
        if name in NUMBERS or name.endswith("stride"):
            return "i32"
        if name in REALS:
            return "fp32"
        half = name in NARROW or (kernel, name) in NARROW_OF
        return "*" + ("bf16" if half else "i64" if name in LONG else "i32" if name in SHORT else "fp32")
    ragged = {"start", "n_parts", "k", "n_groups", "n_best", "n_topk", "keep", *REALS}
    aligned = {(names.index(x),): [["tt.divisibility", 16]] for x in names if x not in upper and x not in ragged}
    source = ASTSource(fn=function, signature={x: type_of(x) for x in names}, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch(size) | more).asm
    ptx = made["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made["cubin"])
        command = [knobs.nvidia.nvdisasm.path, "-c", str(file)]
        code = sass.parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        "wide": ptx.count("ld.global.v4"), "wgmma": ptx.count("wgmma.mma_async"), "barriers": ptx.count("bar.sync"),
        "spills": sum(i.opcode in ("LDL", "STL") for i in code), "code": len(code),
        "fused": len(re.findall(r"\bfma\.rn\.f64", ptx)),
        "atomics": sum(i.opcode in sass.ATOMICS for i in code),
    }


accumulate, logits_grad, gemm, look = (sizes[x] for x in ("accumulate", "logits_grad", "gemm", "look"))
at = {
    "ROWS": accumulate["rows"], "BLOCK": accumulate["block"], "LABEL": True, "TOP": 1, "BEST": 0, "BASIS0": 0,
    "BASIS1": 0, "GROUP": 0,
}
small, alone, exact = {"warps": 4, "stages": 3}, {"warps": 1, "stages": 3}, {"enable_fp_fusion": False}
everything = ("m", "rest", "t", "r", "above", "m_ref", "s_ref", "near", "shift", "a", "b", "a_ref")
back = {"ROWS": logits_grad["rows"], "BLOCK": logits_grad["block"], "LABEL": True, "RAW": True}
twice = {"LABEL": True, "ROWS": look["rows"], "BLOCK": look["block"]}
every = {"BIAS": True, "CAP": True, "REF": True, "REF_BIAS": True, "REF_CAP": True}
print(json.dumps({
    "accumulate": compiled("accumulate_slice", accumulate, at | {"FIRST": True, "WITH_T": True}),
    "accumulate, plain": compiled("accumulate_plain_slice", sizes["plain"], {
        "ROWS": 1, "BLOCK": sizes["plain"]["block"], "LABEL": True, "WITH_T": True}),
    "weights, plain": compiled("weigh_plain_slice", sizes["plain_basis"], {
        "ROWS": 1, "BLOCK": sizes["plain_basis"]["block"], "LABEL": True, "WITH_SUM": True, "RAGGED": True}),
    "accumulate, everything": compiled("accumulate_slice", accumulate, at | every | {
        "FIRST": False, "WITH_T": True, "WITH_R": True, "RANK": True, "WITH_SUM": True, "WITH_QE": True, "BEST": 20,
        "TOP": 32, "BLOCK": 2048}),
    "accumulate with weights": compiled("accumulate_slice", sizes["best"], at | {
        "BASIS0": 1, "BASIS1": 2, "BLOCK": sizes["best"]["block"], "WITH_T": True}),
    "accumulate with weights, plain": compiled("accumulate_plain_slice", sizes["plain"], {
        "ROWS": 1, "BLOCK": sizes["plain"]["block"], "LABEL": True, "WITH_T": True, "BASES": True}),
    "accumulate, best of groups": compiled("accumulate_slice", accumulate, at | {
        "FIRST": True, "GROUP": 64, "WITH_SUM": True}),
    "logits_grad": compiled("logits_grad_slice", logits_grad, back),
    "logits_grad, everything": compiled("logits_grad_slice", logits_grad, back | every | {
        "PLOGP": True, "PD": True, "PM": True, "EXCESS": True,
        "AHEAD": True, "P2": True, "Q": True, "ONE": True}),
    "products and accumulate": compiled("accumulate_products", gemm, {
        "ROWS": gemm["rows"], "BLOCK": gemm["entries"], "INNER": gemm["inner"], "GROUP": gemm["group"],
        "LABEL": True, "WITH_T": True}),
    "merge": compiled("merge_parts", look, {"WITH_T": True, "REF": True, "PARTS": 64, "ROWS": 16}),
    "second look": compiled("look_again", look, twice | {"JSD": True, "KL_MIXTURE": True}),
    "second look, everything": compiled("look_again", look, twice | {
        "BIAS": True, "CAP": True, "REF_BIAS": True, "REF_CAP": True,
        "RAW": True, "JSD": True, "KL_MIXTURE": True, "REVERSE_KL_MIXTURE": True, "EXCESS": True,
        "ACCEPTANCE": True, "TOTAL_VARIATION": True, "AHEAD": True}),
    "scaled": compiled("scaled", look, {"CONVERTS": True, "BLOCK": 4096}),
    "rescale": compiled("rescale", look, {"GAINS": True, "BLOCK": 1024}),
    "best of groups": compiled("best_of_groups", look, {"GROUPS": 4096, "GROUP": 64, "LANES": 64}),
    "keys": compiled("decode", small, {"BLOCK": 1024}),
    "dot": compiled("dot", small, {"BLOCK": 1024}),
    "dot, of sets": compiled("dot", small, {"OF": True, "BLOCK": 1024}),
    "weighted": compiled("add_weighted", small, {"BLOCK": 1024}),
    "scatter": compiled("scatter", small, {"PLACES": 8, "BLOCK": 1024}),
    "scatter, of sets": compiled("scatter", small, {"OF": True, "PLACES": 8, "BLOCK": 1024}),
    "noise": compiled("look_for_tokens", alone, {"NOISE": True, "LANES": 32, "BLOCK": 256}, **exact),
    "noise, impossible entries": compiled("look_for_tokens", alone, {
        "NOISE": True, "MASKED": True, "LANES": 32, "BLOCK": 256}, **exact),
    "ranks": compiled("count_above", alone, {"PARTS": 64, "BLOCK": 1024}),
    "draw": compiled("draw_tokens", alone, {"PARTS": 64, "LANES": 64}, **exact),
    "draw, rules": compiled("draw_tokens", alone, {"RULES": True, "PARTS": 64, "LANES": 64}, **exact),
    "finish": compiled_function(finisher(everything, True, True).kernel, small, {}),
    "label's coefficient": compiled_function(
        label_coefficient_kernel(
            ("p", "plogp", "pD"),
            ("m", "log_s", "logprob", "label_logit", "label_ref", "shift", "log_ratio", "m_ref", "log_s_ref"),
            0.5).kernel, small, {}),
}))
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_compiles_for_hopper_without_spills_or_atomics(kernels):
    """Spills are in the machine code alone: what comes before it has as many registers as it likes.

    Those that write weights and those of sets are compiled as they are launched, in tests/bench/gpu/test_counts.py.
    """
    for name, found in kernels.items():
        assert found["code"] > 20, name
        assert found["spills"] == 0, name
        assert found["atomics"] == 0, name


def test_slices_are_read_sixteen_bytes_at_a_time(kernels):
    over = ("accumulate with weights", "accumulate with weights, plain")
    accumulating = ("accumulate", "accumulate, plain", "weights, plain", *over)
    for name in (*accumulating, "logits_grad", "second look", "scaled"):
        assert kernels[name]["wide"] > 0, name


def test_a_gradient_over_its_own_input_waits_for_all_reads(kernels):
    assert kernels["logits_grad"]["barriers"] > 0
    assert kernels["accumulate with weights"]["barriers"] > 0
    assert kernels["accumulate with weights, plain"]["barriers"] > 0


def test_noise_is_rounded_as_everywhere_else(kernels):
    for name in ("noise", "draw, rules"):
        assert kernels[name]["fused"] == 0, name


def test_products_use_the_tensor_cores(kernels):
    assert kernels["products and accumulate"]["wgmma"] > 0
