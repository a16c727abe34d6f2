"""From a teacher's text to a student's loss through the file: value and gradient against dense float64."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import logitless
from logitless.errors import DataError
from logitless.sample.targets import IGNORED, TeacherTargets, read_targets
from logitless.workbench.scoring.run import run
from tests.support.workbench.micro import micro_directory, micro_model
from tests.workbench.scoring.conftest import config, corpus

KEEP = 6


def loss_of(student, targets: TeacherTargets, reduction: str = "sum") -> torch.Tensor:
    batch = {"input_ids": targets.input_ids, "attention_mask": targets.attention_mask}
    return logitless.token_loss(
        lambda s, w: logitless.losses.soft_targets(s.candidate_logits, s.logsumexp, w, tail_logprob=s.tail_logprob),
        logitless.hidden_states(student, batch),
        logitless.LMHead.of(student),
        targets.labels,
        want=("logsumexp", "tail_logprob"),
        candidates=targets.ids,
        inputs=(targets.weights,),
        reduction=reduction,
    )


def dense_loss(student, teacher, targets: TeacherTargets) -> torch.Tensor:
    """Cross-entropy of the teacher's KEEP best and one bucket of all others with the student's, over a text."""
    counts = targets.labels != IGNORED
    ids, at = targets.input_ids, targets.ids[counts]
    with torch.no_grad():
        p = teacher(ids[None]).logits[0].softmax(-1)[counts]
    best = p.gather(-1, at)
    torch.testing.assert_close(best, p.topk(KEEP).values, rtol=1e-5, atol=0.0)
    p = student(ids[None]).logits[0].softmax(-1)[counts]
    mine = p.gather(-1, at)
    return -(best * mine.log()).sum() - ((1 - best.sum(-1)) * (1 - mine.sum(-1)).log()).sum()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("bos", "around"), [("no", None), ("yes", None), ("auto", "<pad> <s> <pad> $A")])
def test_loss_and_gradient_are_those_of_the_same_teacher_cut_off_alike(micro, tmp_path, bos, around):
    out = tmp_path / "t.parquet"
    shutil.copytree(micro, tmp_path / "model")
    micro_directory(tmp_path / "model", around)
    run(config(tmp_path / "model", corpus(tmp_path / "a.jsonl", 14), out, keep=KEEP, bos=bos, context_length=64))
    teacher = AutoModelForCausalLM.from_pretrained(micro).double().eval()
    student = micro_model(hidden_size=48, initializer_range=0.3).double().eval()
    found = [t for t in read_targets(out) if len(t.labels) <= 64]
    assert len(found) >= 4
    exact = sum(dense_loss(student, teacher, t) for t in found)
    exact.backward()
    wanted = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    batch = TeacherTargets.stack(found)
    assert batch.attention_mask.sum(-1).tolist() == [len(t.input_ids) for t in found]
    assert batch.input_ids.shape == batch.labels.shape == batch.ids.shape[:2]
    loss = loss_of(student, batch)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    loss.backward()
    for name, p in student.named_parameters():
        torch.testing.assert_close(
            p.grad, wanted[name], rtol=1e-4, atol=1e-5 * wanted[name].abs().max().item(), msg=name
        )
    # ... and nothing but the tail's bucket keeps it so
    wrong = TeacherTargets(
        batch.input_ids, batch.labels, batch.ids, batch.weights / batch.weights.sum(-1, keepdim=True)
    )
    assert abs(loss_of(student, wrong).item() / exact.item() - 1) > 1e-2


def test_a_document_is_whole_however_its_rows_are_grouped(micro, tmp_path, monkeypatch, small_blocks):
    data = corpus(tmp_path / "a.jsonl", 12)  # document 7 is longer than a block
    run(config(micro, data, tmp_path / "t.parquet"))
    found = list(read_targets(tmp_path / "t.parquet"))
    table = pq.read_table(tmp_path / "t.parquet")
    for size in (7, 10**6):
        pq.write_table(table, tmp_path / "u.parquet", row_group_size=size)
        again = list(read_targets(tmp_path / "u.parquet"))
        assert len(again) == len(found)
        for a, b in zip(found, again, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
    rows = table.to_pylist()
    rows[len(rows) // 2 - 1]["logsumexp"] = None  # of a token that is no first one: its document is passed over
    assert rows[len(rows) // 2 - 1]["position"] > 0
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), tmp_path / "v.parquet")
    assert len(list(read_targets(tmp_path / "v.parquet"))) == len(found) - 1
    tokens = {row["document"]: [] for row in table.to_pylist()}
    for row in table.to_pylist():
        tokens[row["document"]].append(row["token"])
    whole = [ids for ids in tokens.values() if len(ids) > 1]
    assert [[*t.input_ids[:1].tolist(), *t.labels.tolist()] for t in found] == whole
    assert all((t.weights > 0).all() and (t.weights.sum(-1) < 1).all() for t in found)


def test_padding_has_no_weight_and_no_label():
    one = TeacherTargets(torch.tensor([5]), torch.tensor([6]), torch.tensor([[6, 7]]), torch.tensor([[0.5, 0.25]]))
    two = TeacherTargets(*(torch.cat([x, x]) for x in vars(one).values()))
    batch = TeacherTargets.stack([one, two])
    assert batch.labels.tolist() == [[6, IGNORED], [6, 6]]
    assert batch.input_ids.tolist() == [[5, 0], [5, 5]]
    assert batch.attention_mask.tolist() == [[1, 0], [1, 1]]
    assert batch.attention_mask.dtype == torch.int64
    assert batch.ids[0, 1].tolist() == [0, 0]
    assert batch.weights[0, 1].tolist() == [0.0, 0.0]


def test_files_that_are_no_record(micro, tmp_path):
    pq.write_table(pa.table({"token": [1]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match="--keep 1 or more or --store hidden, got no column document, position, logsumexp"
    ):
        list(read_targets(tmp_path / "a.parquet"))
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(read_targets(tmp_path / "b.parquet"))
    run(config(micro, corpus(tmp_path / "a.jsonl", 2), tmp_path / "t.parquet", keep=0))
    with pytest.raises(DataError, match="got no column topk_ids"):
        list(read_targets(tmp_path / "t.parquet"))
