"""`logitless plan`: output, files, exit statuses, and one line for every mistake."""

import json
import shlex
import subprocess
import sys

import pytest

from logitless.cli.main import main
from logitless.cli.options import parse
from logitless.cli.plan import PlanConfig, changed, parse_gpus
from logitless.errors import OptionError
from logitless.models.catalog import shape_of
from logitless.units import format_bytes
from logitless.workbench.plan.algorithms import PHASES
from logitless.workbench.plan.commands import planned
from logitless.workbench.plan.components import Component
from logitless.workbench.plan.plan import both
from logitless.workbench.plan.plots import CATEGORIES, category, draw
from logitless.workbench.plan.report import lives
from logitless.workbench.plan.setting import CHOICES, GIB, Setting
from tests.support.workbench.options import at_default
from tests.support.workbench.units import assert_one_unit

RUN = [
    "plan",
    "--model",
    "qwen2.5-1.5b",
    "--algorithm",
    "intuitor",
    "--batch-size",
    "64",
    "--prompt-length",
    "2048",
    "--response-length",
    "4096",
    "--gpus",
    "8x80GiB",
]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


GIVEN = {  # whole command lines, and what they ask for
    "--model llama-3.1-8b --algorithm grpo --batch-size 6 --responses-per-prompt 4 --prompt-length 10 "
    "--response-length 20 --validation-length 30 --micro-batch 2 --rollout-batch 3 --gpus 8x24GB --reserve 1GB "
    "--sharding zero2 --tensor-parallel 2 --context-parallel 2 --optimizer sgd --no-master-weights "
    "--gradient-checkpointing --offload-activations --mlp-tiles 2 --lora-rank 8 --head-format q8_0 --reference no "
    "--critic yes --reward-model yes --critic-shape qwen3-0.6b --reward-shape qwen3-1.7b --top-k 5 "
    "--memory-budget 1MiB --dense-logits response": {
        "algorithm": "grpo",
        "batch_size": 6,
        "responses_per_prompt": 4,
        "prompt_length": 10,
        "response_length": 20,
        "validation_length": 30,
        "micro_batch": 2,
        "rollout_batch": 3,
        "gpus": 8,
        "gpu_bytes": 24 * 10**9,
        "reserve": 10**9,
        "sharding": "zero2",
        "tensor_parallel": 2,
        "context_parallel": 2,
        "optimizer": "sgd",
        "master_weights": False,
        "gradient_checkpointing": True,
        "offload_activations": True,
        "mlp_tiles": 2,
        "lora_rank": 8,
        "head_format": "q8_0",
        "reference": "no",
        "critic": "yes",
        "reward_model": "yes",
        "critic_shape": shape_of("qwen3-0.6b"),
        "reward_shape": shape_of("qwen3-1.7b"),
        "top_k": 5,
        "memory_budget": 1 << 20,
        "dense_logits": "response",
    },
    "--model llama-3.1-8b --context-length 99 --attention eager": {
        "batch_size": 8,
        "response_length": 99,
        "attention": "eager",
    },
}


def test_every_option_reaches_the_setting_and_the_command_of_it():
    """A line is the setting that it says, and `planned` says that setting as a line again."""
    for words, meant in GIVEN.items():
        setting = setting_of(words.split())
        assert setting == Setting(shape_of("llama-3.1-8b"), **meant)
        assert setting_of(shlex.split(planned(setting))[2:]) == setting
    settings = [Setting(shape_of("llama-3.1-8b"), **meant) for meant in GIVEN.values()]
    assert at_default(*settings) == set()


def setting_of(words: list[str]) -> Setting:
    return parse(PlanConfig, prog="logitless plan", description="", arguments=words).setting()


def test_tables(capsys):
    changes = ["--sweep", "2048", "8192", "--what-if", "gradient-checkpointing=true", "--fit", "--components"]
    assert main([*RUN, *changes]) == 0
    out = capsys.readouterr().out
    for text in (
        "1,543,714,304 parameters",
        "logits in fp32",
        "(49,152, 151,936) bf16",
        "slices of the logits",
        "key-value cache",
        "forward … backward",
        *PHASES,
        "largest single allocation: logits in fp32, 27.82 GiB",
        "dense does not fit",
        "GiB too much",
        "peak on each GPU: qwen2.5-1.5b",
        "gradient-checkpointing=true",
        "conservative",
        "aggressive",
        "accelerate launch",
        "--responses-per-prompt 4 plans what commands can run",
        "a group of one has no advantage",
    ):
        assert text in out, text


@pytest.mark.parametrize(("width", "parts"), [(80, 2), (100, 1)])
def test_a_change_is_broken_at_a_hyphen_or_not_at_all(capsys, monkeypatch, width, parts):
    monkeypatch.setenv("COLUMNS", str(width))
    changes = ["gradient-checkpointing=true", "batch-size=64"]
    assert main(["plan", "--what-if", *changes]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out[out.index("what if") :].splitlines() if line.strip()]
    names = [line[0] for line in lines if line[0].startswith(("gradient", "checkpointing", "batch"))]
    assert "".join(names) == "".join(changes)
    assert len(names) == parts + 1
    assert max(map(len, out.splitlines())) <= width


def test_no_column_is_left_out_where_a_terminal_is_narrow(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["plan", "--what-if", "response-length=32768"]) == 0
    out = capsys.readouterr().out
    assert "1,176.95 GiB" in out
    assert " no " in out[out.index("what if") :]
    assert max(map(len, out.splitlines())) <= 60


def test_the_default_shows_the_difference(capsys):
    """What is planned without options fits without logits and not with them; the verdict comes before the tables."""
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    assert out.index("dense does not fit") < out.index("logitless fits") < out.index("phase")
    assert "component " not in out
    assert "--components lists" in out
    assert "--fit searches" in out


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (PHASES, "always"),
        (PHASES[2:5], "forward … loss backward"),
        ((PHASES[0], *PHASES[3:5], PHASES[8]), "rollout, loss … loss backward, optimizer"),
    ],
)
def test_phases_in_a_row_are_a_range(phases, said):
    assert lives(Component("", "", 1, tuple(phases), 1), PHASES) == said


def test_a_table_has_one_unit(capsys):
    assert main(["plan", "--components"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith(" ")]
    tables = [row for row in rows if "largest" not in row]
    assert any("<0.01 GiB" in row for row in tables)
    assert not any(f" {unit} " in row for row in tables for unit in ("MiB", "KiB", "TiB"))
    assert main(["plan", "--batch-size", "256", "--units", "GB"]) == 0
    assert_one_unit(capsys.readouterr().out, "does not fit", "--components")


def test_a_sweep_stands_alone_with_both_ratios(capsys):
    sweep = ["--sweep", "ppo", "intuitor", "2048", "8192", "--units", "GB"]
    assert main([*RUN, *sweep, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    peaks = [[row[way]["peak_bytes"] for way in ("dense", "logitless")] for row in json.loads(out)["sweep"]]
    assert "loss backward" not in err
    assert "TB" not in err
    assert "/ ppo's" in err
    second = next(line for line in err.splitlines() if "2,048  intuitor" in line)
    assert f" {peaks[1][0] / peaks[1][1]:.2f} " in second
    assert f" {peaks[1][0] / peaks[0][0]:.2f}, {peaks[1][1] / peaks[0][1]:.2f} " in second
    assert main([*RUN, *sweep, "--components"]) == 0
    out = capsys.readouterr().out
    assert out.index("peak on each GPU") < out.index("component ")


def test_a_fit_shows_lines_that_run_or_says_what_to_fill_in(capsys):
    assert main(["plan", "--model", "qwen3-4b", "--gpus", "1x24GiB", "--fit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("logitless train --model Qwen/Qwen3-4B ") for line in lines)
    assert "to be filled in: DATASET, SCRIPT" in lines


def test_sweep_over_algorithms(capsys):
    assert main([*RUN, "--sweep", "ppo", "intuitor", "2048", "8192", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["sweep"]
    assert [(row["length"], row["algorithm"]) for row in found] == [
        (2048, "ppo"), (2048, "intuitor"), (8192, "ppo"), (8192, "intuitor"),
    ]  # fmt: skip
    peaks = [row["dense"]["peak_bytes"] for row in found]
    assert peaks[0] > peaks[1]
    assert peaks[2] > peaks[3]


@pytest.mark.parametrize("algorithm", CHOICES["algorithm"])
def test_a_fit_prints_its_plan_as_a_command(algorithm, capsys):
    """The command runs as it is, and plans the same bytes."""
    run = ["plan", "--algorithm", algorithm, "--gpus", "2x80GiB", "--responses-per-prompt", "2", "--lora-rank", "8"]
    assert main([*run, "--fit", "--json", "-"]) == 0
    for fit in json.loads(capsys.readouterr().out)["fit"].values():
        assert main([*shlex.split(fit["command"])[1:], "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["logitless"] == fit["plan"]


def test_json(capsys):
    extra = ["--sweep", "2048", "--what-if", "micro-batch=2", "--fit", "--json", "-"]
    assert main([*RUN, *extra]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert found["model"]["parameters"] == 1_543_714_304
    assert found["setting"]["gpu_bytes"] == 80 * GIB
    for way in ("dense", "logitless"):
        one = found[way]
        assert set(one["peaks"]) == set(PHASES)
        assert one["peak_bytes"] == max(one["peaks"].values()) == one["peaks"][one["peak_phase"]]
        assert set(one["components"][0]) == {"name", "shape", "nbytes", "phases", "largest"}
    assert found["sweep"][0]["length"] == 2048
    assert found["what_if"][0]["change"] == "micro-batch=2"
    assert set(found["fit"]["aggressive"]) == {"setting", "allowed_bytes", "plan", "reasons", "command", "flags"}


def test_options_that_are_given_again_add(capsys):
    one, several = (["--what-if", "micro-batch=2", "lora-rank=8"], ["--what-if", "gradient-checkpointing=true"])
    assert main([*RUN, *one, "--sweep", "512", *several, "--sweep", "1024", "2048", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["change"] for row in found["what_if"]] == [*one[1:], *several[1:]]
    assert [row["length"] for row in found["sweep"]] == [512, 1024, 2048]


def test_files(tmp_path):
    written = [f"--{kind}={tmp_path / 'p'}.{kind}" for kind in ("json", "png", "html")]
    assert main([*RUN, *written]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["fit"] is None
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "1,543,714,304 parameters" in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_without_matplotlib_the_page_is_written_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*RUN, f"--png={tmp_path / 'p'}.png", f"--html={tmp_path / 'p'}.html"]) == 2
    assert "matplotlib" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


def test_check():
    assert main([*RUN, "--check"]) == 1
    assert main([*RUN, "--check", "--gradient-checkpointing"]) == 0
    assert main(RUN) == 0


def test_a_fit_says_what_it_leaves_as_given(capsys):
    """It halves a length that context parallelism would keep."""
    run = ["plan", "--model", "llama-3.1-8b", "--gpus", "8x80GiB", "--sharding", "fsdp2", "--context-length", "131072"]
    assert main([*run, "--gradient-checkpointing", "--fit"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "response-length 65536" in out
    assert "--fit leaves parallelism, offloading, tiles and optimizer as given: --what-if tries them" in out
    assert main([*run, "--gradient-checkpointing", "--micro-batch", "1", "--context-parallel", "8", "--check"]) == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--batch-size 1", True),
        ("--batch-size 8", False),
        ("--batch-size 1 --context-parallel 8", False),
        ("--algorithm grpo --batch-size 2 --responses-per-prompt 4", False),
    ],
)
def test_gpus_without_a_row_are_said(given, told, capsys):
    assert main(["plan", "--gpus", "8x80GiB", *given.split(), "--json", "-"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    said = "rows: 1 a step for 8 GPUs or groups of them, so some have none"
    assert [note.partition(";")[0] for note in notes if note.startswith("rows")] == [said] * told


def test_one_token_is_one(capsys):
    assert main(["plan", "--batch-size", "1", "--context-length", "1", "--components"]) == 0
    out = capsys.readouterr().out
    assert "sft · 1 × 1 token · " in out
    assert "1 tokens" not in out


def test_nothing_fits(capsys):
    assert main(["plan", "--model", "qwen3-8b", "--algorithm", "ppo", "--gpus", "24GiB", "--fit"]) == 0
    assert "nothing fits" in capsys.readouterr().out


def test_other_models_for_critic_and_reward(capsys):
    ppo = ["plan", "--model", "qwen2.5-1.5b", "--algorithm", "ppo", "--json", "-"]
    assert main([*ppo, "--critic-shape", "qwen2.5-0.5b", "--what-if", "reward-shape=4b"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"]["critic_shape"]["name"] == "qwen2.5-0.5b"
    assert found["setting"]["reward_shape"] is None
    plans = [found["logitless"], found["what_if"][0]["logitless"]]
    sizes = [{c["name"]: c["nbytes"] for c in one["components"]} for one in plans]
    assert sizes[0]["critic"] == sizes[1]["critic"] == 2 * (494_032_768 + 896)
    assert sizes[0]["reward model"] == 2 * (1_543_714_304 + 1536)
    assert sizes[1]["reward model"] == 2 * (4_022_468_096 + 2560)


def test_units(capsys):
    assert main([*RUN, "--units", "GB"]) == 0
    out = capsys.readouterr().out
    assert " GiB" not in out
    assert "29.87 GB" in out  # 27.82 GiB
    assert format_bytes(37_094 * 2**20) == "36.22 GiB"
    assert (format_bytes(5), format_bytes(-3 * GIB), format_bytes(10**6, "GB")) == ("5 B", "-3.00 GiB", "1 MB")


def test_files_are_in_the_units_that_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("logitless.workbench.plan.plots.draw", lambda _, __, path, units: path.write_text(units))
    files = [f"--{kind}={tmp_path / 'p'}.{kind}" for kind in ("png", "html")]
    assert main([*RUN, "--units", "GB", *files]) == 0
    assert (tmp_path / "p.png").read_text() == "GB"
    assert 'const units = "GB";' in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_no_torch():
    code = (
        "import sys\nfrom logitless.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *RUN, "--fit"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_trace_of_layers_without_kernels_asks_for_none(tmp_path):
    """In a process of its own: transformers says once what it would have installed."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    line = [sys.executable, "-m", "logitless", "plan", "--model", str(tmp_path), "--context-length", "64"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert "activations as traced of its own layers" in " ".join(done.stdout.split())


@pytest.mark.parametrize("algorithm", CHOICES["algorithm"])
@pytest.mark.parametrize("model", ["4b", "gemma-2-2b"])
def test_every_algorithm(algorithm, model, capsys):
    assert main(["plan", "--model", model, "--algorithm", algorithm, "--lora-rank", "8"]) == 0
    assert "logitless" in capsys.readouterr().out


def test_a_picture_of_small_sizes_has_their_digits_and_room_above_the_bars(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **how: drawn.append(figure))
    setting = Setting(shape_of("tiny"), batch_size=1, response_length=16, gpu_bytes=GIB, reserve=GIB // 2)
    dense, logitless = both(setting)
    draw(dense, logitless, tmp_path / "p.png")
    (axes,) = drawn[0].axes
    texts = {text.get_text() for text in axes.texts}
    assert texts == {"usable: 0.5 GiB", *(f"{n / GIB:.2g}" for plan in (dense, logitless) for n in plan.peaks.values())}
    assert axes.get_ylim()[1] > 1.02 * logitless.peak / GIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model qwen3-5b", "unknown model 'qwen3-5b': did you mean qwen3-8b"),
        ("--gpus 8xbanana", "--gpus must be a number and a size with its unit, such as 8x80GiB or 1x24GB"),
        ("--gpus 8x80", "with its unit"),
        ("--gpus 0x80GiB", "--gpus must be 1 to 2^63-1, got 0"),
        ("--gpus 8x0GiB", "--gpus must be more than 0 bytes"),
        ("--gpus 8x999999999999999999TiB", "--gpus must be less than 2^63 bytes"),
        ("--batch-size 0", "--batch-size must be 1 to 2^63-1, got 0"),
        ("--batch-size -3", "--batch-size must be 1 to 2^63-1, got -3"),
        ("--batch-size 99999999999999999999", "--batch-size must be 1 to 2^63-1"),
        ("--response-length 9000000000000000000", "more than 2^63-1: give smaller sizes"),
        ("--model_size 4b", "Unrecognized options: --model_size, 4b; did you mean --model?"),
        ("--model-size 4b", "did you mean --model?"),
        ("--vocab_size 7", "did you mean --model?"),
        ("--bs 4", "did you mean --batch-size?"),
        ("--attention_type nsa --model_size 4b", "did you mean --attention or --model?"),
        ("--bogus 3", "Unrecognized options: --bogus, 3 (see"),
        ("--sweep rppo", "--sweep expects tokens or one of sft, dpo, ppo"),
        ("--sweep 0", "sequence lengths must be 1 or more"),
        ("--reserve 1e999GiB", "--reserve must be less than 2^63 bytes"),
        ("--reserve 99GiB", "--reserve 99.00 GiB leaves nothing of a GPU's 80.00 GiB"),
        ("--memory-budget lots", "--memory-budget must be a size such as 256MiB"),
        ("--tensor-parallel 3", "--gpus must be a multiple of tensor × context parallelism (3), got 1"),
        ("--context-length 5 --prompt-length 3", "give one or the other"),
        ("--context-length 0", "--context-length must be 1 to 2^63-1, got 0"),
        ("--what-if context-length=-1", "--context-length must be 1 to 2^63-1, got -1"),
        ("--what-if batchsize=3", "must be KEY=VALUE with a KEY such as batch-size"),
        ("--what-if batch-size", "must be KEY=VALUE"),
        ("--what-if batch-size=many", "expected a whole number"),
        ("--what-if master-weights=maybe", "expected true or false"),
        ("--what-if sharding=zero9", "expected one of ddp, zero1"),
        ("--what-if model=qwen9", "unknown model 'qwen9'"),
        ("--json /nowhere/at/all.json", "--json /nowhere/at/all.json: the folder /nowhere/at does not exist"),
        ("--png /nowhere/at/all.png", "--png /nowhere/at/all.png: the folder"),
        ("--html /nowhere/at/all.html", "--html /nowhere/at/all.html: the folder"),
        ("--critic-shape qwen3-5b", "unknown model 'qwen3-5b': did you mean qwen3-8b"),
        ("--what-if reward-shape=qwen9", "unknown model 'qwen9'"),
        ("--what-if html=x", "must be KEY=VALUE with a KEY such as"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(["plan", *arguments.split()]) == 2
    out, error = capsys.readouterr()
    assert message in error
    assert error.startswith("logitless: ")
    assert error.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x80GiB", (8, 80 * GIB)),
        ("1x24GB", (1, 24 * 10**9)),
        ("80gib", (1, 80 * GIB)),
        ("2 × 79.6 GiB", (2, int(79.6 * GIB))),
        ("4*500MiB", (4, 500 * 2**20)),
    ],
)
def test_gpus(text, expected):
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["", "x", "8x", "GiB", "-8x80GiB", "8x80GiB x", "8x80 PiB", "8x80", "8x8x80GiB"])
def test_gpus_that_make_no_sense(text):
    with pytest.raises(OptionError, match="--gpus must be a"):
        parse_gpus(text)


def test_changes_to_lengths():
    base = PlanConfig(context_length=4096)
    assert changed(base, "response-length=100").lengths() == (0, 100)
    assert changed(base, "context-length=77").lengths() == (0, 77)
    assert changed(PlanConfig(prompt_length=5, response_length=6), "context-length=77").lengths() == (0, 77)
    assert changed(PlanConfig(prompt_length=5, response_length=6), "prompt-length=7").lengths() == (7, 6)
    assert changed(base, "--LORA-rank = 4".lower()).lora_rank == 4
    assert not changed(base, "master_weights=off").master_weights


def test_every_component_has_its_colour():
    labels = {label for label, *_ in CATEGORIES}
    assert category("logits in fp32") == category("slices of the logits") == "logits and their gradients"
    assert category("head's gradient, summed") == "head's gradient"
    assert category("critic's optimizer state") == "other models"
    assert category("optimizer state") == "optimizer and master weights"
    assert category("a layer's activation gradients") == category("gradient of the hidden states") == "activations"
    assert category("a layer's gradients") == "gradients"
    assert {category(n) for n in ("parameters", "key-value cache", "anything")} <= labels
