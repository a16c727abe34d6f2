"""Metrics of a Trainer's evaluation from statistics, against the logits that it would gather."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers
from accelerate.utils.operations import get_data_structure, get_shape, listify
from packaging.version import Version
from peft import PromptTuningConfig, get_peft_model
from transformers import Trainer

import logitless
from logitless.errors import ConfigError, LabelError, OptionError
from logitless.integrations.transformers.evaluation import Predictions
from logitless.integrations.transformers.lm_head import STATE
from logitless.integrations.transformers.multi_token import MedusaHeads
from tests.integrations.transformers.test_trainer import VOCAB, data, trainer
from tests.support.allocations import largest_allocation
from tests.support.integrations.tiny import TINY

NAMES = ("perplexity", "accuracy", "top_5_accuracy", "entropy")


def built(place, **options):
    torch.manual_seed(0)
    model = TINY["qwen3-tied"].build()
    with torch.no_grad():
        model.lm_head.weight *= 8  # sure enough of itself to be right now and then
    return trainer(place, model, rows=data(rows=14), **options)


def dense(logits: np.ndarray, labels: np.ndarray) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The metrics, and what each label's own prediction says."""
    z = torch.from_numpy(logits).double()[:, :-1].log_softmax(-1)
    y = torch.from_numpy(labels)[:, 1:]
    counts = y != -100
    own = z.gather(-1, y.clamp(min=0)[..., None])
    each = {
        "logprob": own[..., 0],
        "rank": 1 + (z > own).sum(-1),
        "entropy": -(z.exp() * z).sum(-1),
    }
    each = {name: torch.where(counts, x, torch.zeros_like(x)) for name, x in each.items()}
    mean = {name: float(x[counts].double().mean()) for name, x in each.items()}
    metrics = {
        "perplexity": math.exp(-mean["logprob"]),
        "accuracy": float((each["rank"][counts] == 1).double().mean()),
        "top_5_accuracy": float((each["rank"][counts] <= 5).double().mean()),
        "entropy": mean["entropy"],
    }
    return metrics, {name: x.numpy() for name, x in each.items()}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("loss", ["logitless", "auto"])
def test_metrics_are_those_of_the_logits(tmp_path, loss, smoothing):
    own, ours = (built(tmp_path / x, label_smoothing_factor=smoothing) for x in ("own", "ours"))
    logitless.install(ours, loss=loss)
    gathered = own.predict(own.eval_dataset)
    expected, each = dense(gathered.predictions, gathered.label_ids)
    assert 0 < expected["accuracy"] < expected["top_5_accuracy"] < 1
    found = ours.evaluate()
    assert {name: found[f"eval_{name}"] for name in NAMES} == pytest.approx(expected, rel=1e-5)
    assert found["eval_loss"] == pytest.approx(gathered.metrics["test_loss"], rel=1e-5)
    assert ours.state.log_history[-1]["eval_accuracy"] == found["eval_accuracy"]
    predicted = ours.predict(own.eval_dataset)
    assert {name: predicted.metrics[f"test_{name}"] for name in NAMES} == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(predicted.label_ids, gathered.label_ids)
    assert sorted(predicted.predictions) == ["entropy", "logprob", "rank"]
    for name, x in predicted.predictions.items():
        assert x.shape == gathered.label_ids.shape
        np.testing.assert_allclose(x[:, 1:], each[name], rtol=1e-4, atol=1e-5)


def test_a_metric_of_ones_own_from_statistics(tmp_path):
    own, ours = built(tmp_path / "own"), built(tmp_path / "ours")
    own.compute_metrics = lambda seen: {
        "right": float((seen.predictions.argmax(-1)[:, :-1] == seen.label_ids[:, 1:]).sum())
    }
    ours.compute_metrics = lambda seen: {
        "right": float((seen.predictions["rank"] == 1).sum()),
        "shape": float(seen.predictions["logprob"].shape == seen.label_ids.shape),
    }
    logitless.install(ours)
    found = ours.evaluate()
    assert found["eval_right"] == own.evaluate()["eval_right"]
    assert found["eval_shape"] == 1


def test_a_metric_of_ones_own_keeps_its_name(tmp_path):
    """Also `accuracy`, which is ours where nobody else gives one."""
    made = built(tmp_path)
    logitless.install(made)
    made.compute_metrics = lambda seen: {"accuracy": 2.0}
    found = made.evaluate()
    assert found["eval_accuracy"] == 2
    assert 0 < found["eval_top_5_accuracy"] < 1


@pytest.mark.parametrize("how", ["within compute_metrics", "of another batch"])
def test_what_else_the_model_is_asked_meanwhile_counts_nowhere(tmp_path, how):
    """An evaluation within another's compute_metrics, and a loss that also calls the model for something else."""
    made = built(tmp_path)
    logitless.install(made)
    expected, inner = made.evaluate(), []

    def evaluates(seen):
        if not inner:
            inner.append(None)  # asked for once, by the outer one
            inner[0] = made.evaluate(made.eval_dataset[:1], metric_key_prefix="inner")
        return {}

    class Asking(Trainer):
        def compute_loss(self, model, inputs, *given, **more):
            found = super().compute_loss(model, inputs, *given, **more)
            inner.append(model(**{name: x[:1] for name, x in inputs.items() if name != "num_items_in_batch"}).loss)
            return found

    if how == "of another batch":
        made.__class__ = Asking
    else:
        made.compute_metrics = evaluates
    found = made.evaluate()
    assert inner
    same = ("eval_loss", *(f"eval_{name}" for name in NAMES))
    assert {name: found[name] for name in same} == pytest.approx({name: expected[name] for name in same}, rel=1e-6)
    if how == "within compute_metrics":
        assert inner[0]["inner_perplexity"] != found["eval_perplexity"]


def test_batches_of_unlike_lengths(tmp_path):
    """A Trainer pads what it gathers with -100, which is no rank and no log-prob."""
    made = built(tmp_path, per_device_eval_batch_size=1)
    rows = [{name: x[:length] for name, x in row.items()} for row, length in zip(data(3), (9, 12, 5), strict=True)]
    logitless.install(made)
    predicted = made.predict(rows)
    assert predicted.label_ids.shape == (3, 12)
    counts = predicted.label_ids[:, 1:] != -100
    for x in predicted.predictions.values():
        assert not x[:, 1:][~counts].any()
        assert x[:, 1:][counts].all()
    nats = -predicted.predictions["logprob"].sum() / counts.sum()
    assert math.exp(nats) == pytest.approx(predicted.metrics["test_perplexity"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_soft_prompt_is_no_token_of_predictions(tmp_path):
    """PEFT puts virtual tokens before the ids: what is predicted of each label stays beside it."""
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    made = trainer(tmp_path, get_peft_model(TINY["qwen3-tied"].build(), config), rows=data(rows=14))
    made.label_names = ["labels"]
    logitless.install(made)
    predicted = made.predict(made.eval_dataset)
    counts = predicted.label_ids[:, 1:] != -100
    for x in predicted.predictions.values():
        assert x.shape == predicted.label_ids.shape
        np.testing.assert_array_equal(x[:, 1:] != 0, counts)


def test_what_accelerate_says_of_predictions():
    """Shapes, which its debug mode compares across processes, numbers in lists, and descriptions."""
    given = {"rank": torch.tensor([[1, -100]]), "logprob": torch.tensor([[-0.5, -100.0]])}
    kept = Predictions(given)
    assert get_shape(kept) == get_shape(given)
    assert listify(kept) == {"rank": [[1, 0]], "logprob": [[-0.5, 0.0]]}
    assert get_data_structure(kept) == get_data_structure(given)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="its Trainer keeps the loss of NaN")
@pytest.mark.parametrize("whole", [True, False], ids=["trainer", "model"])
@pytest.mark.parametrize("how", ["causal", "smoothed", "multi-token", "uncounted", "of axolotl"])
def test_a_batch_without_a_token_that_counts_is_none_of_an_evaluation(tmp_path, how, whole):
    """transformers' loss of it is NaN, which a Trainer leaves out; our own is an error in training alone."""
    smoothing = 0.2 if how == "smoothed" and whole else 0.0
    made = built(tmp_path, per_device_eval_batch_size=2, label_smoothing_factor=smoothing)
    made.model_accepts_loss_kwargs = how != "uncounted"  # as of Gemma 3 with images
    more = {"multi_token": MedusaHeads(made.model, 1)} if how == "multi-token" else {}
    logitless.install(made if whole else made.model, **more)
    if how == "of axolotl":
        made.model.__dict__[STATE].empty = math.nan
    rows = made.eval_dataset
    expected = made.evaluate(rows)
    empty = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in rows[:2]]
    found = made.evaluate([*rows, *empty])
    same = ("eval_loss", *(f"eval_{name}" for name in NAMES if whole))
    assert {name: found[name] for name in same} == pytest.approx({name: expected[name] for name in same}, rel=1e-5)
    batch = {name: torch.stack([row[name] for row in empty]) for name in empty[0]}
    with pytest.raises(LabelError) if how != "of axolotl" else nullcontext():
        made.model(**batch)


WANTING_LOGITS = {
    "argmax": lambda seen: seen.predictions.argmax(-1),
    "slices": lambda seen: seen.predictions[..., :-1, :],
    "numpy": lambda seen: np.argmax(seen.predictions, axis=-1),
    "an array": lambda seen: np.array(seen.predictions),
    "a tensor": lambda seen: torch.tensor(seen.predictions),
    "an unknown name": lambda seen: seen.predictions["logits"],
}


@pytest.mark.parametrize("how", WANTING_LOGITS)
def test_a_metric_that_wants_logits_says_what_to_ask_for(tmp_path, how):
    made = built(tmp_path)
    logitless.install(made)
    made.compute_metrics = WANTING_LOGITS[how]
    with pytest.raises(ConfigError, match=r"asks for logits.*: ask for predictions\['logprob'\].*rank.*entropy"):
        made.evaluate()


@pytest.mark.parametrize("argmax", [lambda z: z.argmax(-1), lambda z: torch.argmax(z, -1)], ids=["method", "function"])
def test_a_preprocessing_that_wants_logits_too(argmax, tmp_path):
    made = built(tmp_path)
    logitless.install(made)
    made.compute_metrics = lambda seen: {}
    made.preprocess_logits_for_metrics = lambda logits, labels: argmax(logits)
    with pytest.raises(ConfigError, match=r"argmax.* asks for logits"):
        made.evaluate()


def test_no_logits_exist(tmp_path):
    """In a batch of 4 × 32 tokens; the head's own entries are 1 MiB."""
    vocab = 8192
    made = trainer(tmp_path, TINY["qwen3-tied"].build(vocab), rows=data(8, 32, vocab))
    logitless.install(made, memory_budget=2**19)
    made.compute_metrics = lambda seen: {"rows": len(seen.predictions["rank"])}
    found = {}
    assert largest_allocation(lambda: found.update(made.evaluate())) <= 4 * 4 * 32 * vocab / 4
    assert found["eval_rows"] == 6
    logitless.uninstall(made)
    made.compute_metrics = lambda seen: {}
    assert largest_allocation(made.evaluate) >= 4 * 4 * 32 * vocab


def test_switched_off_and_taken_back(tmp_path):
    made = built(tmp_path)
    logitless.install(made)
    assert "eval_accuracy" in made.evaluate()
    logitless.install(made, metrics=False)
    assert "eval_accuracy" not in made.evaluate()
    assert made.predict(made.eval_dataset).predictions.shape[-1] == VOCAB
    logitless.install(made, metrics=True)
    logitless.uninstall(made)
    assert "evaluation_loop" not in vars(made)
    assert "eval_accuracy" not in made.evaluate()
    logitless.install(made, loss="dense")
    assert made.predict(made.eval_dataset).predictions.shape[-1] == VOCAB
    with pytest.raises(OptionError, match="metrics: expected a Trainer whose loss is logitless, got Qwen3ForCausalLM"):
        logitless.install(made.model, metrics=True)
    with pytest.raises(OptionError, match="got loss='dense', which has logits"):
        logitless.install(made, loss="dense", metrics=True)


def _of_outputs(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class LossOfItsOwn(Trainer):
    """Keeps the labels from the model, whose logits it reads."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        loss = _of_outputs(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("how", ["a compute_loss_func", "a compute_loss", "no labels"])
def test_where_they_cannot_hold_evaluation_is_as_before(tmp_path, how):
    own, ours = built(tmp_path / "own"), built(tmp_path / "ours")
    rows = own.eval_dataset
    for made in (own, ours):
        if how == "a compute_loss_func":
            made.compute_loss_func = _of_outputs
        elif how == "a compute_loss":
            made.__class__ = LossOfItsOwn
        else:
            rows = [{"input_ids": row["input_ids"]} for row in rows]
    logitless.install(ours)
    expected, found = own.predict(rows), ours.predict(rows)
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-5)
    assert found.metrics.keys() == expected.metrics.keys()
    assert found.metrics.get("test_loss", 0) == pytest.approx(expected.metrics.get("test_loss", 0), rel=1e-5)
