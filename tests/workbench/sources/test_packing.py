"""Packed rows are full, restart at each document, and give what the documents alone give."""

import numpy as np
import pytest
import torch

from logitless import install
from logitless.errors import DataError, LabelError
from logitless.models.instances import checkpoint_layers
from logitless.workbench.sources.packing import IGNORED, PackedRows, Stream, check_ids, collate, hold_out
from tests.support.workbench.micro import micro_model


def docs(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 259, n).astype(np.uint32) for n in lengths]


def test_rows_are_full_and_restart():
    first, second = docs(3, 7)
    rows = PackedRows(Stream.of([first, second]), 4)
    assert len(rows) == 2  # ten tokens: the last two do not fill a row
    assert rows[0]["input_ids"].tolist() == [*first, second[0]]
    assert rows[0]["position_ids"].tolist() == [0, 1, 2, 0]
    assert rows[0]["labels"].tolist() == [IGNORED, first[1], first[2], IGNORED]
    assert rows[1]["input_ids"].tolist() == second[1:5].tolist()
    assert rows[1]["position_ids"].tolist() == [0, 1, 2, 3]
    assert rows[1]["labels"].tolist() == [IGNORED, *second[2:5]]
    assert rows.targets() == 5
    with pytest.raises(IndexError):
        rows[2]


def test_tokens_that_the_loss_is_of_are_counted():
    for lengths in ((5, 1, 13, 9, 2, 18), (1,) * 9, (2, 3, 2, 3)):
        whole = Stream.of(docs(*lengths))
        said = np.arange(len(whole.ids)) % 3 > 0
        for stream in (whole, Stream(whole.ids, whole.starts, said)):
            rows = PackedRows(stream, 4)
            assert rows.targets() == sum(int((rows[i]["labels"] != IGNORED).sum()) for i in range(len(rows)))


@pytest.mark.parametrize("taught", [False, True])
def test_rows_without_a_label_fill_what_ranks_share(taught):
    whole = Stream.of(docs(5, 1, 13, 9))
    places = np.arange(len(whole.ids))
    rows = PackedRows(Stream(whole.ids, whole.starts, places % 3 > 0, places) if taught else whole, 4)
    assert len(rows.filled(7)) == len(rows) == 7
    filled = rows.filled(3)
    assert len(filled) == 9
    assert filled.targets() == rows.targets()
    for row in range(9):
        found = filled[row]
        assert all(torch.equal(found[name], x) for name, x in (rows[row] if row < 7 else {}).items())
        assert row < 7 or (found["labels"] == IGNORED).all()
    assert not taught or filled.stream.rows.tolist() == [*range(28), *[0] * 8]


@pytest.mark.parametrize("loss", ["dense", "logitless"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_unpacked(loss, checkpointing):
    """Loss and every gradient of packed rows are those of the documents by themselves, one at a time, dense."""
    length, lengths = 24, (5, 1, 13, 9, 2, 18)
    stream = Stream.of(docs(*lengths))
    rows = PackedRows(stream, length)
    batch = collate([rows[i] for i in range(len(rows))])
    assert set(batch) == {"input_ids", "position_ids", "labels"}  # a mask of ones would switch the packed mask off
    count = int((batch["labels"][:, 1:] != IGNORED).sum())

    alone = micro_model().double()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows)):
        part = stream.cut(row * length, (row + 1) * length)
        for begin, end in zip(part.starts, [*part.starts[1:], length], strict=True):
            if end - begin > 1:
                ids = torch.from_numpy(part.ids[begin:end].astype(np.int64))[None]
                logits = alone(ids, use_cache=False).logits
                total = total + torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    (total / count).backward()

    packed = micro_model().double().train()
    if checkpointing:
        checkpoint_layers(packed)
    install(packed, loss=loss, memory_budget=2**12)
    found = packed(**batch, num_items_in_batch=count).loss
    found.backward()
    assert found.item() == pytest.approx((total / count).item(), rel=1e-6)
    for name, parameter in packed.named_parameters():
        exact = alone.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()), msg=name)


def test_documents_do_not_see_each_other():
    """The loss of the second document is the same whatever the first one says."""
    model = micro_model()
    install(model, memory_budget=2**20)
    second = docs(1, 12)[1]
    losses = []
    for seed in (1, 2):
        first = np.random.default_rng(seed).integers(0, 259, 12).astype(np.uint32)
        batch = collate([PackedRows(Stream.of([first, second]), 24)[0]])
        batch["labels"][:, :12] = IGNORED
        losses.append(model(**batch).loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_every_twentieth_document_is_held_out():
    texts = docs(*([10] * 60))
    kept, held = hold_out(texts, 16)
    assert len(held.ids) == 30
    assert len(kept.ids) == 570
    assert held.ids[:10].tolist() == texts[10].tolist()


def test_the_tail_of_one_document_is_held_out():
    (text,) = docs(100)
    kept, held = hold_out([text], 16)
    assert kept.ids.tolist() == text[:84].tolist()
    assert held.ids.tolist() == text[84:].tolist()
    assert len(hold_out(docs(1000), 16)[1].ids) == 50  # a twentieth, where that is more than a sequence


def test_a_corpus_shorter_than_its_sequences():
    with pytest.raises(DataError, match=r"31 tokens, two sequences .* need 32: give more text or lower"):
        hold_out(docs(31), 16)


def test_ids_outside_the_vocabulary():
    with pytest.raises(LabelError, match="ids up to 9, the model's vocabulary ends at 8"):
        check_ids(Stream.of([np.array([1, 9], dtype=np.uint32)]), 9)
