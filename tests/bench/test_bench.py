"""The benchmark itself: it times what is right, refuses what is wrong, and measures memory."""

import json
import os
import pickle
import sys

import numpy as np
import pytest
import torch

import logitless as ll
from bench import cases, gate, harness, in_turn, peers, plot, ratios, run
from logitless.vocab.backends import logits
from logitless.vocab.backends.compiled import library, stream
from logitless.vocab.call import compiled_support
from tests.support.bench import wrong_methods

TINY = cases.SHAPES["tiny"]


@pytest.fixture(scope="module")
def records():
    by_name = {m.name: m for m in peers.METHODS["entropy"]}
    methods = [
        by_name["bare GEMMs"],
        by_name["torch"],
        peers.Method("wrong", wrong_methods.entropy_in_bits),
        peers.Method("broken", wrong_methods.raises),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LEAST_SECONDS", 0.02)
        return run.run_case(cases.CASES["entropy"], TINY, methods, rounds=3)


def test_a_right_method_is_timed_and_measured(records):
    dense = records[1]
    assert dense["status"] == "ok"
    assert len(dense["seconds"]) == 3
    assert dense["least_s"] == min(dense["seconds"]) <= dense["most_s"]
    assert dense["to_torch"] == 1.0
    assert records[0]["to_bare"] == 1.0
    assert set(dense["errors"]) == {"logprob", "entropy"}
    assert max(dense["errors"].values()) < 1e-5


def test_ratios_are_over_the_fastest_bare_products():
    def record(method, kind, *seconds):
        return {"method": method, "method_kind": kind, "status": "ok", "seconds": list(seconds)}

    found = [
        record("bare GEMMs", "floor", 2.0, 2.0, 2.0),
        record("bare GEMMs, vocabulary slices", "floor", 1.0, 1.0, 3.0),
        record("logitless", "ours", 1.2, 1.1, 3.6),
        record("torch", "peer", 4.0, 4.4, 4.0),
    ]
    ratios.add_ratios(found)
    assert ratios.fastest_floor(found) is found[1]
    assert [r["to_bare"] for r in found] == [2.0, 1.0, pytest.approx(1.1), 4.0]
    assert found[2]["to_bare_spread"] == pytest.approx([1.1, 1.2])
    assert found[2]["to_torch"] == pytest.approx(1.1 / 4)


def test_one_round_for_methods_whose_calls_are_all_far_from_the_fastest_floor():
    def record(method, kind, once, *seconds):
        return {"method": method, "method_kind": kind, "status": "ok", "once_s": once, "seconds": list(seconds)}

    fastest, failed = record("bare GEMMs", "floor", 1.0, 1.1), {"method_kind": "floor", "status": "failed"}
    slower = record("bare GEMMs, vocabulary slices", "floor", 1.4, 1.3)
    busy, new_memory = record("A", "peer", 1.2, 9.0), record("B", "peer", 2.0, 1.2)
    slow, ours, plain = record("C", "peer", 2.0, 1.3), record("logitless", "ours", 9.0), record("torch", "peer", 9.0)
    records = [fastest, failed, slower, busy, new_memory, slow, ours, plain]
    assert [r for r in records if r is not failed and run.far_behind(r, records)] == [slower, slow]
    assert not run.far_behind(slow, [slow])  # which bare products were not run with


def test_a_far_method_is_not_started_again(monkeypatch):
    monkeypatch.setattr(run, "FAR", 0.0)
    methods = [m for m in peers.METHODS["entropy"] if m.name in ("bare GEMMs", "torch")]
    records = run.run_case(cases.CASES["entropy"], TINY, methods, rounds=2)
    assert {r["method"]: len(r["seconds"]) for r in records} == {"bare GEMMs": 1, "torch": 2}


def test_a_result_file_is_read_with_todays_floor(records):
    stale = [r | {"to_bare": 0.5} for r in records]
    assert plot.by_case(stale)["entropy"][0]["to_bare"] == 1.0


@pytest.mark.parametrize("name", cases.CASES)
def test_the_summary_shows_the_backend_that_a_call_takes_unasked(name, monkeypatch):
    if stream_is_missing():
        pytest.skip("calls add logits up in registers where a compiler makes a library for the processor")
    monkeypatch.setattr(stream, "is_intel", lambda: False)  # there it is measured
    monkeypatch.setattr(logits, "has_bf16_tiles", lambda x: False)
    shape, case = cases.SHAPES["full"], cases.CASES[name]
    hidden, weight, other = torch.empty(shape.tokens, shape.hidden), *(torch.empty(shape.vocab, shape.hidden),) * 2
    for leaf in case.wrt:
        {"hidden": hidden, "weight": weight}[leaf].requires_grad_()
    told = ll.explain(
        *(hidden, ll.LMHead(weight), torch.zeros(shape.tokens, dtype=torch.long)),
        loss=name in ("loss", "ppo"),
        want={"loss": ("logprob",), "ppo": ("logprob", "entropy", "kl")}.get(name) or peers._STATISTICS[name],
        reference=(hidden.detach(), ll.LMHead(other.detach())) if "ref_hidden" in case.takes else None,
    )
    assert told.backend == "compiled"
    assert told.slices.in_products


def stream_is_missing():
    processor = torch.backends.cpu.get_cpu_capability()
    return compiled_support.why_not("cpu") is not None or processor not in library.FLAGS


def test_a_wrong_method_is_reported_and_not_timed(records):
    wrong = records[2]
    assert wrong["status"] == "wrong"
    assert "entropy is off" in wrong["reason"]
    assert wrong["errors"]["logprob"] < 1e-5
    assert wrong["seconds"] == []


def test_a_method_that_raises_is_reported_in_one_line(records):
    assert records[3]["status"] == "failed"
    assert records[3]["reason"] == "RuntimeError: not on this machine"


def test_tables_and_plot_of_a_result_file(records, tmp_path):
    file = tmp_path / "result.jsonl"
    for record in [harness.environment(), *records]:
        harness.write_line(file, record)
    read = harness.read_lines(file)
    assert all(record["schema"] == harness.SCHEMA for record in read)
    assert "log-prob + entropy" in plot.summary_table(read)
    assert "wrong: entropy is off" in plot.full_table(read)
    plot.draw(read, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert str(os.getcwd()) not in json.dumps(read)


@pytest.mark.parametrize("name", cases.CASES)
def test_every_case_agrees_with_float64_chunk_by_chunk(name, tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "CHUNK", 20)  # does not divide 48 tokens
    case = cases.CASES[name]
    gate.write_oracle(case, TINY, tmp_path)
    outputs = peers.dense(case, cases.make_tensors(case, TINY))()
    assert set(outputs) == {file.stem for file in tmp_path.glob("*.npy")}
    assert {f"grad_{n}" for n in case.wrt} <= set(outputs)
    assert max(gate.errors_against(tmp_path, outputs).values()) < 2e-5


@pytest.mark.parametrize("name", cases.CASES)
def test_ours_passes_the_gate(name, tmp_path):
    case = cases.CASES[name]
    gate.write_oracle(case, TINY, tmp_path)
    outputs = peers.logitless(case, cases.make_tensors(case, TINY))()
    assert max(gate.errors_against(tmp_path, outputs).values()) < gate.LIMIT


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("build", [peers.bare_gemms, peers.vocab_gemms, peers.tile_gemms, peers.small_tile_gemms])
def test_floors_do_the_counted_matrix_products_and_no_more(name, build):
    from torch.utils.flop_counter import FlopCounterMode

    case = cases.CASES[name]
    run_once = build(case, cases.make_tensors(case, TINY))
    with FlopCounterMode(display=False) as counter:
        assert run_once() == {}
    assert counter.get_total_flops() == case.gemms * 2 * TINY.tokens * TINY.hidden * TINY.vocab


def test_gate_sees_a_small_row_beside_large_ones():
    expected = np.ones((100, 4))
    expected[0] = 1e6  # its rounding would hide every other row in a norm over the whole
    got = torch.from_numpy(expected.copy())
    assert gate.row_error(got, expected) == 0
    got[50] *= 1.01
    assert gate.row_error(got, expected) == pytest.approx(0.01)
    got[50, 0] = float("nan")
    assert gate.row_error(got, expected) == float("inf")
    assert gate.row_error(got[:50], expected) == float("inf")


def test_missing_output_is_an_infinite_error(tmp_path):
    np.save(tmp_path / "grad_weight.npy", np.ones(3))
    assert gate.errors_against(tmp_path, {}) == {"grad_weight": float("inf")}


def test_resident_peak_sees_memory_that_is_gone_again():
    harness.release_memory()
    with harness.ResidentPeak() as peak:
        torch.ones(25_000_000).sum()  # 100 MB
    assert 95 < peak.above_mb < 125


class Heap:
    def measured(self) -> list[float]:
        """Bytes that 100 MB leave behind when freed: while freed memory is kept, at the end of that, and without it."""
        harness.release_memory()
        before = harness.resident_bytes()
        with harness.freed_memory_kept():
            torch.ones(25_000_000)
            left = [harness.resident_bytes() - before]
        left.append(harness.resident_bytes() - before)
        torch.ones(25_000_000)
        return [*left, harness.resident_bytes() - before]


def test_freed_memory_is_kept_and_given_back():
    with harness.Worker(Heap) as worker:  # whose heap has no hole yet that could take the 100 MB
        kept, returned, as_before = worker.call("measured")
    assert kept > 95e6
    assert returned < 5e6
    assert as_before < 5e6


class Environment:
    def of(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.mark.slow
def test_an_allocator_is_preloaded_where_calls_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "START", "spawn")  # as users have it; a forked process keeps the allocator it had
    seen = []
    for preloaded in (None, tmp_path / "allocator.so"):
        with harness.preloaded(preloaded):
            worker = harness.Worker(Environment)
        with worker:
            seen.append([worker.call("of", name) for name in ("LD_PRELOAD", "MALLOC_CONF")])
    assert seen[0] == [os.environ.get("LD_PRELOAD"), os.environ.get("MALLOC_CONF")]
    assert seen[1][0] == str(tmp_path / "allocator.so")
    assert "dirty_decay_ms:-1" in seen[1][1]


def test_a_process_starts_without_the_compiler():
    said = harness.said(sys.executable, "-c", "import sys, bench.run; print('torch._inductor' in sys.modules)")
    assert said == "False"


@pytest.mark.parametrize("keep_memory", [False, True])
def test_a_timed_call_is_not_the_first(keep_memory):
    taken = []
    method = peers.Method("counted", lambda case, tensors: lambda: taken.append(1))
    run.Subject("entropy", TINY, method, keep_memory).seconds(1)
    assert len(taken) == 2


def test_each_round_has_a_process_of_its_own(monkeypatch):
    started = []
    real = run.Worker
    monkeypatch.setattr(run, "Worker", lambda *args: started.append(args[0]) or real(*args))
    (dense,) = run.run_case(cases.CASES["entropy"], TINY, [peers.Method("torch", peers.dense)], rounds=2)
    assert dense["status"] == "ok", dense
    assert started == [run.Oracle] + [run.Subject] * 3


@pytest.mark.parametrize(
    "arguments",
    [["--cases", "nosuch"], ["--methods", "nosuch"], ["--rounds", "0"], ["--shape", "3,4"], ["--shape", "a,b,c"]],
)
def test_bad_options_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(arguments)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "known"), [("--cases", "loss, entropy"), ("--peers", "dense, torch.compile")])
def test_what_no_method_is_called_is_refused_in_turn_too(option, known, capsys):
    with pytest.raises(SystemExit) as stop:
        in_turn.main([option, "nosuch"])
    assert stop.value.code == 2
    assert known in capsys.readouterr().err


def test_methods_reach_a_process_of_their_own():
    for method in {m for methods in peers.METHODS.values() for m in methods}:
        assert pickle.loads(pickle.dumps(method)) == method


@pytest.mark.skipif(not peers.HAS_ONEDNN, reason="torch's switch rounds operands here, or has no oneDNN")
def test_a_floor_by_onednn_is_one_in_fp32():
    case, tensors = cases.CASES["entropy"], cases.make_tensors(cases.CASES["entropy"], cases.SHAPES["tiny"])
    seen = []

    def product():
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return {"z": tensors["hidden"] @ tensors["weight"].t()}

    found = peers.by_onednn(product)()["z"]
    assert seen == ["bf16"]
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    exact = tensors["hidden"].double() @ tensors["weight"].double().t()
    assert (found - exact).abs().max() < 1e-5  # in bf16 it would be 1e-2
    names = [m.name for m in peers.METHODS[case.name] if m.kind == "floor"]
    assert names[-2:] == ["bare GEMMs by oneDNN, vocabulary slices", "bare GEMMs by oneDNN, smaller tiles"]


def test_methods_are_chosen_by_the_beginnings_of_their_names():
    def names(*asked):
        return {case: [m.name for m in found] for case, found in peers.chosen(*asked).items()}

    by_onednn = ["torch by oneDNN"] if peers.HAS_ONEDNN else []
    assert names(["entropy"], ["dense"], ()) == {"entropy": ["torch", *by_onednn]}
    assert names(["entropy"], ["torch"], ()) == {"entropy": ["torch", "torch.compile", *by_onednn]}
    of_a_loss = names(["loss", "entropy"], ["cut"], ("ours",))
    assert of_a_loss["loss"][-1] == "cut-cross-entropy, torch_compile"
    assert of_a_loss["entropy"] == ["logitless", "logitless, compiled"]
    with pytest.raises(ValueError, match=r"no method of entropy begins with 'cut'; they are logitless, .*dense"):
        names(["entropy"], ["logitless", "cut"], ())
