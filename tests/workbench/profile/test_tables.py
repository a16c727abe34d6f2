"""A profile's tables on consoles of several widths."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from logitless.workbench.profile.lint import Finding, Site
from logitless.workbench.profile.measure import Measured
from logitless.workbench.profile.recording import FEW, POINTS, Recording
from logitless.workbench.profile.recording_tables import show
from logitless.workbench.profile.step import Step
from logitless.workbench.profile.storages import Allocation
from logitless.workbench.profile.tables import headline, show_measured

GIB = 1 << 30
MODULES = ("model.layers.35.self_attn.q_norm", "model.layers.35.mlp.down_proj.lora_B.default", "")
OPS = ("_to_copy", "_scaled_dot_product_flash_attention_for_cpu", "mm")


def recording() -> Recording:
    shapes = [(1, 131_072, 32, 128), (1, 131_072, 9728), (151_936, 2560)]
    made = [
        Allocation(2 * GIB, shape, "bfloat16", op, module, "activation gradients", i + 1)
        for i, (shape, op, module) in enumerate(zip(shapes, OPS, MODULES, strict=True))
    ]
    return Recording(made, [0, 2 * GIB, 4 * GIB, 6 * GIB], [("parameters", 0), ("backward", 3)])


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_names_are_never_broken(width):
    written = io.StringIO()
    found = recording()
    show({"dense": found, "logitless": found}, "logitless", Console(file=written, width=width, color_system=None))
    lines = written.getvalue().splitlines()
    assert found.peak.stage == "backward"  # at its very end
    assert max(map(len, lines)) <= width
    table = "\n".join(lines[lines.index("largest tensors at the peak, logitless") :])
    for text in ("1 × 131,072 × 32 × 128 bf16", "layers.35.self_attn.q_norm", "layers.35.mlp.down_proj.lora_B.default"):
        assert text in table
    assert len(table.splitlines()) < 16


@pytest.mark.parametrize("width", [80, 120])
def test_brackets_of_code_and_of_names_are_shown(width, tmp_path):
    code = tmp_path / "model.py"
    code.write_text('bias = torch.zeros(256, sizes[n], name="[/INST]")')
    site = Site(str(code), 1)
    finding = Finding("add", "cpu", (256, 64), site, site)
    made = [Allocation(2 * GIB, (7, 2), "bfloat16", "mul", "heads[/INST]", "activations", 1)]
    found = Recording(made, [0, 2 * GIB], [("backward", 1)], (finding,))
    written = io.StringIO()
    show({"dense": found}, "dense", Console(file=written, width=width, color_system=None))
    assert written.getvalue().count("heads[/INST]") == 2  # the peak's module and the table's
    assert f"device {finding}\n" in written.getvalue()


def test_tensors_alike_of_several_layers_are_one_line():
    layers = [f"model.layers.{i}.mlp" for i in range(3)]
    made = [
        Allocation(2 * GIB, (7, 2), "bfloat16", "mul", module, "activations", i)
        for i, module in enumerate([*layers, "model.norm"])
    ]
    found = Recording(made, [2 * GIB * i for i in range(5)], [("backward", 4)])
    written = io.StringIO()
    show({"dense": found}, "dense", Console(file=written, width=120, color_system=None))
    table = written.getvalue().partition("largest tensors")[2]
    (row,) = [line.split() for line in table.splitlines() if "layers" in line]
    assert row == ["3", "×", "2.00", "GiB", "7", "×", "2", "bf16", "activations", "layers.*.mlp", "mul"]
    assert " norm " in table


@pytest.mark.parametrize(("host", "shown"), [(3 << 30, True), (1 << 19, False)])
def test_what_lies_on_the_host_is_told_where_it_is_more_than_scalars(host, shown):
    written = io.StringIO()
    found = Recording([], [0, GIB], [("loss", 1)], host=host)
    show({"dense": found}, "dense", Console(file=written, width=120, color_system=None))
    assert ("dense keeps 3.00 GiB on the host" in written.getvalue()) == shown
    assert ("on the host" in written.getvalue()) == shown


def test_a_scalar_on_top_of_a_large_tensor_sets_no_peak():
    sizes = {"cat": 2 * GIB, "sum": 512}
    made = [Allocation(n, (n,), "uint8", op, "", "activations", i + 1) for i, (op, n) in enumerate(sizes.items())]
    peak = Recording(made, [0, 2 * GIB, 2 * GIB + 512, 0], [("loss", 3)]).peak
    assert (peak.op, peak.event, peak.nbytes) == ("cat", 2, 2 * GIB + 512)


def test_a_stage_of_several_steps_has_its_last_end_and_its_highest_peak():
    marks = [("parameters", 0), ("loss", 1), ("backward", 2), ("loss", 4)]
    found = Recording([], [n * GIB for n in (1, 5, 2, 2, 3)], marks)
    written = io.StringIO()
    show({"dense": found}, "dense", Console(file=written, width=120, color_system=None))
    rows = [line.replace(" GiB", "").split() for line in written.getvalue().splitlines()]
    assert [row[1:] for row in rows if row[:1] in (["loss"], ["backward"])] == [["3.00", "5.00"], ["2.00", "5.00"]]


def test_a_timeline_keeps_the_steps_of_short_stages():
    forward, loss = [event % 7 for event in range(20_000)], [85, 159, 233, 159, 12]
    ends = [("parameters", 0), ("after full forward", 20_000), ("loss", 20_005)]
    timeline = Recording([], [0, *forward, *loss, 5, 4], ends).as_json()["timeline"]
    assert timeline[-7:] == [[20_001 + i, nbytes] for i, nbytes in enumerate([*loss, 5, 4])]
    assert len(timeline) <= POINTS + 4 * FEW
    assert all(nbytes == 6 for _, nbytes in timeline[1:-7])  # the highest of each stretch
    two = Recording([], forward, [("after full forward", 9_999), ("loss", 19_999)]).as_json()["timeline"]
    assert len(two) <= POINTS + 3 * FEW
    short = Recording([], forward[:POINTS], [("backward", 500)]).as_json()["timeline"]
    assert short == [list(point) for point in enumerate(forward[:POINTS])]


def measured(device: str) -> Measured:
    """In GiB: 4 predicted where 5 were allocated, then 2 where 1 was; beside them what the machine said."""
    marks = [("parameters", 1), ("loss", 3)]
    predicted, allocated = (Recording([], [GIB * n for n in curve], marks) for curve in ([0, 4, 3, 2], [0, 5, 6, 1]))
    readings = [(7 * GIB, 8 * GIB), (9 * GIB, 10 * GIB)]
    return Measured(device, predicted, allocated, readings, reserved=11 * GIB, context=12 * GIB)


def test_what_was_predicted_and_what_was_measured_for_machines():
    found = measured("cpu").as_json()
    stages = [[n // GIB for name, n in stage.items() if name != "name"] for stage in found["stages"]]
    assert list(found["stages"][0])[1:] == [
        f"{kind}_{what}" for kind in ("predicted", "allocated", "measured") for what in ("bytes", "peak_bytes")
    ]
    assert stages == [[4, 4, 5, 5, 7, 8], [2, 4, 1, 6, 9, 10]]
    peaks = [found[f"{kind}_bytes"] // GIB for kind in ("predicted_peak", "allocated_peak", "measured_peak")]
    assert [*peaks, found["reserved_bytes"] // GIB, found["context_bytes"] // GIB] == [4, 6, 10, 11, 12]


@pytest.mark.parametrize(("device", "machine"), [("cpu", "resident set"), ("cuda", "allocator")])
def test_what_was_predicted_and_what_was_measured_for_people(device, machine):
    written = io.StringIO()
    show_measured(measured(device), Console(file=written, width=120, color_system=None))
    said = written.getvalue()
    rows = [line.replace(" GiB", "").replace(" %", "").split() for line in said.splitlines()]
    assert ["parameters", "4.00", "5.00", "-20.00", "8.00"] in rows
    assert ["loss", "4.00", "6.00", "-33.33", "10.00"] in rows
    assert machine in said
    margin = "margin: 11.00 GiB reserved beyond that, 12.00 GiB of context and libraries"
    assert (margin in said) == (device == "cuda")


def test_a_headline_says_what_differs_from_a_plain_step():
    step = Step("4b", 8192, batch_size=2, attention="sdpa", optimizer="sgd", dtype="float32")
    plain = "4b (5 parameters) · 2 × 8,192 tokens · float32 · attention sdpa · optimizer sgd"
    assert headline(step, 5) == plain
    changes = {"gradient_checkpointing": True, "offload_activations": True, "mlp_tiles": 2, "lora_rank": 1}
    more = " · gradient checkpointing · offloaded · MLP in 2 tiles · LoRA rank 1"
    assert headline(replace(step, **changes), 5) == plain + more
