"""Second uses: another Trainer, another way back, a new model, callbacks that call the model, others' wrappers."""

import functools

import pytest
import torch
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

import logitless
from logitless.errors import ConfigError
from tests.integrations.transformers.test_trainer import data, losses, trainer
from tests.support.integrations.tiny import TINY


def build():
    return TINY["qwen3-tied"].build()


def trained(made: Trainer) -> list[float]:
    made.train()
    return losses(made)


def test_a_trainers_smoothing_is_its_own(tmp_path):
    """A second Trainer of the same model, which has none, trains without; what was given to install stays."""
    own, ours = build(), build()
    for smoothing in (0.3, 0.0):
        expected = trained(trainer(tmp_path / f"own {smoothing}", own, label_smoothing_factor=smoothing))
        made = trainer(tmp_path / f"ours {smoothing}", ours, label_smoothing_factor=smoothing)
        logitless.install(made)
        assert trained(made) == pytest.approx(expected, rel=1e-4)
    given = build()
    logitless.install(given, label_smoothing=0.2)
    logitless.install(trainer(tmp_path / "given", given))
    assert given._logitless.smoothing == 0.2


@pytest.mark.parametrize("how", ["the model", "another Trainer", "the model, and installed again"])
def test_a_trainers_smoothing_survives_any_uninstall(how, tmp_path):
    expected = trained(trainer(tmp_path / "own", build(), label_smoothing_factor=0.2))
    made = trainer(tmp_path / "ours", build(), label_smoothing_factor=0.2)
    logitless.install(made)
    if how == "another Trainer":
        other = trainer(tmp_path / "other", made.model)
        logitless.install(other)
        logitless.uninstall(other)
    else:
        logitless.uninstall(made.model)
    if "again" in how:
        logitless.install(made.model)
    assert made.label_smoother is not None
    assert trained(made) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("kind", "smoothing"), [("qwen3-tied", 0.2), ("mixtral", 0.2), ("mixtral", 0.0)])
def test_a_model_that_the_trainer_makes_anew_is_installed(tmp_path, kind, smoothing):
    """What else Mixtral adds to its loss is left out by a smoother, and by nothing else."""

    def made(name):
        arguments = trainer(tmp_path / name, build(), label_smoothing_factor=smoothing).args
        return Trainer(
            model_init=lambda: TINY[kind].build(), args=arguments, train_dataset=data(), eval_dataset=data()[:6]
        )

    own, ours = made("own"), made("ours")
    first = ours.model
    logitless.install(ours, memory_budget=1 << 20)
    assert trained(ours) == pytest.approx(trained(own), rel=1e-4)
    assert ours.model._logitless.budget == 1 << 20
    logitless.uninstall(first)  # which is no Trainer's any more
    found = ours.evaluate()
    assert found["eval_loss"] == pytest.approx(own.evaluate()["eval_loss"], rel=1e-4)
    assert found["eval_perplexity"] > 1
    logitless.uninstall(ours.model if smoothing else ours)
    assert "call_model_init" not in vars(ours)
    ours.train()
    assert not hasattr(ours.model, "_logitless")


@pytest.mark.parametrize("metrics", [False, True])
def test_another_model_in_an_installed_trainer_is_evaluated_as_it_is(tmp_path, metrics):
    made, expected = trainer(tmp_path / "made", build()), trainer(tmp_path / "own", build())
    logitless.uninstall(made)  # of which nothing was replaced
    logitless.install(made, metrics=metrics)
    made.model = made.model_wrapped = expected.model
    found, own = (x.predict(data()[:6]) for x in (made, expected))
    assert (found.predictions == own.predictions).all()
    assert found.metrics["test_loss"] == own.metrics["test_loss"]


def test_methods_of_the_instance_are_given_back(tmp_path):
    made = trainer(tmp_path, build())
    made.model_init = build
    names = ("call_model_init", "prediction_step", "evaluation_loop")
    for name in names:
        setattr(made, name, functools.partial(getattr(made, name)))
    before = {name: vars(made)[name] for name in names}
    logitless.install(made)
    logitless.install(made, memory_budget=1 << 20)
    assert all(vars(made)[name] is not before[name] for name in names)
    logitless.uninstall(made)
    assert {name: vars(made).get(name) for name in names} == before


def test_an_evaluation_within_an_evaluation(tmp_path):
    plain = trainer(tmp_path / "plain", build())
    logitless.install(plain)
    plain.compute_metrics = lambda _: {}
    expected, made = plain.evaluate(), trainer(tmp_path / "made", build())

    def metrics(_):
        made.compute_metrics = None
        inner.append(made.evaluate(data()[:1], metric_key_prefix="inner"))
        return {}

    inner = []
    made.compute_metrics = metrics
    logitless.install(made)
    found = made.evaluate()
    assert inner[0]["inner_perplexity"] != found["eval_perplexity"]
    for name in ("eval_loss", "eval_perplexity", "eval_entropy", "eval_accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def test_metrics_are_of_the_call_with_the_batchs_labels(tmp_path):
    class Twice(Trainer):
        def compute_loss(self, model, inputs, *given, **more):
            loss = super().compute_loss(model, inputs, *given, **more)
            model(**{name: x[:1, :6] for name, x in inputs.items()})
            return loss

    usual = trainer(tmp_path / "usual", build())
    twice = Twice(model=build(), args=usual.args, eval_dataset=data()[:6])
    for made in (usual, twice):
        logitless.install(made)
    assert twice.evaluate()["eval_perplexity"] == pytest.approx(usual.evaluate()["eval_perplexity"], rel=1e-6)
    assert twice.predict(data()[:6]).predictions["rank"].shape == (6, 12)


def test_a_hook_calls_the_model_again():
    """For a loss and for logits of other sequences, while the loss of these is on its way."""
    model, ids = build(), torch.stack([row["input_ids"] for row in data()[:2]])

    def found():
        inner, again = [], []

        def hook(*_):
            if not again:
                again.append(1)
                inner.extend([model(ids[:1], labels=ids[:1]).loss, model(ids[1:, :3]).logits])

        with model.model.norm.register_forward_hook(hook):
            loss = model(ids, labels=ids).loss
        return loss, *inner, torch.autograd.grad(loss, model.model.embed_tokens.weight)[0]

    expected = found()
    logitless.install(model)
    for _ in range(2):  # the first call also looks at what the model does to its logits
        torch.testing.assert_close(found(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda logits, labels, **_: logits.sum() * 0, "<lambda>"),
        (functools.partial(lambda logits, labels, **_: logits.sum() * 0), "a partial of <lambda>"),
        (functools.partial(ForCausalLMLoss), "a partial of ForCausalLMLoss"),
    ],
)
def test_a_loss_set_after_install_is_refused(loss, name):
    model, ids = build(), data()[0]["input_ids"][None]
    logitless.install(model)
    before = model(ids, labels=ids).loss
    model.loss_function = loss
    with pytest.raises(ConfigError, match=f"loss is {name}, expected transformers' ForCausalLMLoss") as caught:
        model(ids, labels=ids)
    assert "\n" not in str(caught.value)
    del model._loss_function
    assert model(ids, labels=ids).loss == before


def test_others_wrappers_stay(tmp_path):
    """They may copy our function's marks, as functools.wraps does."""
    model, ids, calls = build(), data()[0]["input_ids"][None], []
    logitless.install(model)
    ours = model.forward

    @functools.wraps(ours)
    def forward(*given, **more):
        calls.append(1)
        return ours(*given, **more)

    model.forward = forward
    logitless.uninstall(model)
    assert model(ids, labels=ids).logits is not None
    assert calls == [1]
    other = build()
    logitless.install(other)
    saved = other.forward
    logitless.uninstall(other)
    other.forward = saved
    torch.testing.assert_close(other(ids, labels=ids).loss, model(ids, labels=ids).loss)

    made = trainer(tmp_path, build())
    made.model_init = build
    logitless.install(made)
    for name in ("evaluation_loop", "prediction_step", "call_model_init"):
        own = getattr(made, name)
        setattr(made, name, lambda *a, own=own, name=name, **k: calls.append(name) or own(*a, **k))
    expected = made.evaluate()["eval_loss"]
    logitless.uninstall(made)
    del calls[:]
    found = made.evaluate()
    assert not hasattr(made.call_model_init(), "_logitless")
    assert {"evaluation_loop", "prediction_step", "call_model_init"} <= set(calls)
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert "eval_perplexity" not in found


def test_generations_callbacks_may_call_the_model():
    model, ids = build().eval(), data()[0]["input_ids"][None]
    options = {"seeds": torch.tensor([3]), "max_new_tokens": 6, "do_sample": True, "top_k": 0}
    expected = logitless.generate(model, {"input_ids": ids}, **options)
    seen = []

    def on_step(_):
        with torch.no_grad():
            seen.append(model(ids).logits)
        logitless.score(model, {"input_ids": ids})
        logitless.generate(model, {"input_ids": ids}, max_new_tokens=1, seeds=torch.tensor([0]))

    found = logitless.generate(model, {"input_ids": ids}, on_step=on_step, **options)
    assert torch.equal(found.record.token, expected.record.token)
    assert torch.equal(found.record.logprob, expected.record.logprob)
    assert len(seen) == 6
    torch.testing.assert_close(seen[0], model(ids).logits)
