"""Options, rewards and data of an alignment run."""

import asyncio
import copy
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict

from logitless.errors import ConfigError, DataError, NotFiniteError, OptionError
from logitless.workbench.align import trainers
from logitless.workbench.align.config import METHODS, AlignConfig
from logitless.workbench.align.data import TAKEN, check_differ, load, rows_of, save
from logitless.workbench.align.rewards import (
    is_statement,
    leave_out_unrewarded,
    python_lines,
    repetition_guard,
    rewards_of,
)
from logitless.workbench.common.options import from_dict, read_file
from logitless.workbench.sources.chat import ASSISTANT
from logitless.workbench.sources.corpus import passages
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.workbench.damage import MESSAGES, REWARDS, REWARDS_SAY
from tests.support.workbench.micro import MICRO_CHAT, line_corpus


class TestOptions:
    def test_defaults_of_each_method(self):
        given = {name: AlignConfig(method=name).check() for name in METHODS}
        assert [c.kl_weight for c in given.values()] == [0.04, 0.04, 0.05, 0.1]
        assert [c.guard_weight for c in given.values()] == [5.0, 0.0, 0.0, 0.0]
        assert given["grpo"].rate == 1e-4
        assert replace(given["grpo"], model="other/model").rate == 1e-6
        assert replace(given["grpo"], lora_rank=2).rate == 1e-5
        assert replace(given["dpo"], learning_rate=1.0).rate == 1.0
        assert [given["grpo"].prompts_per_step(ranks) for ranks in (1, 3)] == [4, 12]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prompt_length": 0}, "--prompt-length must be at least 1"),
            ({"max_steps": 0}, "--max-steps must be at least 1"),
            ({"beta": -0.1}, "--beta must be 0 or more"),
            ({"beta": float("nan")}, "--beta must be 0 or more"),
            ({"repetition_guard": 1e39}, "--repetition-guard must be 0 or more, and finite in float32"),
            ({"learning_rate": 1e39}, "--learning-rate must be positive, and finite in float32"),
            ({"temperature": 0.0}, "--temperature must be in 1e-24"),
            ({"temperature": 1e27}, "--temperature must be in 1e-24"),
            ({"generations_per_prompt": 1}, "--generations-per-prompt must be at least 2"),
            ({"batch_size": 6}, "is 6: expected a multiple of --generations-per-prompt 4"),
            ({"method": "dpo", "rewards": "python_lines"}, "dpo learns from pairs"),
            ({"method": "dpo", "repetition_guard": 1.0}, "dpo learns from pairs"),
            ({"self_certainty_weight": 0.0, "repetition_guard": 0.0, "rewards": ","}, "intuitor without a reward"),
            ({"method": "grpo", "self_certainty_weight": 0.5}, "--self-certainty-weight is intuitor's"),
            ({"method": "rloo", "exact_kl": True}, "--exact-kl is of intuitor and grpo"),
            ({"exact_kl": True, "beta": 0.0}, "--exact-kl with --beta 0 has no KL"),
            ({"top_p": 0.0}, "--top-p must be in 0 < p <= 1"),
            ({"min_p": 1.5}, "--min-p must be in 0..1"),
            ({"top_p": 0.9, "exact_kl": True}, "got them with --exact-kl, which is of the whole vocabulary"),
            ({"min_p": 0.1, "method": "dpo"}, "got them with --method dpo"),
            ({"order": "vllm"}, "--order vllm is of --top-p and --min-p"),
            ({"self_certainty_weight": 0.0}, "leaves intuitor without a reward"),
            ({"method": "grpo", "rewards": " , "}, "leaves grpo without a reward"),
            ({"resume": Path("a"), "output_dir": Path("b")}, "leave out --output-dir"),
        ],
    )
    def test_values_without_a_meaning(self, options, message):
        with pytest.raises(OptionError, match=message):
            AlignConfig(**options).check()

    def test_a_file_and_a_record_hold_the_same_names(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text("method: rloo\nbeta: 1e-2\nrewards: python_lines=2\nreport-to: tensorboard\nmax_steps: 3\n")
        wanted = AlignConfig(method="rloo", beta=0.01, rewards="python_lines=2", report_to="tensorboard", max_steps=3)
        assert read_file(path, AlignConfig()) == wanted
        assert from_dict(json.loads(json.dumps(wanted.to_dict())), "here", AlignConfig()) == wanted
        path.write_text("context_length: 3\n")
        with pytest.raises(OptionError, match="unknown option 'context_length'"):
            read_file(path, AlignConfig())


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


class TestRewards:
    def test_what_a_function_does_to_its_arguments_is_its_own(self, tmp_path, monkeypatch):
        (tmp_path / "emptying.py").write_text(
            "def sync(completions, completion_ids, **_):\n"
            "    n = len(completions)\n    completions.clear()\n    completion_ids[0].clear()\n    return [1.0] * n\n"
            "async def later(**given):\n    return sync(**given)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        given = {"prompts": ["a"] * 2, "completions": ["b"] * 2, "completion_ids": [[1], [2]], "trainer_state": None}
        wanted = copy.deepcopy(given)
        for name in ("sync", "later"):
            (_, _), (reward, _) = rewards_of(AlignConfig(method="grpo", rewards=f"emptying:{name}"))
            found: Any = reward(**given)
            assert (asyncio.run(found) if inspect.isawaitable(found) else found) == [1.0, 1.0]
            assert given == wanted

    @pytest.mark.usefixtures("my_rewards")
    @pytest.mark.parametrize("name", REWARDS_SAY)
    def test_functions_that_return_or_raise_anything(self, name):
        (_, _), (reward, _) = rewards_of(AlignConfig(method="grpo", rewards=f"my_rewards:{name}"))
        given = {"prompts": ["a"] * 4, "completions": ["b"] * 4, "completion_ids": [[1]] * 4, "trainer_state": None}
        said = REWARDS_SAY[name]
        error = NotFiniteError if "returned" in said else OptionError

        async def called() -> object:
            found = reward(**given)
            return await found if inspect.isawaitable(found) else found

        with pytest.raises(error, match=rf"^--rewards my_rewards:{name}.*{re.escape(said)}") as caught:
            asyncio.run(called())
        assert "\n" not in str(caught.value)

    def test_a_function_that_is_stopped_while_it_waits_is_not_blamed(self, monkeypatch):
        """As it is at an interruption: the coroutine is closed."""

        async def waits(**_: Any) -> None:
            await asyncio.sleep(0)

        monkeypatch.setattr(json, "reward", waits, raising=False)
        (_, _), (reward, _) = rewards_of(AlignConfig(method="grpo", rewards="json:reward"))
        waiting: Any = reward(completions=["a"])
        waiting.send(None)
        waiting.close()

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ([1.0, None, True, 2], [1.0, None, 1.0, 2.0]),
            ((1.0, 0.0, 0.5, 2.0), [1.0, 0.0, 0.5, 2.0]),
            (np.arange(4, dtype=np.float32), [0.0, 1.0, 2.0, 3.0]),
            (torch.arange(4, dtype=torch.bfloat16), [0.0, 1.0, 2.0, 3.0]),
            ((Fraction(i, 2) for i in range(4)), [0.0, 0.5, 1.0, 1.5]),
        ],
        ids=["list", "tuple", "array", "tensor", "generator"],
    )
    def test_numbers_of_every_kind(self, values, expected, monkeypatch):
        async def later(**_):
            return values

        for function in (lambda **_: values, later)[: 1 if isinstance(values, Iterator) else 2]:
            monkeypatch.setattr(json, "reward", function, raising=False)
            (_, _), (reward, _) = rewards_of(AlignConfig(method="grpo", rewards="json:reward"))
            found = reward(completions=["a"] * 4)
            found = asyncio.run(found) if function is later else found
            assert all(x is None or type(x) is float for x in found)
            assert found == expected

    @pytest.mark.parametrize(
        "line",
        [
            "x = 1",
            "return x",
            "if x:",
            "else:",
            "elif y > 1:",
            "except OSError as e:",
            "finally:",
            "case 3:",
            "@property",
            "def f(a, b=2):",
            "f(x)",
            "class A(B): pass",
            'x = "\\d"',
            "import os",
            "for i in x:",
        ],
    )
    def test_statements(self, line):
        assert is_statement(line)

    @pytest.mark.parametrize(
        "line", ["x", "42", '"text"', "f(x", "def f(", "x =", "foo bar", ")", "if x", "else", "\0", "x: :", "@", "None"]
    )
    def test_no_statements(self, line):
        assert not is_statement(line)

    def test_the_share_of_whole_lines(self):
        texts = ["x = 1\n  y = 2\n", "x = 1\nfoo bar\n\n# note\n", "x = 1", "", "x\n", "x = 1\ny = "]
        assert python_lines(completions=texts) == [1.0, 0.5, 0.0, 0.0, 0.0, 1.0]
        assert python_lines([[{"role": "assistant", "content": "x = 1\n"}]]) == [1.0]

    def test_repeated_n_grams(self):
        ids = [[1, 2, 3, 4, 5], [7] * 6, [1, 2, 3, 1, 2, 3], [1, 2], []]
        assert repetition_guard(completion_ids=ids) == pytest.approx([0, -0.75, -0.25, 0, 0])

    def test_what_a_method_is_rewarded_with(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
        Path("my_rewards.py").write_text("def short(completions, **_):\n    return [-len(c) for c in completions]\n")

        def named(**options):
            return {f.__name__: weight for f, weight in rewards_of(AlignConfig(**options))}

        assert named() == {"self_certainty": 1.0, "repetition_guard": 5.0}
        assert named(method="grpo") == {"self_certainty": 0.0, "python_lines": 1.0}
        given = named(rewards="my_rewards:short=0.25, python_lines", repetition_guard=0.0, self_certainty_weight=2.0)
        assert given == {"self_certainty": 2.0, "short": 0.25, "python_lines": 1.0}
        for rewards, message in (
            ("python", "expected python_lines, repetition_guard or module:function"),
            ("no_such_module:f", "No module named 'no_such_module'"),
            ("my_rewards:long", "has no attribute 'long'"),
            ("my_rewards:__name__", "expected a function, got str"),
            ("python_lines=much", "NAME=WEIGHT with a number, got 'much'"),
            ("python_lines=", "NAME=WEIGHT with a number, got ''"),
            ("repetition_guard=2", "each reward once, got repetition_guard again.* is --repetition-guard"),
            ("python_lines, python_lines=2", "each reward once, got python_lines again; add its weights up"),
            ("my_rewards:short, my_rewards:short=2", "each reward once, got my_rewards:short again; add its"),
        ):
            with pytest.raises(OptionError, match=message):
                named(rewards=rewards)

    @pytest.mark.parametrize(
        "options",
        [
            {"method": "grpo", "rewards": "python_lines=0, repetition_guard=-0.0"},
            {"self_certainty_weight": 0.0, "repetition_guard": 0.0, "rewards": "python_lines=0"},
            {"self_certainty_weight": 0.0, "rewards": "python_lines=0"},  # beside the guard, as without --rewards
        ],
        ids=["grpo", "intuitor", "intuitor, guarded"],
    )
    def test_rewards_that_weigh_nothing_are_refused(self, options):
        with pytest.raises(OptionError, match=r"python_lines=0.*: expected a reward that weighs something"):
            rewards_of(AlignConfig(**options).check())

    def test_rewards_of_one_name_are_told_apart_by_their_modules(self, tmp_path, monkeypatch):
        """And an object has the name that it was given by."""
        monkeypatch.syspath_prepend(tmp_path)
        code = "from functools import partial\ndef score(**_): ...\ndef python_lines(**_): ...\np = partial(score)"
        for name in ("one_module", "other_module"):
            Path(tmp_path, f"{name}.py").write_text(code)
            monkeypatch.delitem(sys.modules, name, raising=False)
        given = "one_module:score=2, other_module:score=3, one_module:p, other_module:p, one_module:python_lines"
        given += ", python_lines=4"
        found = {f.__name__: weight for f, weight in rewards_of(AlignConfig(method="grpo", rewards=given))}
        wanted = {"score": 2.0, "other_module:score": 3.0, "one_module:p": 1.0, "other_module:p": 1.0}
        wanted |= {"one_module:python_lines": 1.0, "python_lines": 4.0}
        assert found == {"self_certainty": 0.0, **wanted}


@pytest.fixture
def tokenizer(micro):
    return pretrained(str(micro.model.parent))


@pytest.fixture
def talker(tokenizer):
    """A tokenizer with a chat template."""
    tokenizer.saved.chat_template = MICRO_CHAT
    return tokenizer


ASKED, SAID = (f'[{{"role": "{role}", "content": "a"}}]' for role in ("user", ASSISTANT))


def config(data, **options):
    return AlignConfig(data=str(data), prompt_length=30, completion_length=16, **options)


class TestData:
    def test_passages_are_whole_lines_of_one_document_and_never_overlap(self, tokenizer):
        text = "".join(f"line {i} of it\n" for i in range(40))
        rows = passages(text, tokenizer, 40, 20)
        assert len(rows) > 8
        joined = "".join(row["prompt"] + row["continuation"] for row in rows)
        assert text.startswith(joined)
        for row in rows:
            assert row["prompt"].endswith("\n")
            assert len(tokenizer.encode([row["prompt"]])[0]) <= 40
            assert len(tokenizer.encode([row["continuation"]])[0]) <= 20

    @pytest.mark.parametrize("text", ["", "\n\n\n\n\n\n\n\n\n", "one line", "a\n", "x" * 100 + "\n" + "y" * 100])
    def test_documents_without_a_passage(self, tokenizer, text):
        assert passages(text, tokenizer, 40, 20) == []

    def test_training_and_held_out_rows_come_from_different_documents(self, tokenizer, tmp_path):
        data = line_corpus(tmp_path / "data", documents=60)
        train, held = rows_of(config(data), tokenizer, 1000)
        documents = [{row["prompt"].split()[0] for row in rows} for rows in (train, held)]
        assert len(documents[0]) == 57
        assert documents[1] == {"d10", "d30", "d50"}
        assert rows_of(config(data), tokenizer, 1000) == (train, held)
        assert rows_of(config(data, seed=1), tokenizer, 1000)[0] != train
        few, same = rows_of(config(data), tokenizer, 7)
        assert len(few) == 7
        assert same == held

    def test_rows_come_from_many_documents_as_the_seed_has_it(self, tokenizer, tmp_path):
        """At most four of each, of the 8 that there are, where four of each are enough."""
        data = line_corpus(tmp_path / "data", documents=60)
        for wanted, found in ((228, 228), (229, 229), (1000, 57 * 8)):
            assert len(rows_of(config(data), tokenizer, wanted)[0]) == found
        some, other = ([rows_of(config(data, seed=seed), tokenizer, n)[0] for n in (20, 228)] for seed in (0, 1))
        documents = [Counter(row["prompt"].split()[0] for row in rows[0]) for rows in (some, other)]
        assert [list(x.values()) for x in documents] == [[4] * 5] * 2
        assert documents[0] != documents[1]
        prompts = [{row["prompt"] for row in rows[1]} for rows in (some, other)]
        assert prompts[0] != prompts[1]
        assert max(len(ids) for ids in tokenizer.encode([*prompts[0]])) in range(17, 31)

    @pytest.mark.parametrize("apart", [True, False])
    def test_of_twenty_documents_one_is_held_out_unless_others_are(self, tokenizer, tmp_path, apart):
        texts = [path.read_text() for path in sorted(line_corpus(tmp_path / "lines", 20 + apart).iterdir())]
        parts = {"train": Dataset.from_dict({"text": texts[:20]})}
        parts |= {"test": Dataset.from_dict({"text": ["", *texts[20:]]})} if apart else {}
        DatasetDict(parts).save_to_disk(tmp_path / "data")
        documents = [
            {row["prompt"].split()[0] for row in rows}
            for rows in rows_of(config(tmp_path / "data", seed=1), tokenizer, 1000)
        ]
        assert documents[1] == {"d20" if apart else "d10"}
        assert len(documents[0]) == 19 + apart

    def test_one_document_is_divided_at_its_passages(self, tokenizer, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("".join(f"line {i} of it\n" for i in range(60)))
        train, held = rows_of(config(path), tokenizer, 1000)
        assert train
        assert held
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}
        assert len(rows_of(config(path), tokenizer, 2)[0]) == 2  # what a single step needs, beside those held out
        for lines, wanted, found in ((12, 1000, [5, 1]), (2400, 768, [768, 32])):
            path.write_text("".join(f"line {i} of it\n" for i in range(1000, 1000 + lines)))
            assert [len(rows) for rows in rows_of(config(path), tokenizer, wanted)] == found

    @pytest.mark.parametrize("kind", ["jsonl", "parquet", "directory", "splits"])
    def test_tables_of_prompts(self, tokenizer, tmp_path, kind):
        rows = [{"prompt": f"question {i}", "answer": i} for i in range(40)]
        path = tmp_path / f"rows.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif kind == "directory":
            Dataset.from_list(rows).save_to_disk(path)
        else:
            parts = {"train": Dataset.from_list(rows[:-2]), "test": Dataset.from_list(rows[-2:])}
            DatasetDict(parts).save_to_disk(path)
        train, held = rows_of(config(path, method="grpo", rewards="m:f"), tokenizer, 10)
        assert sorted([*train, *held], key=lambda row: row["answer"]) == rows
        assert [row["answer"] for row in held] == ([38, 39] if kind == "splits" else [10, 30])

    @pytest.mark.parametrize(
        "value", [datetime(2026, 1, 1), b"\xff", Decimal("1.5"), [{"on": date(2026, 1, 1)}]], ids=repr
    )
    def test_columns_that_no_json_has(self, tokenizer, tmp_path, value):
        """Functions of --rewards are given them, and a resumed run's too; pairs and other rewards are not."""
        rows = [{"prompt": f"question {i}", "chosen": "a", "rejected": "b", "more": value} for i in range(40)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        given = config(tmp_path / "rows.parquet", method="grpo", rewards="m:f")
        with pytest.raises(DataError, match=r"row 0: column 'more' must be of text, .* got \w+; write it as text"):
            rows_of(given, tokenizer, 10)
        assert rows_of(replace(given, rewards=None), tokenizer, 10)[0][0] == {"prompt": "question 0"}
        save(tmp_path / "rows.jsonl", *rows_of(replace(given, method="dpo"), tokenizer, 10))
        train, held = load(tmp_path / "rows.jsonl", replace(given, method="dpo"))
        assert train[0] == {"prompt": "question 0", "chosen": "a", "rejected": "b"}
        assert len(train) + len(held) == 40

    def test_rows_without_text_are_counted(self, tokenizer, tmp_path):
        text = "".join(f"line {i} of it\n" for i in range(60))
        pq.write_table(pa.table({"text": [text, None, None]}), tmp_path / "rows.parquet")
        told: list[str] = []
        assert rows_of(config(tmp_path / "rows.parquet"), tokenizer, 1000, told.append)[0]
        assert told == [f"{tmp_path}/rows.parquet: 2 of 3 rows without text (null): left out"]

    @pytest.mark.parametrize("value", ["train", "held", "test", None])
    def test_a_column_named_split_is_a_column(self, tokenizer, tmp_path, value):
        """It is the rewards', and says nothing of what is held out."""
        rows = [{"prompt": f"question {i}", "split": value, "row": i} for i in range(40)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        given = config(tmp_path / "rows.parquet", method="grpo", rewards="m:f")
        found = rows_of(given, tokenizer, 10)
        save(tmp_path / "rows.jsonl", *found)
        assert load(tmp_path / "rows.jsonl", given) == found
        assert [len(some) for some in found] == [38, 2]
        assert all(row["split"] == value for some in found for row in some)

    @pytest.mark.parametrize(
        ("tools", "said"),
        [([{"name": "f"}], 1), ('[{"name": "f"}]', 1), *((x, 0) for x in ([], None, "", "[]", "null"))],
    )
    @pytest.mark.parametrize("method", ["grpo", "dpo"])
    def test_tools_that_no_prompt_is_written_with_are_told(self, tokenizer, tmp_path, method, tools, said):
        saved = copy.copy(tokenizer.saved)
        saved.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        row, path, heard = {"messages": messages, "tools": tools}, tmp_path / "rows.jsonl", []
        path.write_text(4 * (json.dumps(row) + "\n"))
        rows_of(config(path, method=method), replace(tokenizer, saved=saved), 9, heard.append)
        assert heard == [f"--data {path}: prompts are written without the tools of their rows"] * said
        text = {"prompt": "a", "completion": "b", "tools": tools}  # which has no tools to be written
        path.write_text(4 * (json.dumps(text) + "\n"))
        rows_of(config(path, method=method), tokenizer, 9, heard.append)
        assert len(heard) == said

    def test_rows_that_are_held_out_already_are_looked_at_too(self, talker, tmp_path):
        asked, said, heard = json.loads(ASKED), json.loads(SAID), []
        pair = {"prompt": asked, "chosen": said, "rejected": said}
        row, given = pair | {"completion": said, "tools": "null"}, config(tmp_path / "data", method="dpo")
        parts = [row] * 3, [row | {"tools": '[{"name": "f"}]'}]
        DatasetDict(zip(("train", "test"), map(Dataset.from_list, parts), strict=True)).save_to_disk(tmp_path / "data")
        assert rows_of(given, talker, 9, heard.append) == ([pair] * 3, [pair])
        assert heard == [f"--data {tmp_path / 'data'}: prompts are written without the tools of their rows"]
        parts = [row] * 3, [row | {"chosen": asked}]
        DatasetDict(zip(("train", "test"), map(Dataset.from_list, parts), strict=True)).save_to_disk(tmp_path / "bad")
        with pytest.raises(DataError, match="row 3: chosen must begin with a message of the assistant, got user"):
            rows_of(replace(given, data=str(tmp_path / "bad")), talker, 9)

    @pytest.mark.parametrize("rewards", ["m:f", "python_lines", None])
    @pytest.mark.parametrize("method", ["grpo", "rloo", "intuitor", "dpo"])
    def test_the_columns_beside_messages_are_the_rewards(self, talker, tmp_path, method, rewards):
        asked, said = json.loads(ASKED), json.loads(SAID)
        path = tmp_path / "rows.jsonl"
        path.write_text((json.dumps({"messages": asked + said, "answer": 4}) + "\n") * 4)
        train, held = rows_of(config(path, method=method, rewards=rewards), talker, 2)
        own = {"completion": said} if method == "dpo" else {"answer": 4} if rewards == "m:f" else {}
        assert all(row == {"prompt": asked, **own} for row in [*train, *held])

    @pytest.mark.parametrize(("method", "rewards", "said"), [("grpo", "m:f", 1), ("grpo", None, 0), ("dpo", None, 0)])
    def test_a_column_that_trl_keeps_from_rewards_is_told(self, tokenizer, tmp_path, method, rewards, said):
        path, heard = tmp_path / "rows.jsonl", []
        for before in range(1 + (method == "grpo")):
            path.write_text('{"prompt": "a"}\n' * before + '{"prompt": "a", "completion": "b"}\n' * 4)
            found, _ = rows_of(config(path, method=method, rewards=rewards), tokenizer, 2, heard.append)
            assert all(("completion" in row) == (method == "dpo" or bool(said)) for row in found[before:])
        told = f"--data {path}: TRL gives rewards no column named 'completion': rename it to have it there"
        assert heard == [told] * 2 * said

    def test_columns_of_mixed_kinds(self, tmp_path):
        rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": "x"}]
        parts = SimpleNamespace(config=AlignConfig(data="here"), place=tmp_path, train=rows, held_out=[])
        with pytest.raises(DataError, match=r"--data here, in .*: expected values of one kind in each column"):
            trainers._dataset(parts, rows)

    def test_columns_that_the_first_row_lacks_are_columns(self):
        """Of training rows and of those held out, so that a reward is given each column in both."""
        train, held = [{"prompt": "a"}, {"prompt": "b", "answer": 1}], [{"prompt": "c", "hint": "d"}]
        parts = SimpleNamespace(train=train, held_out=held)
        found = [trainers._dataset(parts, rows).to_list() for rows in (train, held)]
        assert found[0] == [
            {"prompt": "a", "answer": None, "hint": None},
            {"prompt": "b", "answer": 1, "hint": None},
        ]
        assert found[1] == [{"prompt": "c", "answer": None, "hint": "d"}]

    def test_rows_survive_their_file(self, tmp_path):
        train, held = (
            [{"prompt": [{"role": "user", "content": "ä"}]}],
            [{"prompt": [{"role": "user", "content": "b"}], "n": 1}],
        )
        save(tmp_path / "rows.jsonl", train, held)
        assert load(tmp_path / "rows.jsonl", AlignConfig()) == (train, held)

    @pytest.mark.parametrize(
        ("text", "method", "message"),
        [
            ('{"prompt": "a"}\n', "grpo", "expected prompts to train on and some to hold out, got 1 and 0"),
            (
                '{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
                "dpo",
                "expected pairs to train on and some to hold out, got 1 and 0; give more$",
            ),
            ('{"prompt": "a"}\n{"prompt": ""}\n', "grpo", "row 1 has no prompt; expected prompt"),
            ('{"prompt": "a", "chosen": "b"}\n', "dpo", "row 0 has no rejected; expected prompt, chosen, rejected"),
            (
                '{"prompt": "a"}\n{"prompt": 5}\n',
                "grpo",
                "row 1: prompt: expected text, or messages in a list, got int",
            ),
            ('{"prompt": ["a"]}\n', "grpo", "row 0: prompt: message 0: expected an object .*, got str"),
            (
                '{"prompt": "a", "chosen": "b", "rejected": {"c": 1}}\n',
                "dpo",
                "row 0: rejected: expected text, .* got dict",
            ),
            ('{"prompt": "a \\ud83d"}\n', "grpo", "rows.jsonl:1: expected text, got half of a surrogate pair"),
            ('{"prompt": 1', "grpo", "rows.jsonl:1: not JSON"),
            (
                '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n',
                "dpo",
                "row 1 has no completion; expected prompt",
            ),
            (
                '{"chosen": "b", "rejected": [{"role": "user", "content": "c"}]}\n',
                "dpo",
                "row 0 has no prompt; expected",
            ),
            (
                f'{{"prompt": {ASKED}}}\n{{"prompt": "a"}}\n',
                "grpo",
                "row 1: prompt is text, and the first row's prompt is",
            ),
            (
                f'{{"prompt": {ASKED}, "chosen": "b", "rejected": "c"}}\n',
                "dpo",
                "row 0: chosen is text, and the first row",
            ),
            (f'{{"prompt": "a", "chosen": "b", "rejected": {SAID}}}\n', "dpo", "row 0: rejected is messages, and the "),
            (
                f'{{"prompt": {ASKED}, "chosen": {SAID}, "rejected": {ASKED[:-1]}, {SAID[1:]}}}\n',
                "dpo",
                "rejected must begin with a message of the assistant, got user",
            ),
            (
                '{"text": "one line"}\n',
                "grpo",
                "got 0 and 0; give more text, whose lines are within --prompt-length 30 and --completion-length 16 tok",
            ),
            ('{"other": "a"}\n', "grpo", "expected a field named text or content, got other"),
        ],
    )
    def test_tables_that_cannot_be_used(self, talker, tmp_path, text, method, message):
        path = tmp_path / "rows.jsonl"
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            rows_of(config(path, method=method), talker, 10)

    @pytest.mark.parametrize("what", MESSAGES)
    @pytest.mark.parametrize("form", ["messages", "prompt", "chosen"])
    def test_messages_of_no_text_are_named(self, talker, tmp_path, what, form):
        asked, said, path = json.loads(ASKED), json.loads(SAID), tmp_path / "rows.jsonl"
        message, why = MESSAGES[what]
        row = {form: [*asked, message, *said], **({"rejected": asked + said} if form == "chosen" else {})}
        for before in (0, 2):
            path.write_text("".join(json.dumps(x) + "\n" for x in [{"prompt": asked}] * before + [row]))
            method = "dpo" if form == "chosen" else "rloo"
            if form == "chosen" and before:
                continue  # prompts alone are no pairs
            with pytest.raises(DataError, match=rf"row {before}: {form}: message 1: {why}") as caught:
                rows_of(config(path, method=method), talker, 10)
            assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("row", "method", "message"),
        [
            ({"messages": "a"}, "grpo", "row 0: messages: expected messages in a list, got str"),
            ({"messages": None}, "grpo", "row 0: messages: expected messages in a list, got null"),
            ({"messages": []}, "grpo", "row 0 has no prompt; expected prompt, or messages that end with the assistant"),
            ({"messages": json.loads(SAID)}, "dpo", "row 0 has no prompt; expected prompt, completion, or messages"),
            ({"messages": json.loads(ASKED)}, "dpo", "row 0 has no chosen, rejected; .*, or messages that end with"),
        ],
    )
    def test_conversations_that_cannot_be_used(self, talker, tmp_path, row, method, message):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=message):
            rows_of(config(path, method=method), talker, 10)

    @pytest.mark.parametrize("name", sorted(TAKEN))
    def test_columns_that_rewards_are_given_something_else_by(self, tokenizer, tmp_path, name):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"say {i}", name: "x"}) + "\n" for i in range(40)))
        with pytest.raises(DataError, match=rf"row 0: a column named '{name}', .*: rename it"):
            rows_of(config(path, method="grpo", rewards="m:f"), tokenizer, 10)
        assert rows_of(config(path, method="grpo"), tokenizer, 10)[0][0] == {"prompt": "say 0"}

    @pytest.mark.parametrize("form", ["whole", "without prompt", "messages", "completion"])
    def test_conversations_to_prefer_answers_in(self, talker, tmp_path, form):
        """TRL's preference rows, its rows whose prompt is what both begin with, and answers to hold against samples."""
        asked, said, wrong = (
            [{"role": r, "content": c}] for r, c in (("user", "a"), (ASSISTANT, "b"), (ASSISTANT, "c"))
        )
        rows = {
            "whole": (
                {"prompt": asked, "chosen": said, "rejected": wrong, "messages": asked + wrong},
                {"rejected": wrong, "chosen": said},
            ),
            "without prompt": (
                {"chosen": asked + said, "rejected": asked + wrong},
                {"rejected": wrong, "chosen": said},
            ),
            "messages": ({"messages": asked + said}, {"completion": said}),
            "completion": ({"prompt": asked, "completion": said}, {"completion": said}),
        }
        given, wanted = rows[form]
        path = tmp_path / "rows.jsonl"
        path.write_text((json.dumps(given) + "\n") * 12)
        train, held = rows_of(config(path, method="dpo"), talker, 5)
        assert train + held == [{"prompt": asked, **wanted}] * (12 if "chosen" in wanted else 6)

    def test_a_template_that_refuses_a_row(self, talker, tmp_path):
        talker.saved.chat_template = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": json.loads(ASKED) * n}) + "\n" for n in (1, 2, 3)))
        with pytest.raises(ConfigError, match=r"rows.jsonl: row 2: the chat template failed: one turn only"):
            rows_of(config(path, method="grpo"), talker, 10)
        said = json.loads(SAID)
        path.write_text(json.dumps({"prompt": json.loads(ASKED), "chosen": said, "rejected": said * 2}))
        with pytest.raises(ConfigError, match=r"rows.jsonl: row 0: the chat template failed: one turn only"):
            rows_of(config(path, method="dpo"), talker, 10)
        talker.saved.chat_template = None
        with pytest.raises(ConfigError, match=r"^prompts of messages need a chat template, and the tokenizer has none"):
            rows_of(config(path, method="dpo"), talker, 10)

    def test_nothing_there(self, tokenizer, tmp_path):
        with pytest.raises(DataError, match="no such file or directory"):
            rows_of(config(tmp_path / "none"), tokenizer, 10)
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
        with pytest.raises(DataError, match=r"^--data .*none.parquet: expected "):
            rows_of(config(tmp_path / "none.parquet"), tokenizer, 10)


def test_a_completion_with_one_of_its_rewards_is_kept():
    """The third weighs nothing, and is no reward of the second."""
    rewards = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan, torch.nan, 1.0]])
    trainer: Any = SimpleNamespace(model=SimpleNamespace(training=True), _calculate_rewards=lambda: rewards)
    leave_out_unrewarded(trainer, [1.0, 0.5, 0.0])
    assert trainer._calculate_rewards().isnan().tolist() == [[False, True, False], [True] * 3]


def test_an_error_names_no_option_that_was_not_given():
    message = "a prompt with its answer has 9 tokens, the model 8 positions"
    with pytest.raises(DataError, match=rf"^the standard library \(no --data\): {message}"):
        trainers.check_pairs(AlignConfig(), 9, 8)
    with pytest.raises(DataError, match=rf"^--data a\.jsonl: {message}"):
        trainers.check_pairs(AlignConfig(data="a.jsonl"), 9, 8)


def test_the_longest_pair_is_of_either_side():
    rows = {"prompt_ids": [[1], [1, 2]], "chosen_ids": [[1] * 5, [1]], "rejected_ids": [[1], [1] * 6]}
    assert trainers.longest_pair(rows) == 8
    trainers.check_pairs(AlignConfig(), 8, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 4, 16])
def test_held_out_rows_fill_batches_of_one_size(ranks, most):
    """On all ranks; less than a batch is left out for it, and nothing where rows fill such batches already."""
    for rows in range(ranks, 33):
        measured, size = trainers.even_batches(rows, most, ranks)
        assert 1 <= size <= most
        assert measured % (size * ranks) == 0
        assert rows - size * ranks < measured <= rows
    assert trainers.even_batches(32, most, ranks=2) == (32, most)
    assert trainers.even_batches(1, most, ranks=4) == (1, 1)


def test_pairs_whose_sides_are_the_same_teach_nothing():
    config, said = AlignConfig(method="dpo", data="a.jsonl"), []
    same, other = ({"prompt": "p", "chosen": "c", "rejected": rejected} for rejected in ("c", "r"))
    with pytest.raises(DataError, match=r"^--data a\.jsonl: chosen and rejected are the same in every pair, .*: give"):
        check_differ(config, [same, same], said.append)
    check_differ(config, [other], said.append)
    assert said == []
    for pairs in ([same, other], [same, other, same]):
        check_differ(config, pairs, said.append)
    told = "warning: --data a.jsonl: chosen and rejected are the same in {}, from which nothing is learned"
    assert said == [told.format("1 of 2 pairs"), told.format("2 of 3 pairs")]
