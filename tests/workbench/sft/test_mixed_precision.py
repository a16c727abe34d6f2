"""`--mixed-precision bf16`: products alone are rounded, in every way to divide a run, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rich.console import Console

from logitless.errors import OptionError
from logitless.workbench.common.files import read_lines
from logitless.workbench.common.options import read_file
from logitless.workbench.runs.ending import Interrupted
from logitless.workbench.runs.rundir import stored
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.data import prepare
from logitless.workbench.sft.run import run
from logitless.workbench.sft.stepcost import measure_here
from logitless.workbench.sources.model import build, load_tokenizer, resolve
from tests.support.workbench.micro import CONTEXT, micro_directory, micro_model
from tests.support.workbench.unmeasured import leave_unmeasured
from tests.workbench.sft.test_ranks import launch, options
from tests.workbench.sft.test_run import at_step, losses, resume

QUIET = Console(quiet=True)
STEPS, VOCAB = 4, 259
pytestmark = pytest.mark.usefixtures("unmeasured")


def weights(place: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(place / "model.safetensors")


def first_step(place: Path) -> dict:
    return next(r for r in read_lines(place / "metrics.jsonl") if "loss" in r)


@pytest.fixture(scope="module")
def runs(micro, tmp_path_factory) -> Path:
    """One run in float32, and one in mixed precision, uninterrupted."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        leave_unmeasured(patch)
        for name in ("no", "bf16"):
            run(replace(micro.config, mixed_precision=name, max_steps=STEPS, output_dir=root / name), QUIET)
    return root


def test_weights_and_state_stay_in_float32(runs):
    place = runs / "bf16"
    for saved in (place / "model", place / f"checkpoint-{STEPS}"):
        assert {x.dtype for x in weights(saved).values()} == {torch.float32}
    state = torch.load(place / f"checkpoint-{STEPS}" / "optimizer.pt")["state"]
    assert {x.dtype for each in state.values() for x in each.values()} == {torch.float32}
    summary = json.loads((place / "summary.json").read_text())
    assert (summary["dtype"], summary["mixed_precision"]) == ("float32", "bf16")


@pytest.mark.parametrize("loss", ["logitless", "dense"])
def test_products_are_rounded(micro, runs, tmp_path, loss):
    run(replace(micro.config, mixed_precision="bf16", loss=loss, max_steps=2, output_dir=tmp_path / "run"), QUIET)
    exact, rounded = first_step(runs / "no"), first_step(tmp_path / "run")
    for name in ("loss", "grad_norm"):
        assert rounded[name] != exact[name]
        assert rounded[name] == pytest.approx(exact[name], rel=1e-2)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss"]["logits_bytes"] == 2 * micro.config.batch_size * CONTEXT * VOCAB


def test_the_held_out_loss_is_of_the_same_products(runs):
    exact, rounded = (
        json.loads((runs / name / "summary.json").read_text())["held_out_loss_before"] for name in ("no", "bf16")
    )
    assert rounded != pytest.approx(exact, rel=1e-6)
    assert rounded == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize(
    ("more", "share"), [({"mixed_precision": "bf16"}, (0.9, 1.0)), ({"dtype": "bfloat16"}, (0.0, 0.1))]
)
def test_a_tiny_step_moves_the_weights(micro, tmp_path, more, share):
    config = replace(micro.config, learning_rate=1e-6, max_steps=1, output_dir=tmp_path / "run", **more)
    before = dict(build(config, resolve(config.model)).named_parameters())
    run(config, QUIET)
    moved = torch.cat([(x != before[name]).flatten() for name, x in weights(tmp_path / "run" / "model").items()])
    assert share[0] <= moved.float().mean().item() <= share[1]


def test_a_resumed_run_has_the_same_bits(micro, runs, tmp_path, monkeypatch):
    place = tmp_path / "parts"
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(Interrupted):
            run(replace(micro.config, mixed_precision="bf16", max_steps=STEPS, output_dir=place), QUIET)
    with pytest.raises(OptionError, match="--mixed-precision cannot change from bf16 to no"):
        run(replace(stored(place, TrainConfig()), mixed_precision="no", resume=place), QUIET)
    resume(place)
    assert losses(place) == losses(runs / "bf16")
    whole = weights(runs / "bf16" / "model")
    assert all(torch.equal(x, whole[name]) for name, x in weights(place / "model").items())


def test_a_run_killed_before_its_summary_is_finished_by_the_same_products(micro, tmp_path):
    whole = run(replace(micro.config, mixed_precision="bf16", max_steps=2, output_dir=tmp_path), QUIET)
    (tmp_path / "summary.json").unlink()
    assert resume(tmp_path)["held_out_loss_after"] == whole["held_out_loss_after"]


def test_a_step_is_measured_as_it_is_trained(micro, tmp_path):
    source = resolve(micro.config.model)
    prepare(micro.config, load_tokenizer(source), source.vocab_size, tmp_path / "tokens.npz")
    exact, rounded = (
        dict(measure_here(replace(micro.config, mixed_precision=name), tmp_path / "tokens.npz"))
        for name in ("no", "bf16")
    )
    for method in exact:
        assert rounded[method]["loss"] != exact[method]["loss"]
        assert rounded[method]["loss"] == pytest.approx(exact[method]["loss"], rel=1e-2)


def test_weights_of_bfloat16_are_refused(micro, tmp_path):
    config = replace(micro.config, mixed_precision="bf16", max_steps=1)
    with pytest.raises(OptionError, match=r"--dtype must be float32 with --mixed-precision bf16, .* got bfloat16"):
        replace(config, dtype="bfloat16").check()
    micro_directory(tmp_path / "model")
    micro_model().bfloat16().save_pretrained(tmp_path / "model")
    own = replace(config, model=str(tmp_path / "model"), output_dir=tmp_path / "run")
    said = f"expected float32 weights, --model {own.model} has bfloat16: give --dtype float32"
    with pytest.raises(OptionError, match=said):
        run(own, QUIET)
    assert not own.output_dir.exists()
    run(replace(own, dtype="float32"), QUIET)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "dtype"}))
    with pytest.raises(OptionError, match=r"has no dtype in its config\.json: give --dtype float32"):
        run(replace(own, output_dir=tmp_path / "other"), QUIET)


def test_no_without_quotes_in_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("mixed_precision: no\n")
    assert read_file(tmp_path / "run.yaml", TrainConfig(mixed_precision="bf16")).mixed_precision == "no"


def test_adapters_beside_weights_of_bfloat16(micro, tmp_path):
    """The adapters are float32, so nothing is lost; their checkpoint says so."""
    config = replace(micro.config, dtype="bfloat16", lora_rank=2, max_steps=2, mixed_precision="bf16")
    run(replace(config.check(), output_dir=tmp_path), QUIET)
    saved = safetensors.torch.load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.float32}


def test_what_is_computed_again_or_in_tiles_is_rounded_alike(micro, runs, tmp_path):
    light = {"gradient_checkpointing": True, "offload_activations": True, "mlp_tiles": 3}
    run(replace(micro.config, mixed_precision="bf16", max_steps=2, output_dir=tmp_path, **light), QUIET)
    again, plain = first_step(tmp_path), first_step(runs / "bf16")
    assert again["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert again["grad_norm"] == pytest.approx(plain["grad_norm"], rel=5e-3)


LIGHT = ["--attention", "nsa", "--mlp-tiles", 3, "--gradient-checkpointing", "--offload-activations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "alike"),
    [
        (["--batch-size", 1], {}),
        (["--batch-size", 1, "--sharding", "fsdp2"], {}),
        (["--batch-size", 1, "--sharding", "fsdp2", "--lora-rank", 2, *LIGHT], {"attention": "nsa", "lora_rank": 2}),
        (["--batch-size", 2, "--context-parallel", 2], {}),
        (["--batch-size", 2, "--context-parallel", 2, "--sharding", "fsdp2"], {}),
        (["--batch-size", 2, "--tensor-parallel", 2], {}),
        (["--batch-size", 2, "--tensor-parallel", 2, "--lora-rank", 2], {"lora_rank": 2}),
    ],
)
def test_two_ranks(micro, tmp_path, more, alike):
    """As near to one process's run as rounding in another order lets it be, and not a run in float32."""
    model = micro_directory(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    given = options(micro, tmp_path / "two", "--model", model, "--mixed-precision", "bf16", "--max-steps", STEPS)
    status, written = launch(2, *given, *more)
    assert status == 0, written[-4000:]
    config = replace(micro.config, model=str(model), max_steps=STEPS, **alike)
    for name in ("no", "bf16"):
        run(replace(config, mixed_precision=name, output_dir=tmp_path / name), QUIET)
    two, mixed, exact = (losses(tmp_path / name) for name in ("two", "bf16", "no"))
    assert two == pytest.approx(mixed, rel=1e-3)
    assert two != pytest.approx(exact, rel=1e-5)
    assert {x.dtype for x in weights(tmp_path / "two" / "model").values()} == {torch.float32}


@pytest.mark.slow
def test_ranks_that_divide_the_weights_choose_the_loss_by_logits_of_bfloat16(micro, tmp_path):
    found = []
    for loss in (["dense"], ["auto", "--loss-threshold", 2 * CONTEXT * VOCAB]):
        more = ["--mixed-precision", "bf16", "--sharding", "fsdp2", "--max-steps", 2, "--loss", *loss]
        status, written = launch(2, *options(micro, tmp_path / loss[0], *more))
        assert status == 0, written[-4000:]
        found.append(losses(tmp_path / loss[0]))
    assert found[0] == found[1]
