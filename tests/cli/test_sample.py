"""`logitless sample` on a micro model: text, files, prompts of every kind, and one line for what cannot be."""

import io
import json
import math
import re
import shutil
import sys

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from logitless.cli.main import main
from logitless.integrations.transformers.generation import generate
from logitless.models.positions import scale
from tests.support.sample.dense import vllm_kept
from tests.support.workbench.micro import micro_directory, micro_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    micro_directory(place)
    micro_model(initializer_range=0.3).save_pretrained(place)
    return place


def sample(model, *arguments) -> int:
    return main(["sample", "--model", str(model), "--max-new-tokens", "12", *map(str, arguments)])


def told(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_text_and_every_file(model, tmp_path, capsys):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "parquet", "html")}
    options = [x for kind, path in files.items() for x in (f"--{kind}", path)]
    assert sample(model, "--prompt", "def f", "--prompt", "import", "--keep", 4, *options) == 0
    assert sorted(tmp_path.iterdir()) == sorted(files.values())
    out = capsys.readouterr().out
    summary = json.loads(files["json"].read_text())
    assert summary["schema"] == 1
    assert [s["prompt"] for s in summary["sequences"]] == ["def f", "import"]
    table = pq.read_table(files["parquet"])
    for number, sequence in enumerate(summary["sequences"]):
        rows = table.filter(table["sequence"].combine_chunks().to_numpy() == number)
        assert rows["token"].to_pylist() == [token["id"] for token in sequence["tokens"]]
        assert rows["position"].to_pylist() == list(range(len(sequence["tokens"])))
        assert rows["text"].to_pylist() == [token["text"] for token in sequence["tokens"]]
        logprob = torch.tensor(rows["token_logit"].to_pylist()) - torch.tensor(rows["logsumexp"].to_pylist())
        torch.testing.assert_close(logprob, torch.tensor([t["logprob"] for t in sequence["tokens"]]))
        assert f"{len(sequence['tokens'])} token" in out
        assert all(len(token["top_logprobs"]) == 4 for token in sequence["tokens"])
    assert json.loads(table.schema.metadata[b"logitless"])["sequences"][1]["prompt"] == "import"
    assert table.schema.metadata[b"vocab_size"] == b"259"
    assert '<p class="text"' in files["html"].read_text()


def test_numbers_are_the_models_own(model, capsys):
    assert sample(model, "--prompt", "abc", "--temperature", 0.7, "--top-p", 0.9, "--json", "-") == 0
    (sequence,) = told(capsys)["sequences"]
    whole = AutoTokenizer.from_pretrained(model)("abc")["input_ids"] + [t["id"] for t in sequence["tokens"]]
    dense = micro_model(initializer_range=0.3).eval()
    with torch.no_grad():
        z = dense(torch.tensor([whole])).logits[0, 2:-1]
    drawn = torch.tensor(whole[3:])[:, None]
    near = {"rtol": 1e-4, "atol": 1e-4}
    found = torch.tensor([t["logprob"] for t in sequence["tokens"]])
    torch.testing.assert_close(found, z.log_softmax(-1).gather(1, drawn)[:, 0], **near)
    p = (z / 0.7).softmax(-1).sort(-1, descending=True)
    kept = p.values.cumsum(-1) - p.values < 0.9
    share = (p.values * kept).sum(-1)
    behaviour = ((z / 0.7).log_softmax(-1).gather(1, drawn)[:, 0]) - share.log()
    torch.testing.assert_close(torch.tensor([t["behaviour_logprob"] for t in sequence["tokens"]]), behaviour, **near)


def test_vllms_order(model, capsys):
    """The first token's behaviour log-prob is over the entries that vLLM's order keeps."""
    rules = ["--temperature", 2, "--top-p", 0.8, "--min-p", 0.3, "--order", "vllm", "--max-new-tokens", 1]
    assert sample(model, "--prompt", "abc", *rules, "--json", "-") == 0
    summary = told(capsys)
    assert summary["options"]["order"] == "vllm"
    (token,) = summary["sequences"][0]["tokens"]
    ids = AutoTokenizer.from_pretrained(model)("abc")["input_ids"]
    with torch.no_grad():
        z = micro_model(initializer_range=0.3).eval()(torch.tensor([ids])).logits[0, -1:].double()
    kept = vllm_kept(z / 2, 0, 0.8, 0.3).log_softmax(-1)
    assert token["behaviour_logprob"] == pytest.approx(float(kept[0, token["id"]]), abs=1e-4)


@pytest.mark.parametrize(
    "own",
    [
        {"temperature": 0.2, "top_k": 2, "top_p": 0.1, "min_p": 0.9},
        {"typical_p": 0.2},
        {"epsilon_cutoff": 0.1},
        {"eta_cutoff": 0.9},
        {"top_h": 0.2},
        {"num_return_sequences": 2},
        {"num_beams": 3},
    ],
    ids=str,
)
def test_what_the_checkpoint_would_cut_off_is_drawn_too(own, model, tmp_path, capsys):
    place = shutil.copytree(model, tmp_path / "model")
    (place / "generation_config.json").write_text(json.dumps({"do_sample": True, **own}))
    drawn = []
    for directory in (model, place):
        assert sample(directory, "--prompt", "abc", "--json", "-") == 0
        drawn.append([(t["id"], t["behaviour_logprob"]) for t in told(capsys)["sequences"][0]["tokens"]])
    assert drawn[0] == drawn[1]


def test_the_best_token_is_drawn_where_the_checkpoint_would_search(model, tmp_path, capsys):
    place = shutil.copytree(model, tmp_path / "model")
    (place / "generation_config.json").write_text(json.dumps({"penalty_alpha": 0.6, "top_k": 4}))
    assert sample(place, "--prompt", "abc", "--temperature", 0, "--json", "-") == 0
    assert {t["rank"] for t in told(capsys)["sequences"][0]["tokens"]} == {1}


def test_a_completion_ends_at_the_texts_of_the_checkpoint(model, tmp_path, capsys):
    greedy = ("--prompt", "abc", "--temperature", "0", "--json", "-")
    assert sample(model, *greedy) == 0
    (free,) = told(capsys)["sequences"]
    stop = next(token["text"] for token in free["tokens"] if token["text"].isalnum())
    place = shutil.copytree(model, tmp_path / "model")
    (place / "generation_config.json").write_text(json.dumps({"stop_strings": stop}))
    assert sample(place, *greedy) == 0
    (stopped,) = told(capsys)["sequences"]
    assert stopped["finish"] == "ended by the model"
    assert stopped["text"] == free["text"][: free["text"].index(stop) + 1]
    assert sample(place, *greedy, "--stop", "no such text") == 0
    assert told(capsys)["sequences"][0]["text"] == free["text"]


def test_seeds_and_batches(model, capsys):
    def texts(*options):
        assert sample(model, "--prompt", "one", "--prompt", "longer than one", "--json", "-", *options) == 0
        return [s["text"] for s in told(capsys)["sequences"]]

    four = texts("--completions", 2)
    assert len(set(four)) == 4
    assert texts("--completions", 2, "--batch-size", 1) == four
    assert texts("--completions", 2, "--seed", 1) != four
    assert texts("--temperature", 0, "--seed", 1) == texts("--temperature", 0)
    assert texts("--temperature", 0, "--repetition-penalty", 1.8) != texts("--temperature", 0)


def test_the_memory_budget_is_the_passes(model, monkeypatch):
    given = []

    def noted(*args, **options):
        given.append(options["memory_budget"])
        return generate(*args, **options)

    monkeypatch.setattr("logitless.workbench.sampling.run.generate", noted)
    assert sample(model, "--prompt", "abc", "--memory-budget", "3MiB") == 0
    assert given == [3 << 20]


def test_a_prompt_file_that_cannot_be_read_is_said_by_its_option(model, tmp_path, capsys):
    for path, why in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        assert sample(model, "--prompt-file", path) == 2
        said = f"logitless: --prompt-file {path}: expected a file of text to read ({why})\n"
        assert capsys.readouterr().err == said


def test_prompts_from_files_and_standard_input(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_bytes("\ufeff ä\nb \n\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\r\n")))
    assert sample(model, "--prompt", "first", "--prompt-file", tmp_path / "a.txt", "--json", "-") == 0
    assert [s["prompt"] for s in told(capsys)["sequences"]] == ["first", " ä\nb \n"]
    assert sample(model, "--json", "-") == 0
    assert [s["prompt"] for s in told(capsys)["sequences"]] == ["from stdin"]


def test_how_it_ends(model, capsys):
    greedy = ("--prompt", "abc", "--temperature", 0, "--json", "-")
    assert sample(model, *greedy) == 0
    (free,) = told(capsys)["sequences"]
    assert free["finish"] == "ended by --max-new-tokens"
    stop = next(token["text"] for token in free["tokens"] if token["text"].isalnum())
    assert sample(model, *greedy, "--stop", stop) == 0
    (stopped,) = told(capsys)["sequences"]
    assert stopped["finish"] == "ended by --stop"
    assert stopped["text"] == free["text"][: free["text"].index(stop) + 1]
    assert sample(model, *greedy, "--max-new-tokens", 1000) == 0
    (full,) = told(capsys)["sequences"]
    assert full["finish"] in ("ended by the model's context", "ended by the model")
    assert len(full["tokens"]) + 3 <= 64


def test_a_completion_ends_at_the_tokenizers_end_where_the_checkpoint_names_none(tmp_path, capsys):
    micro_directory(tmp_path)
    micro_model(initializer_range=0.3, eos_token_id=None).save_pretrained(tmp_path)
    drawn = []
    for _ in range(2):
        assert sample(tmp_path, "--prompt", "abc", "--temperature", 0, "--json", "-") == 0
        (sequence,) = told(capsys)["sequences"]
        drawn.append([t["id"] for t in sequence["tokens"]])
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(drawn[0][5])
        tokenizer.save_pretrained(tmp_path)
    assert drawn[1] == drawn[0][: drawn[0].index(drawn[0][5]) + 1]
    assert sequence["finish"] == "ended by the model"


def test_a_prompt_begins_as_documents_do_and_is_not_closed(tmp_path, capsys):
    micro_directory(tmp_path, "<s> $A </s>")
    micro_model(initializer_range=0.3).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a</s>")["input_ids"] == [1, 67, 2, 2]
    assert sample(tmp_path, "--prompt", "a</s>", "--json", "-") == 0
    assert told(capsys)["sequences"][0]["prompt_tokens"] == 1 + len("a</s>")


def test_stretched_positions_are_a_longer_context(tmp_path, capsys):
    """A checkpoint as `logitless train --rope-scaling linear:2` writes it: 64 positions that reach to 128."""
    micro_directory(tmp_path)
    stretched = micro_model(initializer_range=0.3, eos_token_id=None)
    scale(stretched.config, "linear:2")
    stretched.save_pretrained(tmp_path)
    assert sample(tmp_path, "--prompt", "x" * 90, "--temperature", 0, "--json", "-") == 0
    assert len(told(capsys)["sequences"][0]["tokens"]) == 12
    assert sample(tmp_path, "--prompt", "x" * 128) == 2
    assert "prompt 1 has 128 tokens, and the model's context only 128" in capsys.readouterr().err


def test_a_prompt_near_the_context_cuts_no_other_short(model, capsys):
    """Prompts of different lengths in one call: each has the room that it would have alone."""
    prompts = ("abc", "x" * 60, "def", "y" * 58)
    options = ("--completions", 2, "--temperature", 0, "--json", "-")
    assert sample(model, *(x for text in prompts for x in ("--prompt", text)), *options) == 0
    together = told(capsys)["sequences"]
    for number, text in enumerate(prompts):
        assert sample(model, "--prompt", text, *options) == 0
        for alone, one in zip(told(capsys)["sequences"], together[2 * number : 2 * number + 2], strict=True):
            assert one["finish"] == alone["finish"]
            assert [t["id"] for t in one["tokens"]] == [t["id"] for t in alone["tokens"]]
    assert together[2]["finish"] == "ended by the model's context"
    assert together[0]["finish"] == "ended by --max-new-tokens"


def test_a_stop_that_begins_in_the_prompt(model, capsys):
    greedy = ("--temperature", 0, "--json", "-")
    assert sample(model, "--prompt", "abc", *greedy) == 0
    first = told(capsys)["sequences"][0]["tokens"][0]["text"]
    assert sample(model, "--prompt", "abc", "--stop", "c" + first, *greedy) == 0
    (stopped,) = told(capsys)["sequences"]
    assert (stopped["text"], stopped["finish"]) == (first, "ended by --stop")


def on_a_terminal(monkeypatch):
    """Standard output as a terminal; what is written to it, piece by piece."""
    written: list[str] = []

    class Screen(io.StringIO):
        def write(self, text):
            written.append(text)
            return len(text)

        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Screen())
    return written


@pytest.mark.parametrize("alternatives", [[], ["--show-alternatives"]], ids=["text", "alternatives"])
def test_on_a_terminal_one_completion_comes_token_by_token(model, alternatives, monkeypatch, capsys):
    """The same text, numbers and legend as at the end without one; colours as tokens come."""
    monkeypatch.setenv("COLUMNS", "100")
    options = ("--prompt", "def f", "--seed", 3, *alternatives)
    assert sample(model, *options) == 0
    plain = capsys.readouterr().out
    with monkeypatch.context() as patch:
        written = on_a_terminal(patch)
        assert sample(model, *options) == 0
    bare = [re.sub(r"\x1b\[[\d;]*m", "", text) for text in written]
    assert bare[0] == "def f"
    assert len([text for text in bare[1:14] if text]) >= 8  # 12 tokens, some of them parts of a character
    assert any("\x1b[" in text for text in written[1:13])
    assert "".join(bare).split() == plain.split()


def test_on_a_terminal_several_come_at_the_end(model, monkeypatch):
    written = on_a_terminal(monkeypatch)
    assert sample(model, "--prompt", "def f", "--completions", 2) == 0
    assert "".join(written).count("perplexity") == 2
    assert re.sub(r"\x1b\[[\d;]*m", "", written[0]).startswith("def f")
    assert "perplexity" in written[0]


def test_on_a_terminal_json_stands_alone(model, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        written = on_a_terminal(patch)
        assert sample(model, "--prompt", "def f", "--json", "-") == 0
    assert json.loads("".join(written))["sequences"][0]["prompt"] == "def f"


def test_a_chat_template(model, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ 'me:' }}"
    micro_model(initializer_range=0.3).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lengths = {}
    for chat in ("auto", "yes", "no"):
        assert sample(tmp_path, "--prompt", "hi", "--chat", chat, "--json", "-") == 0
        (sequence,) = told(capsys)["sequences"]
        lengths[chat] = sequence["prompt_tokens"]
        assert sequence["shown_prompt"] == ("hi" if chat == "no" else "hi\n")
    assert lengths == {"auto": len("user: hime:"), "yes": len("user: hime:"), "no": 2}
    assert sample(model, "--prompt", "hi", "--chat", "yes") == 2
    assert "no chat template; use --chat no" in capsys.readouterr().err


def test_alternatives_on_demand(model, capsys):
    assert sample(model, "--prompt", "abc", "--show-alternatives", "--keep", 2) == 0
    out = capsys.readouterr().out
    assert "instead" in out
    assert out.count("%") > 24


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["--prompt", ""], "--prompt 1: expected some text"),
        (["--prompt", "a", "--prompt", "x" * 64], "prompt 2 has 64 tokens, and the model's context only 64"),
        (["--prompt", "a", "--keep", "260"], "--keep must be at most the vocabulary, here 259, got 260"),
        (["--prompt", "a", "--top-p", "0"], "--top-p must be in 0 < p <= 1, got 0.0"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p"),
        (["--prompt", "a", "--min-p", "2"], "--min-p"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature must be 0 (greedy) or in 1e-24..1e+26, got -1.0"),
        (["--prompt", "a", "--temperature", "1e27"], "--temperature must be 0 (greedy) or in 1e-24..1e+26"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "a", "--stop", ""], "--stop"),
        (["--prompt", "a", "--json", "nowhere/x.json"], "the folder nowhere does not exist"),
        (["--prompt", "a", "--memory-budget", "much"], "--memory-budget"),
        (["--prompt-file", "nothing.txt"], "nothing.txt"),
        (["--prompt", "a", "--model", "qwen3-0.6b"], "without weights"),
        (
            ["--prompt", "a", "--model", "nope"],
            "--model nope: expected a directory with weights to sample from",
        ),
        (["--prompt", "a", "--model", "./nope"], "got nothing of this name; logitless train writes such a directory"),
        (["--prompt", "a", "--tmperature", "1"], "--temperature"),
    ],
)
def test_what_cannot_be_is_one_line(model, options, fragment, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert sample(model, *options) == 2
    err = capsys.readouterr().err
    assert fragment in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_no_prompt_and_no_text(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert sample(model) == 2
    assert "no prompt: expected --prompt TEXT, --prompt-file FILE, or" in capsys.readouterr().err
    for nothing in (b"", b"\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(nothing)))
        assert sample(model) == 2
        assert "no prompt: expected --prompt TEXT, --prompt-file FILE, or" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert sample(model) == 2
    assert "logitless: standard input: not UTF-8 text (byte 0)" in capsys.readouterr().err
    assert sample(model, "--prompt-file", "/dev/zero") == 2
    never = "logitless: --prompt-file /dev/zero: expected at most 100 MB of text, got more, or what never ends\n"
    assert capsys.readouterr().err == never
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    assert sample(model, "--prompt-file", tmp_path / "binary") == 2
    assert "not UTF-8 text (byte 3)" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_leaves_nothing(model, tmp_path, monkeypatch, capsys):
    def fail(table, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", fail)
    assert sample(model, "--prompt", "a", "--parquet", tmp_path / "out.parquet") == 2
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_whole_is_finite(model, capsys):
    assert sample(model, "--prompt", "abc", "--keep", 0, "--top-k", 3, "--json", "-") == 0
    for token in told(capsys)["sequences"][0]["tokens"]:
        assert all(math.isfinite(x) for x in token.values() if isinstance(x, float))
        assert token["top_logprobs"] == []
