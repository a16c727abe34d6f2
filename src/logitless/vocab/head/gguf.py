"""The block formats of GGUF files: how a block's bytes are its numbers, bit for bit as `gguf.quants` has them.

Names, and the order of bits, are ggml's: d and m are a block's scale and least number in fp16, qs the low four bits
of two runs of numbers, qh the bits above these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, DtypeError, ShapeError
from ..dtypes import dtype_of

HEADS = ("output.weight", "token_embd.weight")  # a tied head is stored as the embedding alone


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of `numbers` in `nbytes` bytes each, whole blocks to a row."""

    name: str
    numbers: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]  # (n, nbytes) uint8 -> n blocks in fp32

    def decoded(self, parts: tuple[Tensor, ...], rows: slice | Tensor) -> Tensor:
        blocks = parts[0][rows]
        return self.decode(blocks.reshape(-1, self.nbytes)).view(blocks.shape[0], self.width(blocks))

    def width(self, blocks: Tensor) -> int:
        """How many numbers a row of blocks (V, bytes) holds."""
        return blocks.shape[1] // self.nbytes * self.numbers


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block, (n, 1) fp32."""
    pair = blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format)  # it may begin at an odd byte
    return pair.view(torch.float16).float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """The low and then the high four bits of each run of bytes: (n, bytes) -> (n, 2 · bytes / run, run)."""
    x = packed.unflatten(1, (-1, run))
    return torch.stack((x & 15, x >> 4), 2).flatten(1, 2)


def _bits(packed: Tensor, width: int) -> Tensor:
    """Every `width` bits of each byte from the lowest on: (n, bytes) -> (n, 8 / width, bytes)."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed[:, None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8) * _half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:], 16).flatten(1).view(torch.int8) - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 4:], 16).flatten(1) * _half(blocks, 0)).add_(_half(blocks, 2))


def _q5(blocks: Tensor, at: int) -> Tensor:
    """Five bits each: the highest ones first, four bytes of them."""
    high = _bits(blocks[:, at : at + 4], 1).mT.flatten(1)
    return _nibbles(blocks[:, at + 4 :], 16).flatten(1) | (high << 4)


def _q5_0(blocks: Tensor) -> Tensor:
    return (_q5(blocks, 2).view(torch.int8) - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    return (_q5(blocks, 4) * _half(blocks, 0)).add_(_half(blocks, 2))


def _scaled_k(blocks: Tensor, q: Tensor) -> Tensor:
    """What Q4_K and Q5_K make of the integers q (n, 8, 32); scales and least numbers have six bits, in 12 bytes."""
    low, least, high = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    leasts = torch.cat((least & 63, (high >> 4) | ((least >> 2) & 48)), 1)
    return (q * (scales * _half(blocks, 0))[..., None]).sub_((leasts * _half(blocks, 2))[..., None])


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_k(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    return _scaled_k(blocks, _nibbles(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48], 1) << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128], 64).flatten(1)
    high = _bits(blocks[:, 128:192].reshape(-1, 32), 2).view(blocks.shape[0], -1)
    q = ((low | (high << 4)).view(torch.int8) - 32).unflatten(1, (16, 16))
    return q * (blocks[:, 192:208].view(torch.int8) * _half(blocks, 208))[..., None]


FORMATS = {
    x.name: x
    for x in (
        BlockFormat("Q4_0", 32, 18, _q4_0),
        BlockFormat("Q4_1", 32, 20, _q4_1),
        BlockFormat("Q5_0", 32, 22, _q5_0),
        BlockFormat("Q5_1", 32, 24, _q5_1),
        BlockFormat("Q8_0", 32, 34, _q8_0),
        BlockFormat("Q4_K", 256, 144, _q4_k),
        BlockFormat("Q5_K", 256, 176, _q5_k),
        BlockFormat("Q6_K", 256, 210, _q6_k),
    )
}


def block_format(name: str) -> BlockFormat:
    """The format of this name. Raises ConfigError."""
    if name not in FORMATS:
        raise ConfigError(f"QuantisedWeight: expected one of {', '.join(FORMATS)}, got blocks of {name}; dequantise it")
    return FORMATS[name]


def check_blocks(blocks: Tensor, form: BlockFormat) -> None:
    """Raise where a tensor does not hold rows of whole blocks."""
    if not isinstance(blocks, Tensor) or blocks.dtype != torch.uint8:
        got = dtype_of(blocks)
        raise DtypeError(f"QuantisedWeight: expected {form.name}'s blocks as bytes (torch.uint8), got {got}")
    if blocks.dim() != 2 or blocks.shape[1] == 0 or blocks.shape[1] % form.nbytes:
        raise ShapeError(
            f"QuantisedWeight: expected rows of whole {form.name} blocks of {form.nbytes} bytes, got "
            f"{tuple(blocks.shape)}"
        )


def read_blocks(path: str, name: str | None) -> tuple[Tensor, str]:
    """(blocks, format) of a GGUF file's head or of the tensor `name`, mapped from the file. Raises ConfigError."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError("QuantisedWeight: reading GGUF files needs the package gguf: pip install gguf") from None
    try:
        reader: Any = GGUFReader(path, "c")  # written to, a page would become this process's own
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"QuantisedWeight: {path} cannot be read as a GGUF file: {said}") from None
    found = {x.name: x for x in reader.tensors}
    split = reader.get_field("split.count")
    parts = 1 if split is None else split.contents()
    heads = HEADS[:1] if parts > 1 else HEADS  # another part may hold a head beside this one's embedding
    wanted = next((x for x in ((name,) if name else heads) if x in found), None)
    if wanted is None:
        hint = f", in that of the {parts} parts of this file that holds it" if parts > 1 else ""
        raise ConfigError(f"QuantisedWeight: {path} has no tensor {name or ' or '.join(heads)}; name the head's{hint}")
    kind = found[wanted].tensor_type.name
    if kind in ("F32", "F16", "BF16", "F64"):
        raise ConfigError(
            f"QuantisedWeight: {wanted} of {path} is {kind}, not quantised; pass it to LMHead as a tensor"
        )
    block_format(kind)
    return torch.from_numpy(found[wanted].data), kind
