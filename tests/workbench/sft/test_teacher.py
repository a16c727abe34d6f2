"""Distillation from a record: against dense float64, within its memory, after a kill, and what is refused."""

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

import logitless
from logitless.cli.main import main
from logitless.errors import ConfigError, DataError, OptionError
from logitless.sample import TeacherRecord, TeacherRows
from logitless.workbench.common.files import read_lines
from logitless.workbench.runs.rundir import stored
from logitless.workbench.scoring.config import ScoreConfig
from logitless.workbench.scoring.run import run as score
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.run import run
from logitless.workbench.sft.teacher import HIDDEN, TaughtRows, Teacher
from logitless.workbench.sources.packing import PackedRows
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.allocations import trace_allocations
from tests.support.workbench.damage import DEEP
from tests.support.workbench.micro import CONTEXT, micro_corpus, micro_directory, micro_model
from tests.support.workbench.processes import flags, killed_at
from tests.workbench.sft.test_ranks import launch

QUIET = Console(quiet=True)
V, KEEP = 259, 6


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> SimpleNamespace:
    """A teacher that knows a little, and its records of a corpus, of each kind."""
    root: Path = tmp_path_factory.mktemp("taught")
    micro_directory(root / "teacher")
    teacher = micro_model(hidden_size=48, initializer_range=0.4)
    teacher.save_pretrained(root / "teacher")
    data = micro_corpus(root / "data", 40)
    told = {"model": str(root / "teacher"), "data": str(data), "device": "cpu"}
    for name, more in (
        ("hidden", {"store": "hidden"}),
        ("fp8", {"store": "hidden", "hidden_dtype": "fp8"}),
        ("topk", {"keep": KEEP}),
        ("bos", {"store": "hidden", "bos": "yes"}),
    ):
        score(ScoreConfig(out=root / f"{name}.parquet", **told, **more), QUIET)
    micro_directory(root / "opening", "<pad> <s> $A")
    teacher.save_pretrained(root / "opening")
    told["model"] = str(root / "opening")
    score(ScoreConfig(out=root / "opening.parquet", **told, store="hidden"), QUIET)
    micro_directory(root / "student")
    return SimpleNamespace(root=root, data=data, config=_config(root / "student" / "config.json"))


def _config(model: Path, **more: object) -> TrainConfig:
    sizes = {"context_length": CONTEXT, "batch_size": 2, "max_steps": 8, "learning_rate": 1e-2, "device": "cpu"}
    return TrainConfig(model=str(model), **{**sizes, **more})


def teacher_of(scored, kind: str, entries: np.ndarray | None = None, **more: object) -> Teacher:
    config = replace(scored.config, teacher=str(scored.root / f"{kind}.parquet"), **more).check()
    if entries is not None:
        return Teacher(TeacherRecord(config.teacher), config, entries)
    found = Teacher.of(config, pretrained(str(scored.root / "student")), V)
    assert found is not None
    return found


def batch_of(teacher: Teacher, rows: int = 3) -> dict[str, torch.Tensor]:
    train, _, _ = teacher.streams(CONTEXT)
    some = TaughtRows(PackedRows(train, CONTEXT))
    return teacher.batch([some[i] for i in (2, 0, 5)[:rows]])


def kl(logp, logq):
    return torch.where(logp.isneginf(), 0.0, logp.exp() * (logp - logq)).sum(-1)


def split(logp, inside):
    """(of each side its mass, the distribution among the entries on it) at a set of entries."""
    mass = torch.stack([logp.masked_fill(~x, -torch.inf).logsumexp(-1) for x in (inside, ~inside)], -1)
    among = [logp.masked_fill(~x, -torch.inf) - mass[..., i, None] for i, x in enumerate((inside, ~inside))]
    return mass, *among


def dense(teacher: Teacher, batch: dict[str, torch.Tensor], student) -> torch.Tensor:
    """The loss from whole logits of both, in float64."""
    config, labels = teacher.config, batch["labels"][:, 1:]
    z = student(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[:, :-1]
    at, temperature = labels != -100, config.distill_temperature
    s = (z / temperature).log_softmax(-1)[at]
    label = z.log_softmax(-1)[at].gather(-1, labels[at][:, None])[:, 0]
    if teacher.record.kind == "hidden":
        head = teacher.head.weight.double()
        t = ((batch[HIDDEN[0]][:, :-1][at].double() @ head.t()) / temperature).log_softmax(-1)
        if config.distill_tail != "bucket":
            inside = torch.zeros_like(t, dtype=torch.bool).scatter(-1, t.topk(config.distill_top_k).indices, True)
            mass, head, tail = (kl(a, b) for a, b in zip(split(t, inside), split(s, inside), strict=True))
            each = mass + head + tail
        if config.distill_tail == "tail-aware":
            in_tail = t.masked_fill(inside, -torch.inf).exp().sum(-1)
            of_rows = torch.zeros_like(labels, dtype=t.dtype).masked_scatter(at, in_tail)
            mean = (of_rows.sum(-1, keepdim=True) / at.sum(-1, keepdim=True)).expand_as(of_rows)[at]
            each = mass + (1 - in_tail) * head + config.distill_tail_weight / mean * in_tail * tail
        if config.distill_tail == "bucket":
            each = kl(t, s) if config.distill_loss == "forward" else kl(s, t)
    else:
        ids, t = batch["teacher_ids"][:, :-1][at], batch["teacher_log_weights"][:, :-1][at].double()
        real = ~t.isneginf()
        inside = torch.zeros_like(s).scatter_add(-1, ids, real.double()) > 0
        mine = s.gather(-1, ids).masked_fill(~real, -torch.inf)
        both = [torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in (t, mine)]
        if config.distill_tail == "decoupled":
            among = [x - x.logsumexp(-1, keepdim=True) for x in (t, mine)]
            sides = [torch.stack([x[:, :-1].logsumexp(-1), x[:, -1]], -1) for x in both]
            each = kl(*sides) + kl(*among)
        else:
            each = kl(*both) if config.distill_loss == "forward" else kl(*both[::-1])
    share = config.distill_weight
    return (share * temperature**2 * each - (1 - share) * label).sum() / at.sum()


SETTINGS = {
    "forward": ("hidden", {}),
    "reverse": ("hidden", {"distill_loss": "reverse"}),
    "fp8": ("fp8", {}),
    "behind a begin-of-text token": ("bos", {}),
    "behind several tokens": ("opening", {"entries": np.arange(V)}),
    "temperature": ("hidden", {"distill_temperature": 2.0}),
    "with the label": ("hidden", {"distill_weight": 0.3}),
    "both": ("hidden", {"distill_weight": 0.3, "distill_temperature": 0.5, "distill_loss": "reverse"}),
    "decoupled": ("hidden", {"distill_tail": "decoupled", "distill_top_k": 4, "distill_temperature": 2.0}),
    "tail-aware": ("hidden", {"distill_tail": "tail-aware", "distill_top_k": 4, "distill_tail_weight": 1.5}),
    "best entries": ("topk", {}),
    "best entries, reverse": ("topk", {"distill_loss": "reverse", "distill_weight": 0.5}),
    "best entries, decoupled": ("topk", {"distill_tail": "decoupled"}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_loss_and_gradient_are_the_dense_ones(scored, setting):
    kind, more = SETTINGS[setting]
    assert_dense(teacher_of(scored, kind, **more), micro_model(initializer_range=0.3).double())


def assert_dense(teacher: Teacher, student) -> None:
    batch = batch_of(teacher)
    text = {name: x for name, x in batch.items() if not name.startswith("teacher_")}
    assert (text["labels"] != -100).sum() > 50
    wanted = dense(teacher, batch, student)
    wanted.backward()
    grads = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    loss = teacher.loss(student, batch, None)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    for name, p in student.named_parameters():
        scale = grads[name].abs().max().item()
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-3, atol=2e-4 * scale, msg=name)


@pytest.mark.parametrize("kind", ["hidden", "topk"])
def test_a_student_of_a_part_of_the_vocabulary(scored, kind):
    """Its entries in another order, some left out: documents with a token that it lacks are left out too."""
    record = TeacherRecord(scored.root / f"{kind}.parquet")
    used, times = np.unique(np.concatenate([tokens for _, tokens, _ in record.documents()]), return_counts=True)
    rare = used[times.argmin()]
    others = np.setdiff1d(np.arange(V), used)[:100]
    entries = np.random.default_rng(0).permutation(np.concatenate([used[used != rare], others]))
    teacher = teacher_of(scored, kind, entries)
    _, _, remarks = teacher.streams(CONTEXT)
    assert "with tokens that the student has no entry for: left out" in remarks[0]
    batch = batch_of(teacher)
    assert int(batch["input_ids"].max()) < len(entries)
    if kind == "topk":
        assert batch["teacher_log_weights"].isneginf().any()
    assert_dense(teacher, micro_model(initializer_range=0.3, vocab_size=len(entries)).double())


def test_the_head_of_a_part_of_the_vocabulary_has_its_rows_and_biases():
    weight, bias, own = torch.randn(9, 4), torch.randn(9), [5, 2, 0]
    record = SimpleNamespace(head=lambda: logitless.LMHead(weight, bias, scale=2.0, vocab_size=8))
    head = Teacher(record, TrainConfig(teacher="t"), np.array(own)).head
    assert torch.equal(head.weight, weight[own])
    assert torch.equal(head.bias, bias[own])
    assert (head.rows, head.scale) == (3, 2.0)


def test_a_token_of_which_the_student_has_none_of_the_best_entries():
    """It is not learned, and of nothing else the loss is 0."""
    ids = torch.tensor([[1, 0], [8, 7], [2, 6]])
    weights = torch.tensor([[0.5, 0.3], [0.6, 0.2], [0.5, 0.4]]).log()
    record = SimpleNamespace(kind="topk", vocab_size=9)
    record.read = lambda begin, end: TeacherRows(torch.ones(3), None, ids[begin:end], weights[begin:end])
    teacher = Teacher(record, TrainConfig(teacher="t"), np.array([5, 2, 0]))
    row = {"input_ids": [0, 1, 0, 2], "labels": [-100, 1, 0, 2], "position_ids": [0, 1, 2, 3]}
    row = {name: torch.tensor(x) for name, x in row.items()}
    batch = teacher.batch([{**row, "teacher_rows": torch.tensor([-1, 0, 1, 2])}])
    assert batch["labels"].tolist() == [[-100, 1, -100, 2]]
    assert batch["teacher_ids"][0, :3].tolist() == [[2, 2], [0, 0], [1, 1]]
    assert batch["teacher_log_weights"][0, :3].exp().flatten().tolist() == pytest.approx([0, 0.3, 0, 0, 0.5, 0])
    batch["labels"][:] = -100
    assert teacher.loss(micro_model(vocab_size=3), batch, None) == 0


@pytest.mark.parametrize(("opening", "left_out"), [((), 2), ((7,), 1)])
def test_documents_that_are_left_out_or_too_long_are_counted(opening, left_out):
    """A first token is learned where one stands before it."""
    scored = [[False, True, True, True, True], [False, True, True], [False], [False, False]]
    whole = [[True] * len(some) if opening else some for some in scored[:3]]
    every = [(0, np.arange(len(some)), np.array(some)) for some in (*whole, scored[3])]
    given = SimpleNamespace(path="r", vocab_size=9, opening=opening, documents=lambda: iter(every))
    teacher = Teacher(given, TrainConfig(teacher="r"))
    longer = "1 of 4 documents longer than {} tokens: what follows is read without them".format
    said = f"{left_out} of 4 documents with tokens that have no score, as conversations have: left out"
    longest = 5 + len(opening)
    assert teacher.streams(longest)[2] == [said]
    assert teacher.streams(longest - 1)[2] == [said, longer(longest - 1)]
    every[1:] = every[3:]
    with pytest.raises(
        DataError, match=r"--teacher r: expected two documents or more, .*: 1 of 2 documents with tokens"
    ):
        teacher.streams(longest)


def test_the_tails_weight_is_in_the_summary_of_who_goes_by_it():
    found = {
        tail: Teacher(SimpleNamespace(path="r", kind="hidden"), TrainConfig(teacher="r", distill_tail=tail))
        for tail in ("decoupled", "tail-aware")
    }
    assert [found[tail].summary().get("tail_weight") for tail in found] == [None, 2.0]


def test_a_student_without_the_token_that_documents_begin_with(scored):
    (bos,) = TeacherRecord(scored.root / "bos.parquet").opening
    teacher = teacher_of(scored, "bos", np.delete(np.arange(V), bos))
    expected = f"expected an entry of the student for id {bos}, which the record's documents begin with, got none"
    with pytest.raises(DataError, match=expected):
        teacher.streams(CONTEXT)


@pytest.mark.parametrize(("kind", "opening"), [("bos", [1]), ("opening", [0, 1])])
def test_a_document_that_fits_is_whole(scored, kind, opening):
    """What a student reads before a token is what the teacher read; a longer document goes on in a row of its own."""
    teacher = teacher_of(scored, kind, np.arange(V))
    kept, held, remarks = teacher.streams(CONTEXT)
    longer = 0
    tokens = {first: ids for first, ids, _ in teacher.record.documents()}
    seen = np.concatenate([x.rows[x.said & (x.rows >= 0)] for x in (kept, held)])
    assert len(set(seen)) == len(seen) > len(teacher.record) - len(tokens)  # but for last tokens that stand alone
    for stream in (kept, held):
        assert len(stream.ids) % CONTEXT == 0
        edges = [*stream.starts, len(stream.ids)]
        for begin, end in pairwise(edges):
            if not stream.said[begin:end].any():
                continue
            assert begin // CONTEXT == (end - 1) // CONTEXT
            begins = int(stream.rows[begin:end][stream.said[begin:end]][0])
            if begins in tokens and len(tokens[begins]) + len(opening) <= CONTEXT:
                assert stream.ids[begin:end].tolist() == [*opening, *tokens[begins]]
            else:
                longer += 1
    assert longer > 0
    assert f"longer than {CONTEXT} tokens: what follows is read without them" in remarks[0]


def test_every_token_meets_its_own_distribution(scored):
    """What lies beside a token in a batch is what the teacher's model says before it, of the text before."""
    teacher = teacher_of(scored, "hidden")
    model = micro_model(hidden_size=48, initializer_range=0.4)
    train, _, _ = teacher.streams(CONTEXT)
    firsts = {first for first, _, _ in teacher.record.documents()}
    at = next(i for i, (a, b) in enumerate(pairwise(train.starts)) if train.rows[a] in firsts and b - a > 8)
    number, begin = divmod(int(train.starts[at]), CONTEXT)
    end = begin + int(train.starts[at + 1] - train.starts[at])
    row = teacher.batch([TaughtRows(PackedRows(train, CONTEXT))[number]])
    ids = row["input_ids"][:, begin:end]
    with torch.no_grad():
        own = logitless.hidden_states(model.eval(), {"input_ids": ids})[0, :-1]
    torch.testing.assert_close(row["teacher_hidden"][0, begin : end - 1].float(), own, rtol=2**-8, atol=1e-4)
    assert (row["teacher_hidden"][0, end - 1] == 0).all()


@pytest.mark.parametrize("tail", ["bucket", "decoupled", "tail-aware"])
def test_nothing_of_the_size_of_the_logits_is_made(tail):
    n, v, h = 128, 8_000, 16
    config = TrainConfig(teacher="t", distill_tail=tail, distill_weight=0.5, memory_budget="512KiB")
    record = SimpleNamespace(kind="hidden")
    teacher = Teacher(record, config)
    teacher.__dict__["head"] = logitless.LMHead(torch.randn(v, h))
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    given = torch.randint(v, (n,)), torch.randn(n, h).bfloat16()
    found = trace_allocations(lambda: teacher.of_hidden(logitless.LMHead(weight), hidden, *given).backward())
    assert found.largest < n * v * 4 / 4
    assert found.peak < n * v * 4 / 2
    assert weight.grad is not None


@pytest.mark.usefixtures("unmeasured")
class TestRuns:
    @pytest.mark.parametrize("kind", ["hidden", "topk"])
    def test_a_student_comes_nearer_to_its_teacher(self, scored, tmp_path, kind):
        config = replace(scored.config, teacher=str(scored.root / f"{kind}.parquet"), max_steps=30)
        summary = run(replace(config, output_dir=tmp_path / "run"), QUIET)
        assert summary["last_loss"] < 0.7 * summary["first_loss"]
        assert summary["teacher"]["stored"] == kind
        assert summary["held_out_loss_after"] != summary["held_out_loss_before"]

    @pytest.mark.parametrize("kind", ["hidden", "topk"])
    def test_in_mixed_precision_the_products_of_the_loss_are_rounded_too(self, scored, tmp_path, monkeypatch, kind):
        config = replace(scored.config, teacher=str(scored.root / f"{kind}.parquet"), max_steps=2)
        rounded, of_hidden = [], Teacher.of_hidden

        def spy(self, *given):
            rounded.append(torch.is_autocast_enabled("cpu"))
            return of_hidden(self, *given)

        monkeypatch.setattr(Teacher, "of_hidden", spy)
        exact, mixed = (
            run(replace(config, mixed_precision=name, output_dir=tmp_path / name), QUIET) for name in ("no", "bf16")
        )
        assert rounded == [False] * 2 + [True] * 2
        assert mixed["first_loss"] != exact["first_loss"]
        assert mixed["first_loss"] == pytest.approx(exact["first_loss"], rel=1e-2)

    def test_a_killed_run_goes_on_to_the_same_losses(self, scored, tmp_path):
        config = replace(scored.config, teacher=str(scored.root / "hidden.parquet"))
        run(replace(config, output_dir=tmp_path / "whole"), QUIET)
        place = tmp_path / "killed"
        killed_at(5, "train", *flags(config), "--output-dir", place)
        run(replace(stored(place, TrainConfig()), resume=place), QUIET)
        whole, again = (
            {r["step"]: r["loss"] for r in read_lines(x / "metrics.jsonl") if "loss" in r}
            for x in (tmp_path / "whole", place)
        )
        assert again == pytest.approx(whole, rel=1e-6)

    def test_a_run_does_not_go_on_with_another_record(self, scored, tmp_path):
        for name in ("hidden.parquet", "hidden.head.safetensors"):
            shutil.copy(scored.root / name, tmp_path / name)
        place = tmp_path / "run"
        run(replace(scored.config, teacher=str(tmp_path / "hidden.parquet"), output_dir=place, max_steps=2), QUIET)
        again = replace(stored(place, TrainConfig()), resume=place, max_steps=4)
        shutil.copy(scored.root / "bos.parquet", tmp_path / "hidden.parquet")
        shutil.copy(scored.root / "bos.head.safetensors", tmp_path)
        with pytest.raises(DataError, match=r"hidden.parquet has changed since the run began"):
            run(again, QUIET)
        shutil.copy(scored.root / "hidden.parquet", tmp_path / "hidden.parquet")
        assert run(again, QUIET)["steps"] == 4

    def test_a_run_does_not_go_on_with_other_ids(self, scored, tmp_path):
        place, ids = tmp_path / "run", tmp_path / "ids.npy"
        np.save(ids, np.arange(V))
        config = replace(scored.config, teacher=str(scored.root / "hidden.parquet"), teacher_ids=str(ids))
        run(replace(config, output_dir=place, max_steps=2), QUIET)
        again = replace(stored(place, TrainConfig()), resume=place, max_steps=4)
        np.save(ids, np.arange(V)[::-1])
        with pytest.raises(ConfigError, match=r"--teacher-ids .*ids.npy is not what the run began with: put it back"):
            run(again, QUIET)
        np.save(ids, np.arange(V))
        assert run(again, QUIET)["steps"] == 4

    def test_accumulation_is_a_larger_batch(self, scored, tmp_path):
        config = replace(scored.config, teacher=str(scored.root / "hidden.parquet"), max_steps=3)
        found = []
        for name, size, parts in (("whole", 4, 1), ("parts", 1, 4)):
            more = {"batch_size": size, "gradient_accumulation_steps": parts, "output_dir": tmp_path / name}
            run(replace(config, **more), QUIET)
            found.append([r["loss"] for r in read_lines(tmp_path / name / "metrics.jsonl") if "loss" in r])
        assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_text_of_the_record_may_be_named_and_another_not(scored, tmp_path):
    teacher_of(scored, "hidden", data=str(scored.data))
    other = micro_corpus(tmp_path / "other", 40)
    (other / "007.txt").write_text("something else\n")
    with pytest.raises(DataError, match=r"hidden.parquet is of another text than --data .*other \(hash \w+, now \w+\)"):
        teacher_of(scored, "hidden", data=str(other))


def test_results_that_lie_among_the_text_do_not_make_it_another(scored, tmp_path):
    """Here of two records: what either run wrote beside its own was taken for text that the teacher had not read."""
    data = micro_corpus(tmp_path / "data", 40)
    given = ScoreConfig(model=str(scored.root / "teacher"), data=str(data), device="cpu", store="hidden")
    score(replace(given, out=data / "first.parquet", documents=data / "d.jsonl", json=data / "s.json"), QUIET)
    score(replace(given, out=data / "second.parquet", store="topk", keep=KEEP), QUIET)
    student = pretrained(str(scored.root / "student"))
    learned = [replace(scored.config, data=str(data), teacher=str(data / f"{x}.parquet")) for x in ("first", "second")]
    for each in learned:
        assert Teacher.of(each, student, V) is not None
    (data / "more.txt").write_text("more")
    for each in learned:
        with pytest.raises(DataError, match=f"{each.teacher} is of another text than --data"):
            Teacher.of(each, student, V)


def test_a_head_that_is_not_there_ends_a_run_before_it_begins(scored, tmp_path):
    shutil.copy(scored.root / "hidden.parquet", tmp_path / "t.parquet")
    config = replace(scored.config, teacher=str(tmp_path / "t.parquet"), output_dir=tmp_path / "run")
    with pytest.raises(DataError, match=r"hidden.head.safetensors is not there: the head of"):
        run(config, QUIET)
    assert not (tmp_path / "run").exists()


def every_scale_below_zero(path: Path) -> None:
    table = pq.read_table(path)
    below = pc.negate(table["hidden_scale"])
    pq.write_table(table.set_column(table.schema.get_field_index("hidden_scale"), "hidden_scale", below), path)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("kind", "option", "damage", "message"),
    [
        ("fp8", "--teacher", every_scale_below_zero, "expected hidden_scale above 0, got"),
        (
            "topk",
            "--teacher",
            lambda x: (x.unlink(), os.mkfifo(x)),
            "expected a file, got a folder, a device or a pipe",
        ),
        ("hidden", "--teacher-ids", os.mkfifo, "neither .npy nor a JSON list of ids"),
    ],
)
def test_a_damaged_record_is_one_line_of_the_command(scored, tmp_path, capsys, kind, option, damage, message):
    for path in scored.root.glob(f"{kind}.*"):
        shutil.copy(path, tmp_path)
    place = {"--teacher": tmp_path / f"{kind}.parquet", "--teacher-ids": tmp_path / "ids.npy"}
    damage(place[option])
    named = [str(x) for name, path in place.items() if name in ("--teacher", option) for x in (name, path)]
    assert main(["train", *flags(scored.config), *named, "--output-dir", str(tmp_path / "run")]) == 2
    written = capsys.readouterr().err
    assert "Traceback" not in written
    assert [message in line for line in written.splitlines() if line.startswith("logitless: ")] == [True]


def test_another_vocabulary_is_refused_by_name(scored, tmp_path):
    config = replace(scored.config, teacher=str(scored.root / "hidden.parquet"))
    tokenizer = pretrained(str(scored.root / "student"))
    with pytest.raises(OptionError, match=r"has a vocabulary of 259 entries, --model .* of 300: take a student of"):
        Teacher.of(config, tokenizer, 300)
    micro_directory(tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"\u0120x":', 1))
    with pytest.raises(OptionError, match=r"was written with another tokenizer than that of --model .*--teacher-ids"):
        Teacher.of(config, pretrained(str(tmp_path / "other")), V)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("[1, 2]", r"expected a list of 259 ids, one for each entry, got int64 of shape \(2,\)"),
        (json.dumps([259, *range(258)]), r"expected ids in 0\.\.258, got 0\.\.259"),
        (json.dumps([-1, *range(258)]), r"expected ids in 0\.\.258, got -1\.\.257"),
        (json.dumps([0, *range(258)]), "expected each of the teacher's ids once, got some twice"),
        ("{", "neither .npy nor a JSON list of ids"),
        ("[" * DEEP, "neither .npy nor a JSON list of ids"),
    ],
)
def test_ids_that_are_none(scored, tmp_path, ids, message):
    (tmp_path / "ids.json").write_text(ids)
    with pytest.raises(DataError, match=f"ids.json: {message}"):
        teacher_of(scored, "hidden", teacher_ids=str(tmp_path / "ids.json"))


@pytest.mark.parametrize(
    "header", [b"", b"(" * 9, b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,)}\n"]
)
def test_arrays_that_are_none(scored, tmp_path, header):
    (tmp_path / "ids.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(DataError, match=r"ids.npy: neither .npy nor a JSON list of ids"):
        teacher_of(scored, "hidden", teacher_ids=str(tmp_path / "ids.npy"))


def test_ids_are_read_from_an_array(scored, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(V)[::-1])
    teacher = teacher_of(scored, "hidden", teacher_ids=str(tmp_path / "ids.npy"))
    assert teacher.entries is not None
    assert teacher.entries.tolist() == list(range(V))[::-1]


def test_best_entries_do_not_say_what_is_in_the_tail(scored):
    with pytest.raises(OptionError, match="tail-aware: expected a record of hidden states, got one of best entries"):
        teacher_of(scored, "topk", distill_tail="tail-aware")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"distill_loss": "reverse"}, "--distill-loss reverse is of --teacher: give a record, or leave it out"),
        ({"teacher_ids": "x.json"}, "--teacher-ids x.json is of --teacher"),
        ({"teacher": "t", "distill_weight": 0.0}, "--distill-weight must be above 0, at most 1, got 0.0"),
        ({"teacher": "t", "distill_temperature": 9e-4}, "--distill-temperature must be in 0.001..1000, got 0.0009"),
        ({"teacher": "t", "distill_temperature": 1001.0}, "--distill-temperature must be in 0.001..1000, got 1001.0"),
        ({"teacher": "t", "loss_on": "all"}, "--loss-on all is of conversations, not of --teacher: give one"),
        ({"teacher": "t", "loss": "dense"}, "--loss dense: with --teacher no logits are made; leave it out"),
        ({"teacher": "t", "tensor_parallel": 2}, "--tensor-parallel must be 1 with --teacher"),
        ({"teacher": "t", "loss_threshold": "1GB"}, "--loss-threshold: with --teacher no whole logits are made"),
        (
            {"tensor_parallel": 2, "loss_threshold": "1GB"},
            "--loss-threshold: with --tensor-parallel 2 no whole logits are made; leave it out",
        ),
        (
            {"teacher": "t", "distill_tail": "decoupled", "distill_loss": "reverse"},
            "--distill-tail decoupled is of --distill-loss forward: give one of the two",
        ),
        (
            {"teacher": "t", "distill_tail_weight": 3.0},
            "--distill-tail-weight 3 is of --distill-tail tail-aware: give both",
        ),
        ({"teacher": "t", "distill_top_k": 5}, "--distill-top-k 5 is of --distill-tail decoupled or tail-aware"),
        (
            {"teacher": "t", "distill_tail": "tail-aware", "distill_tail_weight": -1.0},
            "--distill-tail-weight must be positive, got -1.0",
        ),
    ],
)
def test_options_without_a_meaning(scored, more, message):
    with pytest.raises(OptionError, match=message):
        replace(scored.config, **more).check()


def test_a_run_with_a_threshold_may_go_on_over_ranks_that_share_matrices(tmp_path):
    """Where nobody can leave the option out: it is the run's."""
    replace(TrainConfig(), tensor_parallel=2, loss_threshold="1GB", resume=tmp_path).check()


def test_best_entries_know_one_temperature(scored):
    with pytest.raises(OptionError, match="--distill-temperature 2: expected 1 for a record of best entries"):
        teacher_of(scored, "topk", distill_temperature=2.0)


def test_how_many_entries_are_set_apart_is_of_hidden_states(scored):
    with pytest.raises(OptionError, match="--distill-top-k 5: expected a record of hidden states, got one of best"):
        teacher_of(scored, "topk", distill_tail="decoupled", distill_top_k=5)
    with pytest.raises(OptionError, match=f"--distill-top-k must be at most {V}, the vocabulary, got {V + 1}"):
        teacher_of(scored, "hidden", distill_tail="decoupled", distill_top_k=V + 1)
    assert teacher_of(scored, "hidden", distill_tail="decoupled", distill_top_k=V) is not None


def test_a_record_of_an_earlier_version(scored, monkeypatch):
    opened = TeacherRecord.__init__

    def forgetful(self, path):
        opened(self, path)
        self.tokenizer = None

    monkeypatch.setattr(TeacherRecord, "__init__", forgetful)
    with pytest.raises(DataError, match="says of no tokenizer, as earlier versions wrote it: score again"):
        teacher_of(scored, "topk")


@pytest.mark.slow
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize(("kind", "sharding"), [("hidden", "ddp"), ("hidden", "fsdp2"), ("topk", "fsdp2")])
def test_two_ranks_have_the_losses_of_one_process(scored, unmeasured, tmp_path, kind, sharding, mixed_precision):
    config = replace(scored.config, teacher=str(scored.root / f"{kind}.parquet"), max_steps=4)
    config = replace(config, mixed_precision=mixed_precision)
    run(replace(config, output_dir=tmp_path / "one"), QUIET)
    two = replace(config, batch_size=1, sharding=sharding)
    status, written = launch(2, "train", *flags(two), "--output-dir", tmp_path / "two")
    assert status == 0, written[-4000:]
    one, shared = (
        [r["loss"] for r in read_lines(tmp_path / name / "metrics.jsonl") if "loss" in r] for name in ("one", "two")
    )
    assert shared == pytest.approx(one, rel=1e-4 if mixed_precision == "no" else 2e-3)
