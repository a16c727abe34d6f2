"""What is looked at before a run begins: enough rows, room for a completion, and samples that are to be rejected."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitless.errors import DataError
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.align.data import check_enough, check_room, load, rows_of, save, with_rejected
from logitless.workbench.sources.chat import ASSISTANT
from logitless.workbench.sources.tokenizer import pretrained


@pytest.fixture
def tokenizer(micro):
    return pretrained(str(micro.model.parent))


def test_a_step_has_all_its_prompts():
    config = AlignConfig(data="a.jsonl", batch_size=4, gradient_accumulation_steps=3, generations_per_prompt=2)
    check_enough(config, [{"prompt": "a"}] * 6, 1)
    with pytest.raises(DataError) as caught:
        check_enough(config, [{"prompt": "a"}] * 5, 1)
    assert str(caught.value) == (
        "--data a.jsonl: a step needs 6 prompts (--batch-size 4 times --gradient-accumulation-steps 3, over "
        "--generations-per-prompt 2), got 5 beside those held out; give more, or lower the former"
    )
    with pytest.raises(DataError, match=r"needs 12 prompts \(.*steps 3 times 2 ranks, over .*, got 11 beside"):
        check_enough(config, [{"prompt": "a"}] * 11, 2)
    check_enough(AlignConfig(method="dpo", batch_size=4), [{"prompt": "a"}], 2)  # whose pairs come again


def test_the_longest_prompt_has_room_for_a_completion(tokenizer):
    config, rows = AlignConfig(data="a.jsonl", completion_length=5), [{"prompt": x} for x in ("a", "abc", "ab")]
    longest = len([*tokenizer.opening, *tokenizer.encode(["abc"])[0]])
    check_room(config, rows, tokenizer, longest + 5)
    check_room(config, rows, tokenizer, None)
    message = (
        f"a prompt has {longest} tokens, which with --completion-length 5 is more than the model's {longest + 4} pos"
    )
    with pytest.raises(DataError, match=message):
        check_room(config, rows, tokenizer, longest + 4)


class Parrot:
    """A model that says its prompt's last character twice, or blanks where that is a blank, and how it was asked."""

    device, generation_config = torch.device("cpu"), SimpleNamespace(pad_token_id=0)

    def __init__(self, training: bool) -> None:
        self.training, self.seen = training, []

    def eval(self) -> None:
        self.training = False

    def train(self, mode: bool) -> None:
        self.training = mode

    def generate(self, **given: Any) -> torch.Tensor:
        self.seen.append(given | {"training": self.training, "seed": torch.initial_seed()})
        ids = given["input_ids"]
        end = torch.full_like(ids[:, :1], 2)  # </s>
        return torch.cat([ids, ids[:, -1:], ids[:, -1:], end], -1)


@pytest.mark.parametrize("training", [True, False])
def test_samples_are_the_rejected_of_all_rows_but_those_that_are_blank(tokenizer, training):
    config = AlignConfig(method="dpo", batch_size=2, temperature=0.7, completion_length=6, seed=5)
    rows = [
        {"prompt": "ab", "continuation": "c"},
        {"prompt": "a ", "continuation": "c"},
        {"prompt": "abcd", "completion": "e"},
        {"prompt": "x", "completion": [{"role": ASSISTANT, "content": "e"}]},
        {"prompt": "y", "continuation": "z"},
    ]
    model = Parrot(training)
    assert with_rejected(rows, model, tokenizer, config) == [
        {"prompt": "ab", "chosen": "c", "rejected": "bb"},
        {"prompt": "abcd", "chosen": "e", "rejected": "dd"},
        {"prompt": "x", "chosen": rows[3]["completion"], "rejected": [{"role": ASSISTANT, "content": "xx"}]},
        {"prompt": "y", "chosen": "z", "rejected": "yy"},
    ]
    assert model.training is training
    assert [len(x["input_ids"]) for x in model.seen] == [2, 2, 1]
    asked = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 6, "min_new_tokens": 1}
    assert all(
        asked | {"training": False, "seed": 5} == {k: x[k] for k in (*asked, "training", "seed")} for x in model.seen
    )
    assert [row.count_nonzero() for row in model.seen[1]["attention_mask"]] == [4, 1]


def test_pairs_that_are_there_stay_as_they_are(tokenizer):
    config, model = AlignConfig(method="dpo", batch_size=2), Parrot(True)
    rows = [{"prompt": "a", "chosen": "b", "rejected": str(i)} for i in range(3)]
    assert with_rejected(rows, model, tokenizer, config) == rows
    assert not model.seen


def test_at_most_32_rows_are_held_out(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(700)))
    train, held = rows_of(AlignConfig(data=str(path)), tokenizer, 10)
    assert [len(train), len(held)] == [665, 32]  # of one in twenty


def test_answers_to_hold_against_samples_are_as_many_as_the_steps_see(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "say {i}", "completion": "{i}"}}\n' for i in range(60)))
    found = [rows_of(AlignConfig(method="dpo", data=str(path), seed=seed), tokenizer, 10) for seed in (0, 0, 1)]
    assert [len(train) for train, _ in found] == [10] * 3
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] == found[2][1] == [{"prompt": f"say {i}", "completion": f"{i}"} for i in (10, 30, 50)]


@pytest.mark.parametrize(
    ("train", "held", "why"),
    [
        ([{"prompt": "a"}], [], "no row that is held out"),
        ([{"prompt": "a"}], [{"prompt": [{"role": "user", "content": "a"}]}], "text among messages"),
        ([], [{"prompt": "a"}], "IndexError"),
    ],
)
def test_rows_of_a_run_that_were_changed_are_one_line(tmp_path, train, held, why):
    save(tmp_path / "rows.jsonl", train, held)
    with pytest.raises(DataError, match=rf"rows.jsonl does not hold what was written there \(.*{why}"):
        load(tmp_path / "rows.jsonl", AlignConfig())
    save(tmp_path / "rows.jsonl", [{"prompt": "a"}], [{"other": "a"}])
    with pytest.raises(DataError, match=r"rows.jsonl has no prompt; expected prompt, or messages"):
        load(tmp_path / "rows.jsonl", AlignConfig())
