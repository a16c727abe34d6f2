"""`LogitlessLM` beside lm-evaluation-harness' own `HFLM` on tasks in its format; `make test-lm-eval` has it at hand."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from logitless.errors import ConfigError, DataError
from logitless.resident import AllocationTracker
from tests.support.workbench.micro import micro_directory, micro_model
from tests.support.workbench.real import CACHE, real_model

huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-eval: make test-lm-eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import hash_args  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.evaluator import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from logitless.integrations.lm_eval import Generating, LogitlessLM  # noqa: E402
from logitless.integrations.lm_eval_records import read_records  # noqa: E402

TASKS = Path(__file__).parents[2] / "bench" / "lm_eval"
NAMES = ("docstrings_choice", "docstrings_cloze", "docstrings_text")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # the harness and its dependencies have their own
]


@pytest.fixture(scope="module")
def micro(tmp_path_factory) -> Path:
    """A Qwen3 over bytes that sees 64 of them: contexts are cut, endings too where they are long."""
    place = tmp_path_factory.mktemp("micro")
    micro_directory(place)
    micro_model(initializer_range=0.2).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def smollm2() -> Path:
    from logitless.workbench.sources.converted import directory_of

    name = real_model("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CACHE))
        return directory_of(name)


def loaded(kind: type, place: Path, **more: object):
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    given = {"batch_size": 4, "device": "cpu", **more}
    return kind(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(place), **given)


def answers(lm, task: str, limit: int) -> tuple[list[float], list[bool], dict]:
    """Log-probs, greedy matches and metrics of a task's first documents."""
    manager = TaskManager(include_defaults=False)
    given = {"task_manager": manager, "limit": limit, "bootstrap_iters": 0}
    found = simple_evaluate(lm, tasks=[str(TASKS / f"{task}.yaml")], **given)
    each = [x for sample in found["samples"][task] for response in sample["resps"] for x in response]
    metrics = {name: x for name, x in found["results"][task].items() if isinstance(x, float)}
    if isinstance(each[0], tuple | list):
        return [x[0] for x in each], [x[1] for x in each], metrics
    return each, [], metrics


@pytest.mark.parametrize("task", NAMES)
@pytest.mark.parametrize(("model", "limit"), [("micro", 40), ("smollm2", 4)])
def test_answers_are_hflms_own(request, model, limit, task):
    place = request.getfixturevalue(model)
    ours, greedy, metrics = answers(loaded(LogitlessLM, place), task, limit)
    theirs, their_greedy, their_metrics = answers(loaded(huggingface.HFLM, place), task, limit)
    assert len(ours) == limit * (4 if task == "docstrings_choice" else 1)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert greedy == their_greedy
    assert metrics == pytest.approx(their_metrics, rel=2e-5)


@pytest.mark.parametrize("more", [{"batch_size": 1}, {"batch_size": "auto"}, {"logits_cache": False}])
def test_answers_do_not_depend_on_batches(micro, more):
    for task in NAMES:
        expected, greedy, _ = answers(loaded(LogitlessLM, micro), task, 12)
        found, found_greedy, _ = answers(loaded(LogitlessLM, micro, **more), task, 12)
        assert found == pytest.approx(expected, rel=1e-5)
        assert found_greedy == greedy


def test_no_logits_of_a_batch_exist(micro):
    """The head's own forward is never called with hidden states: it would make their logits."""
    lm = loaded(LogitlessLM, micro)
    lm.model.lm_head.forward = None
    answers(lm, "docstrings_choice", 4)


def test_a_batch_of_auto_is_as_large_as_a_cpu_uses(micro):
    lm = loaded(LogitlessLM, micro, batch_size="auto", max_batch_size=512)
    assert lm._detect_batch_size() == 8192 // 64
    assert Generating.of([], 32) == Generating(32)
    lm.generating = Generating(32)
    assert lm._detect_batch_size() == 8192 // 32
    assert lm._fitting(1) == 512
    assert lm._fitting(10**6) == 1


class Limited(AllocationTracker):
    """A machine with so many bytes for the tensors of a block."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live > self.limit:
            raise RuntimeError("CUDA out of memory.")
        return out


def test_auto_finds_larger_batches(micro, monkeypatch):
    """In 16 MiB, where 64 tokens' logits take 1 MiB; what it finds does run, and twice that does not."""
    vocab, limit = 4096, 2**24
    model = micro_model(vocab_size=vocab).eval()
    given = {"batch_size": "auto", "max_batch_size": 512, "tokenizer": AutoTokenizer.from_pretrained(micro)}
    theirs, ours = (kind(pretrained=model, **given) for kind in (huggingface.HFLM, LogitlessLM))
    ours.memory_budget = 2**18
    monkeypatch.setattr(LogitlessLM, "device", SimpleNamespace(type="cuda", index=0))
    with Limited(limit):
        expected = theirs._detect_batch_size()
        found = ours._detect_batch_size()
    assert 1 <= expected < 8
    assert found >= 8 * expected
    rows = torch.randint(vocab, (2 * found, 65), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [(None, row[:-1], row[-1:]) for row in rows]
    for size, fits in ((found, nullcontext()), (2 * found, pytest.raises(RuntimeError, match="out of memory"))):
        with fits, Limited(limit):
            ours._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=size)


def test_one_row_where_not_even_that_fits_whole(micro, monkeypatch):
    """As HFLM: generated texts may be far shorter than the model's positions, which are what is tried."""
    given = {"batch_size": "auto", "max_batch_size": 8, "tokenizer": AutoTokenizer.from_pretrained(micro)}
    theirs, ours = (kind(pretrained=micro_model().eval(), **given) for kind in (huggingface.HFLM, LogitlessLM))
    monkeypatch.setattr(LogitlessLM, "device", SimpleNamespace(type="cuda", index=0))
    with Limited(1000):
        assert theirs._detect_batch_size() == ours._detect_batch_size() == 1


def test_what_is_longer_than_the_model_sees_is_warned_of(micro, caplog):
    """As HFLM does, with the number of tokens that are cut."""
    lm = loaded(LogitlessLM, micro)
    given = {"request_type": "loglikelihood", "doc": {}, "idx": 0, "metadata": ("a task", 0, 1)}
    cut, fits = ("c" * 61, "d" * 8), ("c" * 57, "d" * 8)
    with caplog.at_level(logging.WARNING, logger="lm_eval.models.huggingface"):
        lm.loglikelihood([Instance(arguments=x, **given) for x in (cut, fits)], disable_tqdm=True)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (warned,) = [message for message in said if "Truncating" in message]
    assert "context (61) and continuation (8) exceeds model's maximum length (64). Truncating 4 tokens" in warned


def recorded(place: Path, task: str, limit: int, path: Path, **more: object) -> tuple[list[dict], list[dict]]:
    """(the records, the harness' samples) of a task's first documents."""
    lm = loaded(LogitlessLM, place, records=path, **more)
    given = {"task_manager": TaskManager(include_defaults=False), "limit": limit, "bootstrap_iters": 0}
    found = simple_evaluate(lm, tasks=[str(TASKS / f"{task}.yaml")], **given)
    return [json.loads(line) for line in path.read_text().splitlines()], found["samples"][task]


def dense_rows(place: Path, ids: list[int]) -> torch.Tensor:
    """The log-softmax before each token but the first, in float64."""
    model = AutoModelForCausalLM.from_pretrained(place).double().eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("task", NAMES)
def test_records_of_scored_tokens(micro, tmp_path, task):
    """One an answer: what the logits say of its last tokens, whose log-probs are the answer's own."""
    records, samples = recorded(micro, task, 4, tmp_path / "records.jsonl")
    answers = {(x["doc_id"], i): r for x in samples for i, (r,) in enumerate(x["resps"])}
    assert {(x["document"], x["request"]) for x in records} == answers.keys()
    assert len(records) == len(answers)
    tokenizer = AutoTokenizer.from_pretrained(micro)
    for record in records:
        answer = answers[record["document"], record["request"]]
        total = answer[0] if isinstance(answer, tuple | list) else answer
        assert sum(record["logprob"]) == pytest.approx(total, rel=1e-6)
        assert tokenizer.convert_tokens_to_ids(record["tokens"]) == record["ids"]
        given = next(x for x in samples if x["doc_id"] == record["document"])["arguments"][record["request"]]
        whole = tokenizer("".join(given))["input_ids"]
        assert record["cut"] == (max(0, len(whole) - 65) if len(given) == 2 else 0)
        if task == "docstrings_text":
            continue  # of several windows
        ids = whole[-65:]
        rows = dense_rows(micro, ids)[-len(record["ids"]) :]
        own = rows.gather(-1, torch.tensor(record["ids"])[:, None])
        assert record["logprob"] == pytest.approx(own[:, 0].tolist(), rel=1e-4)
        assert record["rank"] == (1 + (rows > own).sum(-1)).tolist()
        assert record["entropy"] == pytest.approx((-(rows.exp() * rows).sum(-1)).tolist(), rel=1e-4)
        assert record["confidence"] == pytest.approx(rows.max(-1).values.exp().tolist(), rel=1e-4)


@pytest.mark.parametrize("batch_size", [2, "auto"])
def test_records_of_generated_tokens(micro, tmp_path, batch_size):
    """The texts are HFLM's own, and each token's numbers what the logits say of it."""
    records, samples = recorded(micro, "docstrings_word", 5, tmp_path / "records.jsonl", batch_size=batch_size)
    given = {"task_manager": TaskManager(include_defaults=False), "limit": 5, "bootstrap_iters": 0}
    place = str(TASKS / "docstrings_word.yaml")
    theirs = simple_evaluate(loaded(huggingface.HFLM, micro), tasks=[place], **given)["samples"]["docstrings_word"]
    assert [x["resps"] for x in samples] == [x["resps"] for x in theirs]
    tokenizer = AutoTokenizer.from_pretrained(micro)
    assert sorted(x["document"] for x in records) == [x["doc_id"] for x in samples]
    for record in records:
        sample = next(x for x in samples if x["doc_id"] == record["document"])
        prompt = tokenizer(sample["arguments"][0][0])["input_ids"]
        assert record["text"] == sample["resps"][0][0]
        assert record["cut"] == len(prompt) - 58 > 0
        rows = dense_rows(micro, prompt[-58:] + record["ids"])[-len(record["ids"]) :]
        assert record["ids"] == rows.argmax(-1).tolist()
        assert record["rank"] == [1] * len(record["ids"])
        assert record["logprob"] == pytest.approx(rows.max(-1).values.tolist(), rel=1e-4)
        assert record["entropy"] == pytest.approx((-(rows.exp() * rows).sum(-1)).tolist(), rel=1e-4)
        assert [best[0] for best in record["top_ids"]] == record["ids"]


def test_requests_whose_options_are_the_same_in_other_words(micro, tmp_path):
    """HFLM makes one batch of them and answers by the first one's options; each has its own record and kept answer."""
    lm = loaded(LogitlessLM, micro, records=tmp_path / "records.jsonl")
    kept = []
    lm.cache_hook = SimpleNamespace(add_partial=lambda kind, arguments, text: kept.append(arguments))
    given = {"request_type": "generate_until", "doc": {}, "idx": 0}
    first = {"until": ["zz"], "max_gen_toks": 4, "do_sample": False}
    second = {"do_sample": 0, "max_gen_toks": 4, "until": ["zz"]}
    requests = [
        Instance(arguments=("abc", how), metadata=(f"task {i}", 0, 1), **given) for i, how in enumerate((first, second))
    ]
    texts = lm.generate_until(requests, disable_tqdm=True)
    records = [record for _, record in read_records(tmp_path / "records.jsonl")]
    assert [(x["task"], x["text"]) for x in records] == [(f"task {i}", text) for i, text in enumerate(texts)]
    assert [x["key"] for x in records] == [hash_args("generate_until", x.args) for x in requests]
    assert list(map(str, kept)) == [str(x.args) for x in requests]


def test_sampled_tokens_have_the_log_prob_that_they_were_drawn_with(micro, tmp_path):
    """Texts of beams are HFLM's, and have no record, also where it is the checkpoint that asks for beams."""
    lm = loaded(LogitlessLM, micro, records=tmp_path / "records.jsonl")
    given = {"request_type": "generate_until", "doc": {}, "idx": 0, "metadata": ("a task", 0, 2)}
    sampled = {"do_sample": True, "temperature": 0.5, "top_k": 0, "max_gen_toks": 4, "until": ["zz"]}
    beams = {"num_beams": 2, "max_gen_toks": 4, "until": ["zz"]}
    requests = [Instance(arguments=("abc", how), **given) for how in (sampled, sampled, beams)]
    texts = lm.generate_until(requests, disable_tqdm=True)
    records = [record for _, record in read_records(tmp_path / "records.jsonl")]
    assert [x["text"] for x in records] == texts[:2]
    assert len(texts[2]) > 0
    for record in records:
        rows = dense_rows(micro, AutoTokenizer.from_pretrained(micro)("abc")["input_ids"] + record["ids"])
        rows = rows[-len(record["ids"]) :]
        own = torch.tensor(record["ids"])[:, None]
        assert record["logprob"] == pytest.approx(rows.gather(-1, own)[:, 0].tolist(), rel=1e-4)
        behaviour = (rows / 0.5).log_softmax(-1).gather(-1, own)[:, 0]
        assert record["behaviour_logprob"] == pytest.approx(behaviour.tolist(), rel=1e-4, abs=1e-6)
    lm.model.generation_config.num_beams = 2
    unsaid = Instance(arguments=("abc", {"max_gen_toks": 4, "until": ["zz"]}), **given)
    assert lm.generate_until([unsaid], disable_tqdm=True) == texts[2:]
    assert len(list(read_records(tmp_path / "records.jsonl"))) == 2


def test_processes_that_the_harness_counts_as_one_write_files_of_their_own(micro, tmp_path, monkeypatch):
    """As with tp_plan, where each says that it is rank 0 of 1."""
    path = tmp_path / "records.jsonl"
    for name, found in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda found=found: found)
    assert loaded(LogitlessLM, micro, records=path).records.path == tmp_path / "records-1.jsonl"


def test_a_text_without_a_token(micro, tmp_path):
    """Its log-prob is 0, and it has a record as others have."""
    path = tmp_path / "records.jsonl"
    lm = loaded(LogitlessLM, micro, records=path)
    given = {"request_type": "loglikelihood_rolling", "doc": {}}
    texts = [Instance(arguments=(text,), idx=0, metadata=("t", i, 1), **given) for i, text in enumerate(("", "ab"))]
    found = lm.loglikelihood_rolling(texts, disable_tqdm=True)
    assert found == pytest.approx(loaded(huggingface.HFLM, micro).loglikelihood_rolling(texts), rel=1e-5)
    records = [record for _, record in read_records(path)]
    assert [(x["document"], x["answer"]) for x in records] == list(enumerate(found))
    assert records[0]["ids"] == records[0]["rank"] == records[0]["confidence"] == []


def test_a_record_that_was_half_written_is_passed_over(micro, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"task": "doc')
    lm = loaded(LogitlessLM, micro, records=path)
    given = {"request_type": "loglikelihood", "doc": {}, "idx": 0, "metadata": ("a task", 3, 1)}
    lm.loglikelihood([Instance(arguments=("a", "b"), **given)], disable_tqdm=True)
    half, found = [record for _, record in read_records(path)]
    assert half is None
    assert (found["task"], found["document"], found["type"]) == ("a task", 3, "loglikelihood")


def test_its_name_is_known():
    assert get_model("logitless") is LogitlessLM


def test_answers_are_kept_for_a_run_that_goes_on(micro, tmp_path):
    """In the harness' own cache, as they come: what a stopped run has answered is not asked again."""
    lm, stopped = loaded(LogitlessLM, micro, batch_size=1), loaded(LogitlessLM, micro, batch_size=1)
    expected = answers(lm, "docstrings_choice", 6)
    given = {"task_manager": TaskManager(include_defaults=False), "limit": 6, "bootstrap_iters": 0}
    forward, calls = stopped.model.forward, 0

    def forward_until_stopped(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls > 6:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    stopped.model.forward = forward_until_stopped
    tasks = [str(TASKS / "docstrings_choice.yaml")]
    with pytest.raises(KeyboardInterrupt):
        simple_evaluate(stopped, tasks=tasks, use_cache=str(tmp_path / "answers"), **given)
    again = loaded(LogitlessLM, micro, batch_size=1)
    asked = []
    original = again._loglikelihood_tokens
    again._loglikelihood_tokens = lambda requests, **more: asked.extend(requests) or original(requests, **more)
    found = simple_evaluate(again, tasks=tasks, use_cache=str(tmp_path / "answers"), **given)
    assert 0 < len(asked) < 24
    each = [x for sample in found["samples"]["docstrings_choice"] for response in sample["resps"] for x in response]
    assert [x[0] for x in each] == pytest.approx(expected[0], rel=1e-6)


def test_what_cannot_be_evaluated(micro, tmp_path):
    lm = loaded(LogitlessLM, micro)

    def asked(*arguments: str | dict, kind: str = "loglikelihood", first: tuple[str | dict, ...] = ("a", "b")):
        given = {"request_type": kind, "doc": {}, "idx": 0, "metadata": ("a task", 0, 1)}
        return [Instance(arguments=first, **given), Instance(arguments=arguments, **given)]

    with pytest.raises(DataError, match="document 2 of task a task: expected a continuation to score, got none"):
        lm.loglikelihood(asked("text", ""), disable_tqdm=True)
    until = {"until": ["."], "max_gen_toks": 2}
    with pytest.raises(DataError, match="document 2 of task a task: expected a prompt to go on from, got none"):
        lm.generate_until(asked("", until, kind="generate_until", first=("a", until)), disable_tqdm=True)
    with pytest.raises(DataError, match="request 2 of 2: its continuation has 70 tokens, expected at most the 64"):
        lm.loglikelihood(asked("text", "b" * 70), disable_tqdm=True)
    tokenizer = AutoTokenizer.from_pretrained(micro)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no begin-of-text and no end-of-text token"):
        LogitlessLM(pretrained=lm.model, tokenizer=tokenizer).loglikelihood(asked("", "b"), disable_tqdm=True)
    with pytest.raises(ConfigError, match="backend seq2seq: expected a causal language model"):
        loaded(LogitlessLM, micro, backend="seq2seq")
