"""The GPU benchmark from end to end on toy shapes: under Triton's interpreter where there is no GPU."""

import copy
import faulthandler
import json
import os
import subprocess
import sys
import time
import unittest
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu import extras
from bench.gpu import rows as gpu_rows
from bench.gpu import run as gpu
from bench.gpu.measure import Apart, Subject, wrong
from bench.gpu.rows import ROWS, errors_of, make_operands, methods, oracle
from bench.gpu.timing import Bench
from bench.grade import run as grade
from bench.harness import environment, read_lines
from logitless.vocab.backends.triton import tuned as triton_tuned
from tests.support import forked
from tests.support.bench import wrong_methods

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`bench/gpu.sh` on toy shapes, which must end well."""
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    command = ["bash", str(ROOT / "bench/gpu.sh"), *arguments, "--tiny"]
    environment |= {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(("loss",), id="one row"),
        pytest.param(
            ("loss-qwen", "sample", "values", "values-qwen", "frozen", "ppo", "sets", "long"),
            id="rest",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dry_run(rows, tmp_path):
    out = tmp_path / "gpu.jsonl"
    same = ("table", "--rounds", "1", "--methods", "logitless,Liger")
    done = run(*same, "--rows", ",".join(rows), "--out", str(out))
    about, device, *records = read_lines(out)
    assert device["kind"] == "gpu-device"
    assert device["rate"] > 0
    assert about["versions"]["torch"] == torch.__version__
    assert about["threads"] == torch.get_num_threads()
    ours = {r["case"]: r for r in records if r["method"] == "logitless"}
    assert set(ours) == set(rows)
    for record in ours.values():
        assert record["status"] == "ok", record
        assert record["to_bare"] > 0
        assert max(record.get("errors", {"": 0.0}).values()) < 1e-5  # fp32 on a CPU
    if find_spec("liger_kernel") is None:
        absent = {r["reason"] for r in records if r["method"] == "Liger"}
        assert absent <= {"ModuleNotFoundError: No module named 'liger_kernel'"}
    assert done.stdout.count("| **") == len(rows)
    assert out.with_suffix(".png").exists() or "no plot: matplotlib is not installed" in done.stdout


@pytest.mark.slow
def test_what_there_is_no_time_for_is_named(tmp_path):
    out = tmp_path / "gpu.jsonl"
    status, written = forked.module("bench.gpu.run", "--seconds", 0.1, "--rows", "values", "--out", out, "--tiny")
    assert status == 1, written
    about, check, *records = read_lines(out)
    assert about["kind"] == "environment"
    assert check["kind"] == "gpu-check"
    assert 1 <= len(check["passed"]) <= 2  # each process begins one, and may end it in no time
    assert len(check["left"]) > 50
    assert {(r["status"], r["reason"]) for r in records} == {("not run", "no time left")}
    assert "| not run: no time left |" in written
    assert "not run: values: logitless: no time left" in written
    names, *cases, kernels = read_lines(tmp_path / "gpu.cases.jsonl")
    ended = [case["ended"] for case in cases if "ended" in case]
    assert ended == check["passed"] == names["names"][: len(ended)]
    assert kernels["kernels"]


def test_a_check_that_hangs_is_killed():
    """Not only this process ends: those that it has started would keep the GPU."""
    quick, *hanging = [
        subprocess.Popen([sys.executable, "-c", code]) for code in ("", *["import time; time.sleep(60)"] * 2)
    ]
    quick.wait()
    assert gpu._ended([hanging[0], quick, hanging[1]], time.monotonic() + 0.1) == [-9, 0, -9]


def test_a_case_that_ends_its_process_is_named_and_the_others_kept(tmp_path):
    report = tmp_path / "cases.jsonl"
    (tmp_path / "test_some.py").write_text("""if True:
        import os, unittest
        def test_right(device): pass
        def test_wrong(device): raise ValueError("off by one")
        def test_elsewhere(device): raise unittest.SkipTest("not here")
        def test_hangs(device): os._exit(9)
        test_last = test_wrong""")
    command = ("tests.support.vocab.triton_run", "--device", "cpu", "--folder", tmp_path, "--report", report)
    assert forked.module(*command)[0] == 9
    lines = read_lines(report)
    names = (f"test_some.py::test_{x}" for x in ("right", "elsewhere", "wrong", "hangs", "last"))
    outcomes = zip(("passed", "skipped", "failed", "broken", "left"), names, strict=True)
    assert gpu.outcomes(lines) == {outcome: [name] for outcome, name in outcomes}
    assert any("off by one" in line.get("error", "") for line in lines)


def test_a_file_that_cannot_be_imported_is_a_case_that_fails(tmp_path):
    from tests.support.vocab import triton_run  # which needs Triton

    (tmp_path / "test_broken.py").write_text("import a_package_that_is_not_here")
    (tmp_path / "test_whole.py").write_text("def test_right(device): pass")
    cases = triton_run.collected(tmp_path)
    assert list(cases) == ["test_broken.py", "test_whole.py::test_right"]
    how, why = triton_run.outcome(cases["test_broken.py"], "cpu")
    assert (how, "a_package_that_is_not_here" in why) == ("FAILED", True)
    assert triton_run.outcome(cases["test_whole.py::test_right"], "cpu") == ("ok", "")


def test_a_case_that_breaks_the_device_is_the_last_of_its_process(tmp_path, monkeypatch):
    """An error of a kernel is heard by whoever waits next, and by all that come later: it is the case's own."""
    from tests.support.vocab import triton_run  # which needs Triton

    broken = []

    def synchronize():
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def wrong(device):
        raise AssertionError("off by one")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    report = tmp_path / "cases.jsonl"
    cases = {"right": len, "wrong": wrong, "breaks": broken.append, "after": len}
    cases = {name: lambda device, case=case: case(device) for name, case in cases.items()}
    assert triton_run.run_cases(cases, "cuda", 100.0, report) == (3, 2)
    found = gpu.outcomes(read_lines(report))
    assert found == {"passed": ["right"], "skipped": [], "failed": ["wrong", "breaks"], "broken": [], "left": ["after"]}


def test_a_profiled_call_that_breaks_the_device_ends_its_process(monkeypatch):
    """Else the next call, which is right, would be the one that fails."""
    from bench.gpu import profile  # which needs Triton

    bench = Bench("cpu", time.monotonic() + 100)

    def build():
        monkeypatch.setattr(bench, "wait", lambda: 1 / 0)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(profile, "CALLS", {"breaks": SimpleNamespace(build=build)})
    with pytest.raises(ZeroDivisionError):
        profile.Profiled(bench).profile("breaks")


def test_a_size_that_breaks_the_device_ends_tuning(monkeypatch):
    """Else all that is left would be passed over, and the file say that it was tried."""
    from bench.gpu import tune  # which needs Triton

    trial = tune.Trial(Bench("cpu", time.monotonic() + 100), tune.TINY)
    assert trial.seconds(lambda: 1 / 0) == float("inf")
    monkeypatch.setattr(trial.bench, "wait", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trial.seconds(lambda: 1 / 0)


@pytest.mark.slow
def test_one_failing_peer_costs_nothing_else(tmp_path, monkeypatch, capsys):
    """Ours comes first and is in the file; a process that died is begun anew, and later rows run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "methods", wrong_methods.gpu_methods)
    out = tmp_path / "gpu.jsonl"
    assert gpu.main(["table", "--tiny", "--rows", "values,values-qwen", "--rounds", "2", "--out", str(out)]) == 0
    records = read_lines(out)[2:]
    assert [r["method"] for r in records[:4]] == ["bare GEMMs", "logitless"] * 2
    assert [r["case"] for r in records] == [c for n in (2, 4) for c in ["values"] * n + ["values-qwen"] * n]
    found = {r["method"]: r for r in records if r["case"] == "values-qwen"}
    assert found["late"]["reason"] == "OutOfMemoryError: in its turns"
    assert found["dead"]["reason"] == "the process died (exit code 3)"
    assert found["in bits"]["errors"]["entropy"] > 1
    for name in ("bare GEMMs", "logitless", "in bits", "torch"):
        assert found[name]["status"] == "ok", found[name]
        assert len(found[name]["seconds"]) == len(found[name]["bare_seconds"]) == 2
    assert found["bare GEMMs"]["to_bare"] == 1.0
    capsys.readouterr()
    out.with_suffix(".png").unlink(missing_ok=True)
    assert gpu.main(["--from", str(out)]) == 0
    again = capsys.readouterr().out
    assert again.count("| **") == 2
    assert out.with_suffix(".png").exists() or "no plot" in again


def test_a_file_that_ends_early_still_gives_a_table(tmp_path, capsys):
    out = tmp_path / "gpu.jsonl"
    row = gpu.about(ROWS["loss"], "bare GEMMs", tiny=False, device="cuda")
    times = {"median_s": 0.002, "to_bare": 1.0, "peak_mb": 1.0}
    gpu.write_line(out, row | {"method": "bare GEMMs", "method_kind": "floor", "status": "ok"} | times)
    assert gpu.main(["--from", str(out)]) == 1
    written = capsys.readouterr().out
    assert "4,096 x 4,096 x 128,256 | | not run: not in the file" in written
    assert "not run: loss: logitless: not in the file" in written
    out.write_text("")
    assert gpu.main(["--from", str(out)]) == 1


def record(method, kind, **numbers):
    times = {"status": "ok", "median_s": 0.002, "to_bare": 1.0, "peak_mb": 0.0}
    return (
        gpu.about(ROWS["loss"], method, tiny=False, device="cuda")
        | {"method": method, "method_kind": kind}
        | times
        | numbers
    )


def test_a_gradient_that_is_handed_over_in_fp32_counts_as_that():
    hidden, weight = 4096 * 4096 / gpu.MB, 128_256 * 4096 / gpu.MB
    assert record("logitless", "ours")["gradient_mb"] == pytest.approx(2 * hidden + 2 * weight)
    assert record("logitless, fp32 dW", "ours")["gradient_mb"] == pytest.approx(2 * hidden + 4 * weight)


@pytest.mark.parametrize(
    ("numbers", "status", "line"),
    [
        ({"to_bare": 1.05}, 0, ""),
        ({"to_bare": 1.07}, 2, "missed: loss: 1.070 x the floor, to reach 1.06 x"),
        ({"peak_mb": 2303.0}, 2, "missed: loss: 1,219 MB above, to reach 1,181 MB"),
        ({"to_bare": 1.07, "status": "wrong", "reason": "loss is off by 1"}, 1, "wrong: loss is off by 1"),
    ],
)
def test_a_missed_target_is_named_and_the_exit_status(numbers, status, line, tmp_path, capsys):
    """The bare GEMMs of the table are the fastest of this run."""
    out = tmp_path / "gpu.jsonl"
    floors = record("bare GEMMs", "floor", median_s=0.003), record("bare GEMMs, narrow results", "floor")
    for one in (*floors, record("logitless", "ours", **numbers)):
        gpu.write_line(out, one)
    assert gpu.main(["--from", str(out)]) == status
    written = capsys.readouterr().out
    assert line in written
    assert "missed:" in line or "missed:" not in written
    assert status == 1 or "2.00 ms" in written


@pytest.mark.parametrize(
    ("name", "numbers", "status", "line"),
    [
        (
            "logitless, fp32 dW",
            {"status": "wrong", "reason": "grad_weight is off by 1"},
            1,
            "wrong: loss: logitless, fp32",
        ),
        ("logitless, weights", {"status": "failed", "reason": "no"}, 1, "failed: loss: logitless, weights: no"),
        ("logitless, CUDA graph", {"status": "not run", "reason": "no time left"}, 1, "not run: loss: logitless, CUDA"),
        ("logitless, QuACK", {"status": "absent", "reason": "BackendError: it needs quack-kernels"}, 0, ""),
    ],
)
def test_all_of_ours_count(name, numbers, status, line, tmp_path, capsys):
    out = tmp_path / "gpu.jsonl"
    for one in (record("bare GEMMs", "floor"), record("logitless", "ours"), record(name, "ours", **numbers)):
        gpu.write_line(out, one)
    assert gpu.main(["--from", str(out)]) == status
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("numbers", "status", "line"),
    [
        ({"to_bare": 1.04}, 0, ""),
        ({"to_bare": 0.99}, 2, "missed: loss: logitless 1.000 x, to be faster than QuACK's 0.990 x"),
        ({"to_bare": 1.01}, 2, "missed: loss: logitless, fp32 dW 1.020 x, to be faster than QuACK's 1.010 x"),
        ({"status": "absent", "reason": "not installed"}, 0, ""),
    ],
)
def test_a_rival_is_to_be_slower_where_it_was_measured(numbers, status, line, tmp_path, capsys):
    out, ours = (
        tmp_path / "gpu.jsonl",
        (record("logitless", "ours"), record("logitless, fp32 dW", "ours", to_bare=1.02)),
    )
    for one in (record("bare GEMMs", "floor"), *ours, record("QuACK", "peer", **numbers)):
        gpu.write_line(out, one)
    assert gpu.main(["--from", str(out)]) == status
    written = capsys.readouterr().out
    assert line in written
    assert "| 1.06 x, faster than QuACK |" in written


@pytest.mark.parametrize(("ended", "status"), [(("a", "b"), 0), (("a",), 1)])
def test_a_check_of_which_a_case_was_not_run_has_not_passed(ended, status, monkeypatch, capsys):
    class Cases:
        """A process of the suite that ends well."""

        def __init__(self, command):
            report = Path(command[command.index("--report") + 1])
            gpu.write_line(report, {"names": ["a", "b"]})
            for name in ended:
                gpu.write_line(report, {"begun": name})
                gpu.write_line(report, {"ended": name, "error": "", "skipped": ""})

        def wait(self, timeout=None):
            return 0

        def kill(self): ...

    monkeypatch.setattr(subprocess, "Popen", Cases)
    assert gpu.check("cpu", 1.0, None) == status
    assert f"{len(ended)} cases passed, 0 skipped, 0 failed, {2 - len(ended)} not run" in capsys.readouterr().out


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_a_check_skips_a_kernel_that_the_gpu_does_not_run(capability, monkeypatch):
    """Which needs descriptors of blocks, from 9.0 on, and the shared memory that 12.0 does not have."""
    weights = import_module("tests.vocab.backends.triton.on_device.test_weights")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(unittest.SkipTest), weights.weights_written("cuda"):
        pass


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_ours_without_the_kernel_is_not_measured_under_its_name(capability, monkeypatch):
    """Below 9.0 the launch sizes may say what they like: slices are read, as without the kernel anywhere."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    row, on_gpu = ROWS["loss"], SimpleNamespace(device=SimpleNamespace(type="cuda"))
    with pytest.raises(gpu_rows.Absent, match="compute capability 9 or 10"):
        gpu_rows.ours_with_weights(row, None, 1)(row.case, {"weight": on_gpu})
    assert callable(gpu_rows.ours_with_weights(row, None, 0)(row.case, {"weight": on_gpu}))


def test_toy_shapes_have_nothing_to_reach():
    row = gpu.about(ROWS["loss"], "logitless", tiny=True, device="cpu")
    assert (row["time_limit"], row["memory_limit_mib"]) == (None, None)


def test_times_are_divided_by_the_fastest_bare_gemms():
    def floors(row, backend):
        for name, pause in (("slow", 0.02), ("fast", 0.001), ("late", 0.03)):
            yield gpu_rows.peers.Method(name, lambda case, t, pause=pause: lambda: time.sleep(pause) or {}, "floor")

    subject = Subject(Bench("cpu", time.monotonic() + 100), 3, None, True, 1, floors)
    faulthandler.cancel_dump_traceback_later()
    found = {name: subject.measure("values", name) for name in ("slow", "fast")}
    assert {x["bare"] for x in found.values()} == {"fast"}
    assert found["fast"]["to_bare"] == 1.0
    assert found["slow"]["to_bare"] > 2


@pytest.mark.parametrize("name", list(ROWS))
def test_every_kind_of_bare_gemms_has_the_rows_products(name):
    row = ROWS[name]
    t = make_operands(row, row.tiny, "cpu", torch.float32)
    size = row.tiny.tokens * row.tiny.hidden * row.tiny.vocab
    for method in methods(row, None):
        if method.kind == "floor":
            run = method.build(row.case, t)
            with FlopCounterMode(display=False) as counter:
                run()
            assert counter.get_total_flops() == 2 * row.case.gemms * size, method.name


def test_a_call_that_hangs_is_ended_and_the_next_has_a_new_process():
    subject = Apart(wrong_methods.Sleeper)
    try:
        assert subject.call("sleep", 0.0, timeout=100)["status"] == "ok"
        assert subject.call("sleep", 100.0, timeout=0.2) == {"status": "failed", "reason": "no answer within 0.2 s"}
        assert subject.call("sleep", 0.0, timeout=100)["status"] == "ok"
    finally:
        subject.stop()


def test_ours_must_be_right_and_peers_alike():
    values = torch.tensor([-12.0, -3.0], dtype=torch.double)
    truth = {"logprob": values, "loss": -values.mean(), "lse": values, "grad_hidden": torch.ones(1)}
    limits = dict.fromkeys(("logprob", "loss", "lse"), (4e-5, 2e-3, 12.0)) | {"grad_hidden": (0.01, 0.5, 1.0)}
    for name, (little, rounding, nonsense) in limits.items():
        assert wrong("ours", truth, {name: little}) == ""
        assert wrong("ours", truth, {name: rounding}) == f"{name} is off by {rounding:.1e}"
        assert wrong("peer", truth, {name: rounding}) == ""
        assert wrong("peer", truth, {name: nonsense}) == f"{name} is off by {nonsense:.1e}"
        assert wrong("peer", truth, {name: float("inf")}) == f"{name} is off by inf"  # as errors_of has NaN


def test_every_logitless_is_ours():
    for row in ROWS.values():
        for backend in (None, "triton"):
            kinds = {m.name: m.kind for m in methods(row, backend) if m.name.startswith("logitless")}
            assert set(kinds.values()) == {"ours"}, kinds


@pytest.mark.parametrize("name", ["loss", "frozen", "ppo"])
def test_the_floor_multiplies_plausible_numbers(name, monkeypatch):
    """In bf16, on a stand-in for a GPU's products with fp32 results."""
    largest = []

    def product(a, b, out):
        largest.append(max(float(x.float().abs().nan_to_num(float("inf")).max()) for x in (a, b)))
        assert a.dtype == b.dtype == torch.bfloat16
        out.copy_(a.float() @ b.float())

    for one in ("product", "add_product"):
        monkeypatch.setattr(gpu_rows, one, product)
    monkeypatch.setattr(gpu_rows, "operand_dtype", lambda hidden, *_: hidden.dtype)
    row = ROWS[name]
    gpu_rows.bare_gemms(row, make_operands(row, row.tiny, "cpu", torch.bfloat16))()
    assert len(largest) == row.case.gemms
    assert max(largest) < 10


def test_peers_versions_are_in_the_file():
    assert {"liger-kernel", "quack-kernels", "cut-cross-entropy", "trl"} <= set(environment()["versions"])


def test_a_part_that_raises_ends_neither_its_others_nor_other_parts(tmp_path, monkeypatch):
    def raises(*_):
        yield {"kind": "gpu-extra", "name": "first", "status": "ok"}
        raise OSError("no disk")

    monkeypatch.setitem(extras.PARTS, "profiles", raises)
    monkeypatch.setattr(extras, "methods", wrong_methods.logps_methods)
    out = tmp_path / "extras.jsonl"
    extras.extras(out, True, "cpu", 300.0, ["profiles", "logps"])
    found = {r["name"]: r.get("reason", r["status"]) for r in read_lines(out)[1:]}
    assert found == {
        "first": "ok", "profiles": "OSError: no disk", "logps broken": "RuntimeError: not on this machine",
        "logps tutorial batch": "ok",
    }  # fmt: skip


def test_grade_is_measured_on_the_device(monkeypatch):
    commands = []
    monkeypatch.setattr(extras, "run", lambda clock, name, command: commands.append(command) or {})
    list(extras.grade(extras.Clock(1.0), False, "cuda"))
    sizes = grade.sizes_of(grade.options(commands[0][3:]))
    assert (sizes.device, sizes.config("ste").device, sizes.hidden) == ("cuda", "cuda", 2560)


@pytest.mark.slow
def test_extras_say_what_they_found_or_why_not(tmp_path):
    out = tmp_path / "extras.jsonl"
    run("extras", "--parts", "logps,profiles", "--out", str(out))
    _, *records = read_lines(out)
    assert {r["status"] for r in records} == {"ok"}
    assert records[-1]["result"]["real"]["device"] == "cpu"
    run("extras", "--parts", "profiles", "--seconds", "1", "--out", str(tmp_path / "late.jsonl"))
    assert read_lines(tmp_path / "late.jsonl")[-1]["reason"] == "no time left"


@pytest.mark.slow
def test_tuning_writes_sizes(tmp_path):
    out = tmp_path / "sizes.json"
    run("tune", "--out", str(out))
    sizes = json.loads(out.read_text("utf-8"))
    assert sizes["accumulate"]["block"] in (256, 512)
    assert set(sizes) == set(triton_tuned.table("default"))


def test_tuning_again_adds_to_what_was_tried(tmp_path):
    from bench.gpu import tune  # which needs Triton

    out = tmp_path / "sizes.json"
    tune.write(out, triton_tuned.table("interpreter"), "cpu", ["first"])
    tune.write(out, json.loads(out.read_text("utf-8")), "cpu", ["second", "third"])
    tried = [run.partition("tried: ")[2] for run in json.loads(out.read_text("utf-8"))["about"].split("; interpreter")]
    assert tried == ["first", "second, third"]


def test_a_gpus_own_sizes_are_written_over(tmp_path, monkeypatch):
    """Where the library looks for them; toy shapes find none, and any other file that is there stays."""
    file, written = tmp_path / "nvidia-h200.json", []
    file.write_text("{}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "sizes_file", lambda _: file)
    monkeypatch.setattr(gpu, "run", lambda options, *_: written.append(options.out) or 0)
    assert gpu.main(["tune"]) == 0
    for arguments in (["tune", "--tiny"], ["tune", "--out", str(file)], ["table", "--out", str(file)]):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
    assert written == [file]


def test_tuning_no_part_says_which_there_are(tmp_path, capsys):
    from bench.gpu import tune  # which needs Triton

    assert tune.tune(tmp_path / "sizes.json", True, "cpu", 100, ["acumulate"]) == 2
    assert "begins with acumulate; they are" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["plain", "plain_basis", "best", "accumulate"])
def test_a_kernel_is_tuned_by_calls_that_run_it(name, monkeypatch):
    from bench.gpu import tune  # which needs Triton
    from logitless.vocab.backends.triton.backend import Running

    ran, kind = set(), Running.kind.fget

    def seen(self):
        ran.add(kind(self))
        return kind(self)

    monkeypatch.setattr(Running, "kind", property(seen))
    monkeypatch.setattr(tune.Trial, "seconds", lambda _, step: float(step() is None))
    sizes = copy.deepcopy(triton_tuned.table("interpreter"))
    tune.Parts(Bench("cpu", time.monotonic() + 100), sizes, True).all()[name]()
    assert ran == {name}


def test_slices_are_tuned_where_the_kernel_of_the_products_is_used(monkeypatch):
    """Which would leave none to read: each size would take the same time."""
    from bench.gpu import tune  # which needs Triton

    sizes, seen = copy.deepcopy(triton_tuned.table("interpreter")), set()
    both = sizes["sums"], sizes["weights"]
    for kind in both:
        kind["used"] = 1
    monkeypatch.setattr(tune.Trial, "seconds", lambda *_: seen.add(tuple(kind["used"] for kind in both)) or 1.0)
    parts = tune.Parts(Bench("cpu", time.monotonic() + 100), sizes, True)
    for name in ("plain", "logits_grad", "plain_basis", "slices that are not kept"):
        parts.all()[name]()
    assert seen == {(0, 0)}
    assert [kind["used"] for kind in both] == [1, 1]


def test_a_tuning_that_is_ended_leaves_what_it_has_found(tmp_path, monkeypatch):
    from bench.gpu import tune  # which needs Triton

    def found(parts):
        def ends():
            parts.sizes["overlap"] = 2
            raise KeyboardInterrupt

        return {"first": lambda: parts.sizes.update(overlap=1), "second": ends}

    monkeypatch.setattr(tune.Parts, "all", found)
    out, before = tmp_path / "sizes.json", dict(triton_tuned.table("interpreter"))
    with pytest.raises(KeyboardInterrupt):
        tune.tune(out, True, "cpu", 100.0, [""])
    sizes = json.loads(out.read_text("utf-8"))
    assert sizes["overlap"] == 1
    assert sizes["about"].endswith("tried: first")
    assert triton_tuned.table("interpreter") == before
    assert tune.tune(tmp_path / "none.json", True, "cpu", -1.0, [""]) == 0
    assert not (tmp_path / "none.json").exists()


def test_sizes_are_those_of_the_gpu(tmp_path, monkeypatch):
    (tmp_path / "sizes").mkdir()
    for name in ("default", "nvidia-h200"):
        (tmp_path / "sizes" / f"{name}.json").write_text(json.dumps({"about": name}))
    monkeypatch.setattr(triton_tuned, "files", lambda _: tmp_path)
    triton_tuned.table.cache_clear()
    assert triton_tuned.table("NVIDIA H200")["about"] == "nvidia-h200"
    assert triton_tuned.table("NVIDIA B200")["about"] == "default"
    triton_tuned.table.cache_clear()


def test_the_correctness_suite_needs_no_pytest():
    code = """if True:
        import sys
        sys.modules["pytest"] = None
        from tests.support.vocab import triton_run
        assert len(triton_run.collected(triton_run.FOLDER)) > 100"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--rows", "los"), "unknown row 'los'"),
        (("--methods", "logitless,Lig,Lager", "--rows", "loss"), "no method of loss begins with 'Lager'; they are"),
        (("--out", __file__), "exists already"),
        (("--out", __file__, "check"), "exists already"),
        (("tune", "--tiny"), "sizes/interpreter.json exists already"),
        (("check",), "torch sees no GPU"),
        (("--out", "nowhere.jsonl", "extras", "--tiny", "--parts", "logs"), "unknown part 'logs'"),
    ],
)
def test_bad_input(arguments, line, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        gpu.main(list(arguments))
    assert stop.value.code == 2
    assert line in capsys.readouterr().err


def test_a_result_that_is_wrong_is_seen():
    row = ROWS["values"]
    tensors = make_operands(row, row.tiny, "cpu", torch.float32)
    expected = oracle(row, tensors)
    right = {name: x.float() for name, x in expected.items()}
    assert max(errors_of(expected, right).values()) < 1e-5
    assert errors_of(expected, right | {"entropy": right["entropy"] + 0.5})["entropy"] > 0.4
    assert errors_of(expected, {"logprob": right["logprob"]})["entropy"] == float("inf")
    assert errors_of(expected, right | {"logprob": right["logprob"] * float("nan")})["logprob"] == float("inf")
