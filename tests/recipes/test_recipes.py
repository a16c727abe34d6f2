"""The scripts that a reader copies: each runs, learns, is short, and imports public names alone."""

import ast
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import logitless

pytest.importorskip("trl")

from logitless.integrations import trl  # after the check
from logitless.integrations.trl import install

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.py"))
OTHERS = {"torch", "transformers", "trl", "peft", "datasets"}
PUBLIC = (
    "logitless",
    "logitless.losses",
    "logitless.memory",
    "logitless.relax",
    "logitless.sample",
    "logitless.integrations.transformers.soft_tokens",
    "logitless.integrations.trl",
)

# TRL 1.16 and PEFT 0.21 use names that transformers 5.23 gives up
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a recipe in an empty folder, as `python recipes/NAME.py OPTIONS`; returns its global names."""

    def run_it(name: str, *options: object) -> dict:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        return runpy.run_path(str(FOLDER / name), run_name="__main__")

    return run_it


def mean(numbers) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def used_names(tree: ast.Module) -> set[tuple[str, str]]:
    """(module, name) of all that a script imports, and takes from the modules that it imports."""
    found, modules = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module in PUBLIC:
                found.add((module, node.attr))
    return found


def private_names(tree: ast.Module) -> set[tuple[str, str]]:
    """Those that are neither public here, nor of the packages that a recipe may use, nor of Python's own library."""
    private = set()
    for module, name in used_names(tree):
        package = module.partition(".")[0]
        if package == "logitless":
            public = module in PUBLIC and (not name or name in import_module(module).__all__)
        else:
            public = package in OTHERS or package in sys.stdlib_module_names
        if not public:
            private.add((module, name))
    return private


def test_there_are_three():
    assert [path.name for path in RECIPES] == ["grade.py", "grpo.py", "pretrain.py"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_short_and_public(path):
    text = path.read_text("utf-8")
    assert text.count("\n") <= 150
    assert private_names(ast.parse(text)) == set()


def test_a_private_name_is_noticed():
    found = private_names(
        ast.parse(
            "import logitless as ll\nfrom logitless import relax\nfrom logitless.vocab.api import token_stats\n"
            "import rich\nll.token_stats\nll.vocab\nrelax.generate\nrelax.carry\n"
        )
    )
    assert found == {
        ("logitless.vocab.api", "token_stats"), ("rich", ""), ("logitless", "vocab"), ("logitless.relax", "carry")
    }  # fmt: skip


def pretrain(run, tmp_path: Path) -> dict:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of the text counts {i % 10}, {i % 7} and {i % 3}\n" for i in range(1500)))
    return run("pretrain.py", "--data", text, "--steps", 30, "--length", 32, "--lr", 1e-2, "--accumulate", 2)


def test_pretrain_lowers_the_loss_and_saves_a_model(run, tmp_path, capsys):
    found = pretrain(run, tmp_path)
    printed = capsys.readouterr().out
    assert "3 GEMMs (in-forward)" in printed
    assert f"held-out loss {found['before']:.3f} -> {found['after']:.3f}" in printed
    assert mean(found["losses"][-5:]) < 0.7 * mean(found["losses"][:5])
    assert found["after"] < 0.7 * found["before"]

    # The streamed loss is the model's own dense one, and the saved model gives it too.
    batch = found["batch_of"](found["held_ids"])
    saved = found["AutoModelForCausalLM"].from_pretrained("runs/pretrain")
    with torch.no_grad():
        dense = torch.nn.functional.cross_entropy(saved(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        torch.testing.assert_close(found["loss_of"](batch), dense)


def test_the_page_shows_what_the_default_loss_costs():
    page = (FOLDER.parent / "docs" / "recipes.md").read_text("utf-8")
    (shown,) = re.findall(r"^the loss: (.*)$", page, re.MULTILINE)
    hidden, weight = torch.empty(8, 128, 128, requires_grad=True), torch.nn.Parameter(torch.empty(2048, 128))
    labels = torch.zeros(8, 128, dtype=torch.long)
    said = str(logitless.explain(hidden, logitless.LMHead(weight), labels, loss=True))
    assert re.match(".*".join(map(re.escape, shown.split(" ..."))), said), said


def test_grpo_raises_the_reward_and_reports_the_exact_kl(run, capsys, monkeypatch):
    installed = []
    monkeypatch.setattr(trl, "install", lambda *args, **options: installed.append(options) or install(*args, **options))
    history = run("grpo.py", "--steps", 20, "--lr", 1e-2)["history"]
    assert installed == [{"exact_kl": True}]
    assert len(history) == 20
    assert mean(x["reward"] for x in history[-5:]) > 3 * mean(x["reward"] for x in history[:5])
    assert history[0]["kl"] == pytest.approx(0, abs=1e-6)  # the policy is its reference before the first step
    assert all(x["kl"] > 0 for x in history[1:])
    assert all(x["grad_norm"] > 0 for x in history)
    assert f"exact KL {history[-1]['kl']:.4f}" in capsys.readouterr().out


def test_grade_sends_a_gradient_through_tokens_and_raises_the_reward(run, capsys):
    found = run("grade.py", "--steps", 20, "--tokens", 8, "--lr", 1e-2)
    history = found["history"]
    assert mean(x["reward"] for x in history[-5:]) > 2 * mean(x["reward"] for x in history[:5])
    assert history[0]["kl"] == 0
    assert history[-1]["kl"] > 0
    assert "reward" in capsys.readouterr().out

    # What the last token makes the classifier read depends on each token that was generated, differentiably.
    made, read = found["rollout"](found["PROMPTS"][:2], 1.0)
    while made.carried.guards:  # which ask for sweeps of a loss's gradient, of rows in the graph there are none
        made.carried.guards.pop().remove()
    (gradient,) = torch.autograd.grad(read[:, -1].square().sum(), made.carried.rows)
    assert bool((gradient != 0).any(-1).all())
    assert made.kl.shape == (2, 8)


def test_pretrain_says_how_much_text_it_needs(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a line that is too short\n")
    with pytest.raises(SystemExit):
        run("pretrain.py", "--data", text, "--length", 32)
    assert "--data: expected 660 tokens or more, got " in capsys.readouterr().err


def test_grade_reads_gemmas_embedding_as_the_model_does(run, tmp_path):
    """Which multiplies its rows by a number, not so what comes as inputs_embeds."""
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, Gemma3TextForSequenceClassification

    run("pretrain.py", "--data", __file__, "--steps", 1, "--length", 16)
    tokenizer = AutoTokenizer.from_pretrained("runs/pretrain")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3TextConfig(vocab_size=len(tokenizer), **sizes, num_key_value_heads=1, head_dim=8, pad_token_id=0)
    for name, kind in {"policy": Gemma3ForCausalLM, "judge": Gemma3TextForSequenceClassification}.items():
        kind(config).save_pretrained(name)
        tokenizer.save_pretrained(name)
    options = ("--model", "policy", "--reward-model", "judge", "--steps", 1, "--batch-size", 2, "--tokens", 2)
    found = run("grade.py", *options)
    made, read = found["rollout"](found["PROMPTS"][:2], 1.0)
    policy, judge = (found[name].get_input_embeddings() for name in ("policy", "judge"))
    torch.testing.assert_close(found["reader"].table, policy.weight * policy.scalar_embed_scale)
    torch.testing.assert_close(made.carried.rows, policy(made.soft.token[:, :-1]))
    torch.testing.assert_close(read, judge(made.soft.token))


def test_the_recipes_take_a_model_that_was_saved(run, tmp_path):
    """The way from text to an aligned policy, by directories."""
    pretrain(run, tmp_path)
    policy = run("grpo.py", "--model", "runs/pretrain", "--lora-rank", 4, "--steps", 2, "--batch-size", 8)
    assert [x["kl"] >= 0 for x in policy["history"]] == [True, True]

    from transformers import AutoTokenizer, Qwen3ForSequenceClassification

    judge = Qwen3ForSequenceClassification.from_pretrained("runs/pretrain", pad_token_id=0)
    judge.save_pretrained("judge")
    AutoTokenizer.from_pretrained("runs/pretrain").save_pretrained("judge")
    options = ("--model", "runs/pretrain", "--reward-model", "judge", "--steps", 2, "--batch-size", 2, "--tokens", 4)
    history = run("grade.py", *options)["history"]
    assert all(x["gradient"] > 0 for x in history)
