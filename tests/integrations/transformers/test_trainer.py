"""Under transformers' Trainer: the same losses, gradients and checkpoints as without us."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import PrinterCallback, Trainer, TrainingArguments

import logitless
from logitless.errors import ConfigError, OptionError
from logitless.integrations.transformers.trainer import is_trainer
from tests.support.allocations import largest_allocation
from tests.support.integrations.tiny import TINY, assert_same_gradients, gradients

ROWS, LENGTH, VOCAB = 16, 12, 97


def data(rows: int = ROWS, length: int = LENGTH, vocab: int = VOCAB) -> list[dict[str, torch.Tensor]]:
    """Rows with unlike numbers of tokens that count, so that a mean of means shows."""
    ids = torch.randint(8, vocab, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = [row.masked_fill(torch.arange(length) < i % 7, -100) for i, row in enumerate(ids)]
    return [{"input_ids": row, "labels": y} for row, y in zip(ids, labels, strict=True)]


def trainer(place, model, steps: int = 3, rows=None, **options) -> Trainer:
    shared = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(output_dir=str(place), max_steps=steps, **{**shared, **options})
    rows = rows or data()
    made = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:6])
    made.remove_callback(PrinterCallback)
    return made


def losses(made: Trainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", ["qwen3-tied", "mixtral"])
def test_trains_and_evaluates_as_before(tmp_path, name, smoothing):
    """A smoother is given logits alone: what else a model adds to its loss it leaves out."""
    own = trainer(tmp_path / "own", TINY[name].build(), label_smoothing_factor=smoothing)
    ours = trainer(tmp_path / "ours", TINY[name].build(), label_smoothing_factor=smoothing)
    logitless.install(ours)
    own.train(), ours.train()
    assert losses(ours) == pytest.approx(losses(own), rel=1e-4)
    assert len(losses(own)) == 3
    assert ours.evaluate()["eval_loss"] == pytest.approx(own.evaluate()["eval_loss"], rel=1e-4)
    for found, expected in zip(ours.model.parameters(), own.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)
    logitless.uninstall(ours)
    assert (ours.label_smoother is None) == (not smoothing)
    assert ours.evaluate()["eval_loss"] == pytest.approx(own.evaluate()["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_no_logits_under_trainer(tmp_path, smoothing):
    vocab, rows = 8192, 8
    batch = data(rows, 32, vocab)
    found = {}
    for method in ("dense", "logitless"):
        model = TINY["qwen3-tied"].build(vocab)
        made = trainer(tmp_path, model, 1, batch, label_smoothing_factor=smoothing, save_strategy="no")
        logitless.install(made, loss=method, memory_budget=2**19)
        found[method] = largest_allocation(made.train), largest_allocation(made.evaluate)
    logits = 4 * 2 * 32 * vocab
    assert min(found["dense"]) >= logits
    assert found["logitless"][0] <= logits / 2  # the head's gradient, 512 KiB
    assert found["logitless"][1] <= logits / 2
    logitless.install(made, memory_budget=2**19, metrics=False)
    assert largest_allocation(made.evaluate) <= logits / 2  # of the loss alone


def test_installed_before_the_trainer_and_resumed(tmp_path):
    """Four steps at once, and two, a stop and two more."""

    def made(place: str) -> Trainer:
        model = TINY["qwen3-tied"].build()
        logitless.install(model)
        return trainer(tmp_path / place, model, 4, lr_scheduler_type="constant")

    whole, first, rest = made("whole"), made("parts"), made("parts")
    whole.train()
    first.args.max_steps = 2
    first.train()
    rest.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert rest.state.global_step == 4
    assert losses(rest)[:2] == losses(first)
    assert losses(rest) == pytest.approx(losses(whole), rel=1e-5)
    for found, expected in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [None, {"rope": False}, {"fused_linear_cross_entropy": True}], ids=str)
def test_ligers_own_forward_is_refused(tmp_path, config):
    """It comes over ours when training begins; its kernels of layers do not."""
    made = trainer(tmp_path, TINY["qwen3-tied"].build(), use_liger_kernel=True, label_smoothing_factor=0.2)
    made.args.liger_kernel_config = config
    before = dict(vars(made)), dict(vars(made.model))
    with pytest.raises(ConfigError, match=r"set liger_kernel_config=\{'fused_linear_cross_entropy': False\}") as caught:
        logitless.install(made)
    assert "\n" not in str(caught.value)
    assert (dict(vars(made)), dict(vars(made.model))) == before
    logitless.install(made, loss="dense")
    made.args.liger_kernel_config = {"fused_linear_cross_entropy": False}
    logitless.install(made)


@pytest.mark.parametrize("own", [False, True], ids=["its own", "a subclass"])
def test_a_trainer_of_trl_has_an_adapter_of_its_own(own):
    kind = type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer", "model": None, "compute_loss": None})
    kind = type("Mine", (kind,), {"__module__": "mine"}) if own else kind
    with pytest.raises(ConfigError, match=rf"TRL's {kind.__name__}: use logitless.integrations.trl.install"):
        logitless.install(kind())


def test_what_is_taken_for_a_trainer(tmp_path):
    """Neither a model that has a method of its name, nor whatever has a model; but any package's trainer."""
    made = trainer(tmp_path, TINY["qwen3-tied"].build())
    made.__class__ = type("Trainer", (Trainer,), {"__module__": "trlx"})
    assert is_trainer(made)
    made.model.compute_loss = made.compute_loss
    assert not is_trainer(made.model)
    with pytest.raises(ConfigError, match="expected a transformers model, got SimpleNamespace"):
        logitless.install(SimpleNamespace(model=made.model))


@pytest.fixture
def fresh_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_beneath_accelerates_autocast(fresh_accelerate):
    model = TINY["qwen3-tied"].build()
    batch = {name: torch.stack([row[name] for row in data()[:2]]) for name in data()[0]}
    with torch.autocast("cpu", torch.bfloat16):
        dense = model(**batch).loss
    exact = gradients(model, lambda: dense)
    model.zero_grad()
    logitless.install(model)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    found = prepared(**batch)
    assert found.logits is None
    assert found.loss.dtype == torch.float32
    accelerator.backward(found.loss)
    assert_same_gradients({name: p.grad for name, p in prepared.named_parameters()}, exact, rtol=0, floor=2**-4)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped(**batch).logits is None
    logitless.uninstall(unwrapped)
    assert unwrapped(**batch).logits is not None


def test_around_accelerates_autocast(fresh_accelerate):
    """What was prepared first and is taken out of accelerate's hands then runs in fp32, and the loss stays ours."""
    model = TINY["qwen3-tied"].build()
    batch = {name: torch.stack([row[name] for row in data()[:2]]) for name in data()[0]}
    exact = model(**batch).loss
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    logitless.install(prepared)
    assert abs(prepared(**batch).loss - exact) > 1e-4
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped(**batch).logits is None
    torch.testing.assert_close(unwrapped(**batch).loss, exact)
    logitless.uninstall(unwrapped)
    assert unwrapped(**batch).logits is not None
    torch.testing.assert_close(unwrapped(**batch).loss, exact)


def test_smoothing_survives_changes_of_options(tmp_path):
    made = trainer(tmp_path, TINY["qwen3-tied"].build(), label_smoothing_factor=0.2)
    expected = made.evaluate()["eval_loss"]
    for again in (made, made.model, made):
        logitless.install(again, memory_budget=2**12)
        assert made.label_smoother is None
        assert made.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    logitless.install(made, loss="dense")
    assert made.label_smoother is not None
    assert made.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_two_smoothings_are_refused(tmp_path):
    made = trainer(tmp_path, TINY["qwen3-tied"].build(), label_smoothing_factor=0.2)
    before = dict(vars(made)), dict(vars(made.model))
    for other in (0.0, 0.1):
        with pytest.raises(
            OptionError, match=f"label_smoothing: expected the Trainer's own, 0.2, got {other}; leave it"
        ):
            logitless.install(made, label_smoothing=other)
    assert (dict(vars(made)), dict(vars(made.model))) == before
    logitless.install(made, label_smoothing=0.2)
    with pytest.raises(OptionError, match=r"label_smoothing: expected the Trainer's own, 0.2, got 0.1"):
        logitless.install(made, label_smoothing=0.1)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("loss", ["logitless", "auto", "dense"])
def test_logits_where_evaluation_asks_for_them(tmp_path, loss, smoothing):
    """predict, and evaluate with compute_metrics, are as without us; an evaluation of the loss alone has no logits."""
    options = {"label_smoothing_factor": smoothing}
    own, ours = (trainer(tmp_path / x, TINY["qwen3-tied"].build(), **options) for x in ("own", "ours"))
    logitless.install(ours, loss=loss, memory_budget=2**12, metrics=False)
    expected, found = own.predict(own.eval_dataset), ours.predict(own.eval_dataset)
    assert found.predictions.shape == (6, LENGTH, VOCAB)
    torch.testing.assert_close(torch.from_numpy(found.predictions), torch.from_numpy(expected.predictions))
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)
    for made in (own, ours):
        made.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
        made.compute_metrics = lambda seen: {"right": float((seen.predictions == seen.label_ids).mean())}
    assert ours.evaluate()["eval_right"] == own.evaluate()["eval_right"]
    ours.compute_metrics = None
    with_labels = {name: torch.stack([row[name] for row in data()[:2]]) for name in data()[0]}
    assert ours.prediction_step(ours.model, with_labels, True)[1] is None
    assert (ours.model(**with_labels).logits is None) == (loss != "dense")
    logitless.uninstall(ours)
    assert "prediction_step" not in vars(ours)
    assert ours.predict(own.eval_dataset).metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)


@pytest.mark.parametrize("metrics", [False, True])
def test_a_prediction_step_of_ones_own_is_kept(tmp_path, metrics):
    """It is told what the Trainer's would be; with metrics it is asked for the loss alone."""
    made = trainer(tmp_path, TINY["qwen3-tied"].build())
    seen, ignored = [], ["past_key_values"]

    def step(*given):
        seen.append(given[2:])
        return type(made).prediction_step(made, *given)

    made.prediction_step = step
    for _ in range(2):
        logitless.install(made, metrics=metrics)
    found = made.predict(made.eval_dataset, ignore_keys=ignored).predictions
    assert (found["rank"].shape if metrics else found.shape[:-1]) == (6, LENGTH)
    made.evaluate(ignore_keys=ignored)
    assert seen == [(metrics, ignored)] * 2 + [(True, ignored)] * 2
    logitless.uninstall(made)
    assert made.prediction_step is step
