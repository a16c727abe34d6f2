"""Runs of alignment through soft tokens, end to end: learning, resuming, refusing."""

import dataclasses
import io
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import stdev

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Lfm2Config, Lfm2ForCausalLM

from logitless.errors import ConfigError, DataError, DeviceError, LogitlessError, NotFiniteError, OptionError
from logitless.models.nsa.layers import attach
from logitless.models.nsa.options import NSAOptions, saved_with_nsa
from logitless.workbench.common.files import read_lines, write_lines
from logitless.workbench.grade import single, steps
from logitless.workbench.grade.comparison.intervals import interval
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.grade.data import (
    ROWS,
    SPLITS,
    Texts,
    _some,
    batch_of,
    prompts_of,
    prose_and_code,
    texts_of,
    train_classifier,
)
from logitless.workbench.grade.method import Method, Outcome, Task, gradient_variance
from logitless.workbench.grade.methods import Reinforce, method_of
from logitless.workbench.grade.models import SoftReward
from logitless.workbench.grade.run import run, show
from logitless.workbench.grade.single import policy_of, set_up
from logitless.workbench.runs.ending import Interrupted
from logitless.workbench.runs.rundir import differing
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.integrations.tiny import TINY
from tests.support.workbench.grading import of
from tests.support.workbench.micro import micro_model

QUIET = Console(quiet=True)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("ste", {"max_steps": 12, "variance_samples": 2}),
        ("gumbel", {"lora_rank": 0}),
        ("reinforce", {}),
        ("ppo", {"top_k": 0}),
        ("reinforce", {"top_k": 0, "lora_rank": 0}),  # the reference has an embedding of its own
    ],
)
def test_a_run_leaves_metrics_a_model_and_a_summary(small, method, changes):
    config = of(small, "-".join((method, *changes)), method=method, **changes)
    summary = run(config)
    records = read_lines(config.output_dir / "metrics.jsonl")
    assert [x["step"] for x in records] == list(range(config.max_steps + 1))
    taken = records[1:]
    assert taken[0]["train/kl"] == 0.0  # an unchanged policy
    assert all(x["train/kl"] > 0 for x in taken[1:])
    assert taken[0]["tau"] == 2.0
    assert taken[-1]["tau"] == 0.5
    assert all(0 < x["coverage"] <= 1 and x["grad_norm"] > 0 and x["peak_memory_bytes"] > 0 for x in taken)
    assert summary["after"]["test/samples"] == 8
    assert summary["after"]["test/reward_std"] > 0
    assert summary == json.loads((config.output_dir / "summary.json").read_text())
    assert (config.output_dir / "model" / "model.safetensors").exists()
    if method == "ste":
        assert summary["after"]["val/reward_mean"] > summary["before"]["val/reward_mean"] + 0.05


def vowels(text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def test_weights_that_rounding_keeps_are_warned_of(small, monkeypatch, capsys):
    def stop(*parts):
        raise OptionError("far enough")

    monkeypatch.setattr(single, "materials", stop)
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(OptionError, match="far enough"):
            run(of(small, f"rounded-{dtype}", dtype=dtype, lora_rank=0), Console(stderr=True))
        assert ("warning: weights of bfloat16 are trained" in capsys.readouterr().err) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("method", "steps"), [("ste", 6), ("reinforce", 1), pytest.param("gumbel_legacy", 6, marks=pytest.mark.slow)]
)
def test_a_rule_in_the_place_of_a_reward_model(small, method, steps):
    """Its reward is of the text: each completion's is the mean over its tokens, and the run learns to please it."""
    rule = f"{__name__}:vowels"
    config = of(small, f"rule-{method}", method=method, reward_model=None, token_reward=rule, max_steps=steps)
    summary = run(config)
    assert (summary["reward_model"], summary["token_reward"]) == (None, rule)
    assert not (config.output_dir / "reward").exists()
    for made in json.loads((config.output_dir / "completions.json").read_text())["after"]:
        tokens = [vowels(token["text"]) for token in made["tokens"]]
        assert made["reward"] == pytest.approx(sum(tokens) / len(tokens), abs=1e-6)
    if method == "ste":
        assert summary["after"]["val/reward_mean"] > summary["before"]["val/reward_mean"] + 0.05


def not_a_number(text: str) -> float:
    return float("nan")


def test_a_rule_that_is_not_a_number_is_not_bad_input(small):
    with pytest.raises(
        NotFiniteError, match=r"--token-reward .*: expected a finite number in float32 for every token, got nan for"
    ):
        run(of(small, "nan", reward_model=None, token_reward=f"{__name__}:not_a_number"))


def test_a_rule_and_a_reward_model_are_refused_together(small):
    with pytest.raises(OptionError, match="--token-reward stands in the place of --reward-model"):
        run(of(small, "both", token_reward=f"{__name__}:vowels").check())
    with pytest.raises(OptionError, match="--token-reward nothing: expected module:function"):
        run(of(small, "named", reward_model=None, token_reward="nothing"))
    with pytest.raises(OptionError, match="--reward-label is of a classifier, got it with --token-reward: leave it"):
        of(small, "label", reward_model=None, token_reward=f"{__name__}:vowels", reward_label=0).check()


def test_a_label_that_the_learned_reward_lacks_is_refused_before_it_is_learned():
    with pytest.raises(OptionError, match=r"--reward-label must be 0 \(code\) or 1 \(prose\), .*, got 2$"):
        GradeConfig(reward_label=2).check()
    assert GradeConfig(reward_label=0).check().reward_label == 0
    assert GradeConfig(reward_label=2, reward_model="r").check().reward_label == 2


@pytest.mark.parametrize("method", ["ste", "reinforce"])  # the second keeps a mean of its own
def test_a_killed_run_goes_on_as_if_nothing_had_been(small, method):
    whole = run(of(small, f"whole-{method}", method=method))
    place = Path(shutil.copytree(small.root / f"whole-{method}", small.root / f"killed-{method}"))
    for name in ("checkpoint-4", "model"):  # checkpoint-3 stays
        shutil.rmtree(place / name)
    (place / "summary.json").unlink()
    again = run(dataclasses.replace(small.config, method=method, output_dir=None, resume=place))
    for name in ("reward_mean", "reward_std", "kl"):
        assert again["after"][f"test/{name}"] == whole["after"][f"test/{name}"]
    assert [x["step"] for x in read_lines(place / "metrics.jsonl")] == [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def half_done(small):
    """A run that is to go on from its second step."""
    place = small.root / "half-done"
    run(of(small, "half-done", max_steps=2))
    (place / "summary.json").unlink()
    return place


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def turn_round(path):
    write_lines(path, read_lines(path)[::-1])


def drop_the_first(path):
    write_lines(path, read_lines(path)[1:])


PROMPTS = [("prompts.jsonl", change) for change in (change_a_byte, turn_round, drop_the_first)]


@pytest.mark.parametrize(("name", "change"), [("checkpoint-2/grade.pt", change_a_byte), *PROMPTS])
def test_what_a_run_goes_on_with_is_what_it_was(small, half_done, tmp_path, name, change):
    place = shutil.copytree(half_done, tmp_path / "run")
    change(place / name)
    with pytest.raises(LogitlessError) as caught:
        run(dataclasses.replace(small.config, output_dir=None, resume=place, max_steps=3))
    assert str(place / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prompts_that_are_lost_are_those_of_the_steps_it_began_with(small, half_done, tmp_path):
    place = shutil.copytree(half_done, tmp_path / "run")
    (place / "prompts.jsonl").unlink()
    run(dataclasses.replace(small.config, output_dir=None, resume=place, max_steps=3))
    assert (place / "prompts.jsonl").read_bytes() == (half_done / "prompts.jsonl").read_bytes()


def test_a_label_that_is_given_as_it_would_be_anyway_is_no_other_option():
    """As a run from Python has it, or one from before there was a default."""
    assert not differing(GradeConfig(reward_label=1), GradeConfig())
    assert not differing(GradeConfig(), GradeConfig(reward_label=1))
    assert differing(GradeConfig(reward_label=0), GradeConfig()) == {"reward_label": (0, 1)}


def test_a_signal_outside_the_steps_says_how_to_go_on(small, half_done, tmp_path, monkeypatch):
    place = shutil.copytree(half_done, tmp_path / "run")
    monkeypatch.setattr(single, "_conclude", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted, match=f"--resume {place} goes on from step 3"):
        run(dataclasses.replace(small.config, output_dir=None, resume=place, max_steps=3))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_examples_of_before_are_the_policys_of_before(small, half_done, tmp_path):
    place = shutil.copytree(half_done, tmp_path / "run")
    whole = json.loads((place / "completions.json").read_text())
    (place / "completions.json").unlink()
    run(dataclasses.replace(small.config, output_dir=None, resume=place, max_steps=3))
    assert json.loads((place / "completions.json").read_text())["before"] == whole["before"]
    assert len(list(place.glob("checkpoint-*"))) == 2  # the newest, as of every run


def test_examples_are_of_the_entries_that_the_reward_model_has(small, tmp_path):
    """A policy padded to more rows than the reward model does not draw those of them that it alone has."""
    model = shutil.copytree(small.model, tmp_path / "model")
    micro_model(vocab_size=4096, initializer_range=0.2).save_pretrained(model)
    run(of(small, "padded", model=str(model), max_steps=1))
    found = json.loads((small.root / "padded" / "completions.json").read_text())
    assert all(0 < example["reward"] < 1 for when in ("before", "after") for example in found[when])


def test_rows_that_pad_the_policys_embedding_are_no_entries(small, tmp_path):
    model = shutil.copytree(small.model, tmp_path / "model")
    micro_model(vocab_size=300, initializer_range=0.2).save_pretrained(model)
    config = of(small, "beyond", model=str(model), max_steps=1)
    with pytest.raises(OptionError, match=r"--top-k 260: .* has a vocabulary of 259"):
        run(dataclasses.replace(config, top_k=260))
    config.output_dir.mkdir()
    write_lines(config.output_dir / "prompts.jsonl", [{"split": name, "ids": [5, 299]} for name in SPLITS])
    with pytest.raises(DataError, match="expected ids below 259"):
        set_up(config, config.output_dir, *policy_of(config, QUIET), QUIET)


def test_what_accumulates_is_the_mean_of_the_parts(small):
    config = of(small, "parts")
    model = micro_model(initializer_range=0.2).eval()
    reward = SoftReward.of(AutoModelForSequenceClassification.from_pretrained(small.reward), 259, 1)
    frozen = micro_model(initializer_range=0.2).eval().requires_grad_(False)
    task = Task(config, model, frozen, reward, 259, 2)
    prompts, seeds = [[5, 6, 7], [8, 9], [10, 11, 12], [13]], torch.arange(4)
    method = method_of(task)
    method.backward(batch_of(prompts, seeds, 0, 12, model.device), 1.0)
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for part in (slice(0, 2), slice(2, 4)):
        method.backward(batch_of(prompts[part], seeds[part], 0, 12, model.device), 1.0, share=0.5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, whole[name], rtol=1e-3, atol=1e-4 * float(whole[name].abs().max()))


def test_the_variance_is_over_samples_of_one_batch(small):
    model = micro_model(initializer_range=0.2).eval()
    reward = SoftReward.of(AutoModelForSequenceClassification.from_pretrained(small.reward), 259, 1)
    task = Task(of(small, "variance"), model, model, reward, 259, 2)
    batch = batch_of([[5, 6, 7], [8, 9]], torch.tensor([1, 2]), 0, 12, model.device)
    method = method_of(task)
    found = gradient_variance(method, batch, 1.0, 3)
    each = []
    for i in range(3):
        model.zero_grad()
        method.backward(dataclasses.replace(batch, seeds=batch.seeds + 7919 * (i + 1)), 1.0)
        each.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    exact = float(torch.stack(each).var(0).sum())
    assert found["variance"] == pytest.approx(exact, rel=1e-6)
    assert exact > 0


def test_prose_and_code_come_apart():
    text = '"""About this.\n\nMore."""\nimport os\n# a comment\ndef f():\n    """Says hello."""\n    return os\n'
    found = list(prose_and_code([text, "not python ("]))
    assert found == [
        ('"""About this.\nMore."""\n    """Says hello."""\n', 1),
        ("import os\ndef f():\n    return os\n", 0),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_prose_is_told_from_code_by_the_lines_that_python_counts(end):
    """A form feed ends none, as others do that are in strings; a coroutine's docstring is prose, too."""
    lines = ["\x0c", "x = 'a\u2028b'", "async def f():", '    """Waits."""', "    return x", ""]
    assert list(prose_and_code([end.join(lines)])) == [
        (lines[3] + end, 1),
        (end.join([lines[1], lines[2], lines[4], ""]), 0),
    ]


def test_the_longest_rows_of_a_draw_are_learned_from_too():
    rows = [([number] * (number + 1), 0) for number in range(ROWS + 1)]
    widths = {_some(rows, Random(seed))[0].shape for seed in range(20)}
    assert widths == {(ROWS, 1), (ROWS, 2)}


def test_documents_of_one_long_line_have_prompts_too(small):
    texts = Texts({name: [f"{name} {i} " + "word " * 40 for i in range(3)] + ["short"] for name in SPLITS}, [])
    found = prompts_of(small.config, texts, pretrained(str(small.model)))
    assert all(len(ids) == small.config.prompt_length for rows in found.values() for ids in rows)
    assert {name: len(rows) for name, rows in found.items()} == dict.fromkeys(SPLITS, 3)


def test_prompts_are_as_many_as_steps_and_evaluations_take(small):
    config = dataclasses.replace(small.config, max_steps=2, batch_size=2, evaluation_prompts=3)
    texts = Texts({name: [f"{name} {i} " + "word " * 40 for i in range(10)] for name in SPLITS}, [])
    found = prompts_of(config, texts, pretrained(str(small.model)))
    assert {name: len(rows) for name, rows in found.items()} == {"train": 8, "validation": 3, "test": 3}


def test_prompts_are_looked_for_until_there_are_enough(small, monkeypatch):
    monkeypatch.setattr("logitless.workbench.grade.data.MOST_PROMPTS", 8)  # of two documents, where they have some
    long = [f"{i} " + "word " * 40 for i in range(4)]
    texts = Texts({name: ["short"] * 96 + [f"{name} {x}" for x in long] for name in SPLITS}, [])
    found = prompts_of(small.config, texts, pretrained(str(small.model)))
    assert {name: len(rows) for name, rows in found.items()} == dict.fromkeys(SPLITS, 4)


def test_an_opening_takes_room_of_a_prompt_but_cuts_no_line(small):
    tokenizer = dataclasses.replace(pretrained(str(small.model)), opening=(1,))
    lines = tokenizer.encode(["12345\n"])[0]
    assert 2 * len(lines) == small.config.prompt_length
    found = prompts_of(small.config, Texts({name: ["12345\n" * 4] for name in SPLITS}, []), tokenizer)
    assert all(rows and all(ids == [1, *lines] for ids in rows) for rows in found.values())


def test_memory_is_that_of_a_whole_batch_where_prompts_are_fewer(small, monkeypatch):
    config = of(small, "few")
    config.output_dir.mkdir()
    rows = {"train": ([5, 6], [7]), "validation": ([8],), "test": ([9],)}
    write_lines(config.output_dir / "prompts.jsonl", [{"split": k, "ids": ids} for k, x in rows.items() for ids in x])
    state = set_up(config, config.output_dir, *policy_of(config, QUIET), QUIET)
    monkeypatch.setattr(steps, "memory_bytes", lambda method, batch, tau: batch.mask.sum(1).tolist())
    assert steps._memory(state) == [2, 1, 2, 1]


def test_splits_share_no_document():
    texts = texts_of(None)
    groups = [*(texts.prompts[name] for name in SPLITS), texts.reward]
    assert all(len(group) > 10 for group in groups)
    assert sum(len(set(group)) for group in groups) == len(set().union(*groups))


def test_the_classifier_tells_prose_from_code(small):
    model, accuracy = train_classifier(micro_model(), texts_of(None).reward, pretrained(str(small.model)), 0, 32)
    assert accuracy > 0.7
    assert model.config.num_labels == 2


def test_the_classifier_of_a_policy_in_bfloat16_learns_in_float32(small):
    """And rewards the policy from there."""
    place = run(of(small, "bfloat16", reward_model=None, dtype="bfloat16", max_steps=1))["reward_model"]
    weights = load_file(Path(place) / "model.safetensors").values()
    assert {x.dtype for x in weights} == {torch.float32}


def test_the_classifier_learns_on_processors_wherever_the_policy_is(small):
    """Here on the meta device, whose numbers cannot be had."""
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        train_classifier(micro_model().to("meta"), [], pretrained(str(small.model)), 0, 32)


def test_the_classifier_of_a_policy_with_sparse_attention_has_none(small):
    """Its two layers have no parameters for it, and passages are short."""
    policy = attach(micro_model(), NSAOptions(8, 4, 16, 4, 10))
    model, accuracy = train_classifier(policy, texts_of(None).reward, pretrained(str(small.model)), 0, 32)
    assert accuracy > 0.7
    assert not saved_with_nsa(model.config)


def test_a_policy_of_an_architecture_without_classifiers_needs_a_reward(small):
    policy = TINY["granite-scaling"].build(259)
    with pytest.raises(ConfigError, match=r"no sequence classifier of GraniteForCausalLM's.*: give --reward-model"):
        train_classifier(policy, [], pretrained(str(small.model)), 0, 32)


def test_a_policy_that_cannot_read_soft_tokens_is_refused_before_a_reward_is_learned(small, tmp_path, monkeypatch):
    monkeypatch.setattr(single, "train_classifier", None)
    place = shutil.copytree(small.model, tmp_path / "model", ignore=shutil.ignore_patterns("config.json", "*.safe*"))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Lfm2Config(vocab_size=259, num_hidden_layers=2, layer_types=["conv", "full_attention"], **sizes)
    Lfm2ForCausalLM(config).save_pretrained(place)
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM: methods on soft tokens need layers that keep keys"):
        run(of(small, "lfm2", model=str(place), reward_model=None, lora_rank=0))
    assert not (small.root / "lfm2").exists()


def test_bad_input_is_refused(small, tmp_path):
    for changes, words in (
        ({"tau_end": 1e-35}, r"--tau-end must be in 1e-24..1e\+26"),
        ({"top_k": -1}, "--top-k must be 0 or more"),
        ({"top_k": 260}, "--top-k 260: .* has a vocabulary of 259"),
        ({"prompt_length": 60}, "^--prompt-length and --completion-length, together 6[0-9]: .* has positions up to 64"),
        ({"beta": -1.0}, "--beta must be 0 or more"),
    ):
        with pytest.raises(OptionError, match=words):
            run(of(small, "bad", **changes))
    with pytest.raises(OptionError, match="a prompt has 9 tokens"):
        batch_of([[1] * 9], torch.zeros(1, dtype=torch.long), 0, 8, torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="sees no GPU"):
            run(of(small, "bad", device="cuda"))
    with pytest.raises(ConfigError, match="--reward-model /nowhere: "):
        run(of(small, "bad", reward_model="/nowhere"))
    other = tmp_path / "other"
    shutil.copytree(small.reward, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="tokenizer differs from the policy's"):
        run(of(small, "bad", reward_model=str(other)))


@pytest.mark.parametrize("method", ["ste", "all"])
def test_a_run_that_is_refused_leaves_nothing(small, method):
    """It left its prompts and its lock, in a directory that was made for it."""
    with pytest.raises(ConfigError, match="--reward-label 2: "):
        run(of(small, f"refused-{method}", method=method, reward_label=2))
    assert not (small.root / f"refused-{method}").exists()


def changed(place: Path, **values: object) -> None:
    """Other values in a saved config.json."""
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **values}))


def tensors(place: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Other tensors in a saved model."""
    found = load_file(place / "model.safetensors")
    save_file({name: change(x).contiguous() for name, x in found.items()}, place / "model.safetensors")


REWARD_MODELS = {  # how a good one is damaged, and what is said
    "positions": (lambda at: changed(at, max_position_embeddings=4), "has positions up to 4; give one with more"),
    "whole numbers": (lambda at: tensors(at, lambda x: x.char()), "expected weights in floating point, got .* in I8"),
    "truths": (lambda at: tensors(at, lambda x: x > 0), "expected weights in floating point, got .* in BOOL"),
    "shapes": (lambda at: tensors(at, lambda x: x[:1]), r"its config.json asks for a .* of .*, its weights have \(1"),
    "dropout": (lambda at: changed(at, attention_dropout=7), "attention_dropout: expected a share, 0 to 1, got 7"),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), "no .safetensors weights to reward with$"),
}


@pytest.mark.parametrize("what", REWARD_MODELS)
def test_reward_models_that_do_not_hold_together(small, tmp_path, what):
    damage, said = REWARD_MODELS[what]
    place = tmp_path / "reward"
    shutil.copytree(small.reward, place)
    damage(place)
    with pytest.raises(LogitlessError, match=f"--reward-model {place}.*{said}") as caught:
        single._reward_model(str(place), 5)
    assert "--model" not in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m", "tiny", "nowhere"])
def test_language_models_are_no_reward_models(name):
    got = "got neither" if name == "nowhere" else "got a language model"
    with pytest.raises(ConfigError, match=f"--reward-model {name}: expected a directory with a seq.* hub id .*, {got}"):
        single._reward_model(name, 5)


def test_more_ranks_than_one_are_refused(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="--method gumbel runs on one device"):
        run(of(small, "ranks", method="gumbel"))


def test_a_gradient_that_explodes_is_clipped_and_said_once(small, monkeypatch):
    monkeypatch.setattr("logitless.workbench.grade.steps.LARGE", 1e-9)
    console = Console(file=io.StringIO(), width=200)
    run(of(small, "large", method="gumbel", max_steps=2, max_grad_norm=1e-3), console)
    said = console.file.getvalue()
    assert said.count("clipped to 0.001") == 1
    assert "step 1: a gradient of norm" in said
    records = read_lines(small.root / "large" / "metrics.jsonl")[1:]
    assert all(x["clipped"] and x["grad_norm"] > 1e-3 for x in records)


def test_a_reward_that_is_not_a_number_stops_the_run(small, monkeypatch):
    monkeypatch.setattr(SoftReward, "_logits", lambda self, rows, mask: rows.sum(1)[:, :2] * float("nan"))
    with pytest.raises(NotFiniteError, match="reward model returned NaN"):
        run(of(small, "nan"))


def test_a_stopped_run_says_how_to_go_on(small, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Method, "step", stop)
    with pytest.raises(Interrupted, match="logitless align --resume"):
        run(of(small, "stopped"))


def test_the_score_function_has_no_bias(small):
    """One token of four: the estimates of all of them, weighted by their probability, are the exact gradient."""
    config = of(small, "score", method="reinforce", completion_length=1, top_k=4, beta=0.3)
    model = micro_model(initializer_range=0.2).eval()
    frozen = micro_model(initializer_range=0.1).eval().requires_grad_(False)
    reward = SoftReward.of(AutoModelForSequenceClassification.from_pretrained(small.reward), 259, 1)
    task = Task(config, model, frozen, reward, 259, 2)
    prompt = torch.tensor([[5, 6, 7]])
    z, z_ref = model(prompt).logits[0, -1], frozen(prompt).logits[0, -1]
    top, ids = z.topk(4)
    p, kl = top.softmax(-1), (z.softmax(-1) * (z.log_softmax(-1) - z_ref.log_softmax(-1))).sum()
    rewards = reward.of_ids(ids[:, None], torch.ones(4, 1, dtype=torch.bool))
    exact = torch.autograd.grad(0.3 * kl - p @ rewards, model.model.layers[0].mlp.up_proj.weight)[0]
    method = Reinforce(task)
    method.baseline = 0.7
    found: dict[float, torch.Tensor] = {}
    seed = 0
    while len(found) < 4:
        seed += 1
        model.zero_grad()
        batch = batch_of([[5, 6, 7]], torch.tensor([seed]), 0, 12, model.device)
        outcome = method.backward(batch, 1.0)
        found[min(rewards.tolist(), key=lambda r: abs(r - outcome.rewards[0]))] = model.model.layers[
            0
        ].mlp.up_proj.weight.grad.clone()
    mean = sum(share * found[r] for share, r in zip(p.tolist(), rewards.tolist(), strict=True))
    assert len({round(r, 6) for r in found}) == 4
    torch.testing.assert_close(mean, exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))


def test_the_baseline_is_a_decayed_mean_of_what_was_gained_and_is_taken_off(small):
    config = of(small, "baseline", method="reinforce", beta=0.5, baseline_decay=0.75)
    model = micro_model(initializer_range=0.2).eval()
    reward = SoftReward.of(AutoModelForSequenceClassification.from_pretrained(small.reward), 259, 1)
    method = Reinforce(Task(config, model, model, reward, 259, 2))
    batch = batch_of([[5, 6, 7]], torch.tensor([1]), 0, 12, model.device)

    def slope() -> torch.Tensor:
        model.zero_grad()
        outcome = method.backward(batch, 1.0)
        gain = outcome.rewards[0] - 0.5 * outcome.kls[0]
        return model.model.norm.weight.grad / (gain - method.baseline)  # the log-probability's: KL has none

    method.learn(2.0, 2.0)
    assert method.baseline == pytest.approx(1.0)
    first = slope()
    method.learn(5.0, 0.0)
    assert method.baseline == pytest.approx(0.75 * 1.0 + 0.25 * 5.0)
    torch.testing.assert_close(slope(), first)
    again = Reinforce(method.task)
    again.load(json.loads(json.dumps(method.state())))
    assert again.baseline == method.baseline


def test_the_baseline_begins_with_what_was_gained_in_validation(small, monkeypatch):
    """Before the first gradient, whose advantages would be whole rewards without it."""
    seen, backward = [], Reinforce.backward

    def looked_at(method: Reinforce, *given: object) -> Outcome:
        seen.append(method.baseline)
        return backward(method, *given)

    monkeypatch.setattr(Reinforce, "backward", looked_at)
    before = run(of(small, "begins", method="reinforce", max_steps=1))["before"]
    gained = before["val/reward_mean"] - small.config.beta * before["val/kl"]
    assert seen == pytest.approx([gained] * len(seen))
    assert seen


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_what_few_seeds_cannot_say_is_said(seeds):
    """A sample's deviation has a column of its own, and is no interval; the table fits 80 columns."""
    reward = {"mean": 0.803, "values": [0.803] * seeds} | ({"low": 0.7, "high": 0.9} if seeds > 1 else {})
    found = {
        "test_reward": reward,
        "test_reward_std": 0.36,
        "val_reward_before": 0.5,
        "test_kl": {"mean": 1.0},
        "generalisation_gap": {"mean": 0.01},
        "seconds_per_step": 12.3,
        "memory_bytes": 12 << 30,
        "peak_memory_bytes": 13 << 30,
        "grad_variance": 1.0,
        "grad_mean_square": 1e-3,
    }
    summary = {"method": "all", "model": "m", "steps": 3, "seeds": seeds, "methods": {"gumbel_legacy": found}}
    summary |= {
        "beside_legacy": {},
        "criteria": [],
        "left_out": {},
        "test_samples": seeds,
        "intervals": "95 %, Student's t over seeds",
        "output_dir": "d",
    }
    console = Console(file=io.StringIO(), width=80)
    show(summary, console)
    text = console.file.getvalue()
    assert "±" not in text
    assert ("0.700-0.900" in text) == (seeds > 2)
    few = {1: "intervals: not shown: 1 seed; give --seeds 3 or more", 2: "intervals: not shown: 2 seeds; give"}
    assert few.get(seeds, "intervals: 95 %, Student's t over seeds") in text
    assert f"of {seeds} test sample{'s' if seeds > 1 else ''}\n" in text
    assert "0.36" in text
    assert "…" not in text


def test_intervals_over_seeds_are_students():
    found = interval([1.0, 2.0, 4.0])
    assert found["high"] - found["mean"] == pytest.approx(4.303 * stdev([1, 2, 4]) / 3**0.5)
    many = interval([float(i % 2) for i in range(31)])  # 30 degrees of freedom: 2.042
    assert many["high"] - many["mean"] == pytest.approx(2.042 * stdev(many["values"]) / 31**0.5, rel=3e-3)
    assert "low" not in interval([1.0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_learns_with_every_method(tmp_path, monkeypatch):
    """As `logitless align --method all` from a clean clone: ten minutes on two quiet cores."""
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(GradeConfig().defaults(), method="all", device="cpu", output_dir=tmp_path / "all")
    summary = run(config)
    assert set(summary["methods"]) == {"ste", "gumbel", "reinforce", "ppo", "ste_legacy", "gumbel_legacy"}
    gains = {name: x["test_reward"]["mean"] - x["val_reward_before"] for name, x in summary["methods"].items()}
    assert all(gains[name] > 0.2 for name in ("ste", "reinforce", "ppo", "ste_legacy"))


def test_looks_are_at_the_start_half_way_and_at_the_end(small):
    """Also of a run whose steps are no multiple of four."""
    run(of(small, "looks", max_steps=6, completion_length=2, variance_samples=2))
    records = read_lines(small.root / "looks" / "metrics.jsonl")
    assert [x["step"] for x in records if "val/reward_mean" in x] == [0, 1, 3, 4, 6]
    assert [x["step"] for x in records if "grad_variance" in x] == [0, 3, 6]
