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
from bench.gpu_counts.calls import CALLS
from bench.gpu_counts.claimed import claimed
from bench.gpu_counts.count import first_in_capture, recorded
from bench.gpu_counts.kernels import Launch, compiled
from bench.gpu_counts.recording import Operator, Wait

HOT = {"accumulate_slice", "logits_grad_slice"}
found, kernels = {}, {}
with claimed() as recording:
    for name, call in CALLS.items():
        late = first_in_capture(call, recording) if call.capture else []
        recorded(call, recording)
        found[name] = {
            "launches": recording.launches,
            "waits": len(list(recording.of(Wait))),
            "late": late,
            "converted": sum(x.nbytes for x in recording.of(Operator) if x.converts) / 1e6,
        }
        for launch in recording.of(Launch):
            if name in ("loss", "values") and launch.name in HOT and f"{name} {launch.name}" not in kernels:
                kernels[f"{name} {launch.name}"] = compiled(launch).record()
print(json.dumps({"calls": found, "kernels": kernels}))
"""

# kernel: registers, instructions an entry, barriers a block
KERNELS = {
    "loss accumulate_slice": (48, 29.0, 6),
    "loss logits_grad_slice": (38, 21.5, 1),
    "values accumulate_slice": (78, 31.0, 8),
}
LAUNCHES = {
    "loss": 75, "loss-qwen": 166, "values": 29, "values-qwen": 50, "frozen": 101, "ppo": 364, "sample": 21,
    "loss-default": 217, "autocast": 260, "fp16": 240, "upstream": 77,
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
