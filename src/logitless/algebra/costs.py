"""What a call costs: GEMMs, slice sizes and bytes. The runtime, `explain` and the planner read these formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .online_softmax import SECOND_LOOK
from .stats import STATISTICS, bases_of, best_entries, looks_twice, sums_of

MIB = 1 << 20
DEFAULT_BUDGET = 256 * MIB
GPU_BUDGET = 1024 * MIB  # the default where it is at most GPU_SHARE of a device's memory
GPU_SHARE = 1 / 64
COPIED = 2 / 3  # of a budget, that a head's copy in the dtype that it multiplies in may take
CPU_TILE = 1 << 20  # elements of a slice's logits that stay in a CPU's caches
CPU_CONVERTED = 1 << 21  # numbers of a head that a CPU converts at a time: its caches hold them for the product
CPU_WHOLE_ROWS = 256, 1024  # tokens whose whole rows are kept at a time on a CPU, at least and at most
VECTOR = 16  # tokens that a CPU's operations on logits in columns take at once
BLOCK = 32  # entries of logits in columns that are added up at a time: they stay in a first-level cache meanwhile
READ_IN_COLUMNS = 136, 512  # tokens that a CPU multiplies faster so, at least and at most: see `read_in_columns`
WHOLE_WIDTH = 2048  # entries at a time of rows that are kept whole
STREAM_TOKENS = {"cpu": 2048, "gpu": 4096}
WHOLE_TENSORS = 12  # (batch, steps, vocabulary) tensors of a rollout over the whole vocabulary that live at once
FUSED_WIDTH = 8192  # entries of a row that a GPU's programs read twice, so that caches hold all that they read
SORTING = 4  # of a token's best entries at once, while they are sorted: in order and out of it, and what is joined
LEAST_WAITING = 32  # of a token's entries, that wait to be sorted among its best
SLICE_SHARE = 48  # bytes for each token and slice while a sparse backward decides: sums, order, ids
ALIGNED = 16  # entries, to which a kernel's slices are padded
DEQUANTISED = 3  # hidden widths of a slice of a quantised head: its rows, and what decoding them takes
GEMM_ROWS, GEMM_COLUMNS = 128, 256  # of a product, that a processor of a GPU computes as one block
REWRITTEN = 550  # flop for whose time a number of the head's gradient is read and written once more
READING = {"cpu": 16, "gpu": 256}  # tokens whose product computes as long as it reads the weight
QUACK_TILE = 128  # tokens and entries of the blocks of QuACK's products, which have to divide a chunk
INT32 = 2**31  # numbers of a chunk, whose offsets it counts in 32 bits
ACCUMULATES = frozenset({"p", "plogp", "pD", "p2", "q"})  # bases whose product with W accumulates during the pass


@dataclass(frozen=True)
class Price:
    """How a call is paid for. `gemms` counts products of 2·N·H·V flop, forward and backward together."""

    method: str  # "values" | "one-hot" | "basis" | "in-forward" | "recompute" | "kept": over sampling masks
    gemms: int
    bases: tuple[str, ...] = ()  # whose products with W accumulate: of "basis", and of a loss that keeps no logits
    materialised: bool = False  # a chunk's slices of logits all stay: token_loss, and a second look at them
    looks_again: bool = False  # a second look makes the products again, which counts among `gemms`

    @property
    def skips(self) -> bool:
        """Whether its backward has slices, some of which a sparse one could do without."""
        return self.method in ("in-forward", "recompute")

    @property
    def looks(self) -> int:
        """How often the products of the hidden states and the head are made, and a reference's beside them."""
        return 1 + (self.method == "recompute") + self.looks_again


def price_of(
    want: tuple[str, ...],
    *,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    loss: bool = False,
    one_hots: bool = False,
    softcap: bool = False,
    reference_products: int = 1,
    half_products: bool = False,
) -> Price:
    """The cheapest way to `want` with the gradients that are needed.

    `bias_grad`: the bias, or an adapter of the head, needs the gradient at all entries, with no product of hidden's
    width; `loss`: the loss is known in the forward pass; `one_hots`: top-k or candidate logits are wanted as well;
    `softcap`: the head has one, so that a constant coefficient is no longer constant in h·Wᵀ; `reference_products`: 0
    where a reference's logits exist already; `half_products`: bases are rounded to 16 bits before their products, of
    which p and q, one by one, lose what tells them apart.
    """
    sums = sums_of(want)
    products = 1 + reference_products * ("ref" in sums)
    whole = looks_twice(sums)
    if not (hidden_grad or weight_grad or bias_grad):
        return Price("values", products, materialised=whole)
    backward = int(hidden_grad) + int(weight_grad)
    bases = bases_of(want)
    everywhere = bool(bases) or (softcap and "zsum" in sums)
    if loss:
        return Price("in-forward", products + backward * everywhere, materialised=everywhere or whole)
    if not one_hots and all(STATISTICS[name].coefficients is None for name in want):
        return Price("values", products, materialised=whole)
    if not everywhere:
        return Price("one-hot", products, materialised=whole)
    accumulable = bases <= ACCUMULATES and len(bases) <= 2 and not (softcap and "zsum" in sums)
    if accumulable and not weight_grad and not bias_grad and not (half_products and "q" in bases):
        return Price("basis", products + len(bases), tuple(sorted(bases)), materialised=whole)
    return Price("recompute", 2 * products + backward, materialised=whole)


@dataclass(frozen=True)
class Slices:
    """Tokens and vocabulary entries that are computed at a time, and the bytes of the buffers this takes.

    copied: bytes among these of the heads in the dtype that they multiply in, converted once a call; 0 where a slice is
    converted whenever it is read. at_once: how many entries a CPU converts together, where one product alone needs
    them; else 0. multiplies_few: whether few tokens are multiplied by the head's rows as they lie. in_products: whether
    the kernel of the products adds up its logits, so that there is no slice of these unless it has stored them for
    backward, too.
    """

    tokens: int
    width: int
    nbytes: int
    copied: int = 0
    at_once: int = 0
    multiplies_few: bool = False
    in_products: bool = False
    stored: bool = False


def looking_again_is_cheaper(kept: int, streamed: int, device: str) -> bool:
    """Whether a second look costs less by products of its own than at slices that stayed for it.

    kept: the tokens at a time of whole rows that stay, for each of which the weight is read once; streamed: those of
    slices that do not, where it is read twice and everything computed twice.
    """
    reading = READING["cpu" if device == "cpu" else "gpu"]
    return 2 * (1 + reading / streamed) < 1 + reading / kept


def gpu_budget(memory: int) -> int:
    """The bytes of slices that a call gets by default on a GPU with so many bytes of memory."""
    return max(DEFAULT_BUDGET, min(GPU_BUDGET, int(memory * GPU_SHARE)))


def copied(budget: int, copies: int) -> int:
    """`copies` bytes where they leave room for slices in the budget, else 0."""
    return copies if copies <= COPIED * budget else 0


def tiles_of(want: tuple[str, ...], *, softcap: bool = False, top_k: int = 0) -> int:
    """How many (tokens, width) buffers of a slice live at once, forward or backward."""
    sums = sums_of(want)
    tiles = 3 + bool(top_k or sums & {"argmax", "r"})  # logits, differences, weights; squares or sorted rows
    tiles += 3 * ("ref" in sums) + 2 * softcap  # the reference's logits, the gap and its products; tanh's derivative
    tiles += 2 * ("tail" in sums)
    tiles += 7 * looks_twice(sums) + 2 * ("jsd" in sums)  # probabilities, their ratio, and what shares are made of
    kinds = (sums & {"kl_mixture", "reverse_kl_mixture"}, sums & {"excess"}, sums & {"ahead"})
    return tiles + 6 * max(0, sum(map(bool, kinds)) - 1)  # which all live at once


def waiting_entries(top_k: int) -> int:
    """How many of a token's entries wait to be sorted among its best, of as many as are found."""
    return max(LEAST_WAITING, 2 * top_k)


def best_bytes(top_k: int, itemsize: int) -> int:
    """Bytes of a token's best entries: the logits and ids of those found and those that wait, as sorting them takes.

    top_k: as `best_entries`, 0 where none are looked for.
    """
    return SORTING * (itemsize + 8) * (top_k + waiting_entries(top_k)) if top_k else 0


def slices_of(
    n_tokens: int,
    vocab_size: int,
    *,
    budget: int,
    device: str,
    itemsize: int = 4,
    heads: int = 1,
    tiles: int = 3,
    each: int = 0,
    converted: int = 0,
    whole: bool = False,
    wide: bool = False,
    together: int = 0,
) -> Slices:
    """Slice sizes that keep to `budget` bytes, down to one row and 64 entries or whole rows of one token.

    heads: 2 with a reference; tiles: as `tiles_of`; each: bytes of a token beside its slices, as `best_bytes`;
    converted: the hidden size where a slice of W is converted to another dtype; whole: a chunk's whole rows are kept;
    wide: in as few slices as the budget and caches leave, for few tokens; together: how many tokens' whole rows are to
    be kept at once, where the budget has room for them.
    """
    gpu = device != "cpu"
    room = max(1, budget // itemsize)
    longest = vocab_size if gpu or not converted else max(BLOCK, CPU_CONVERTED // converted)
    if whole:
        width = min(vocab_size, WHOLE_WIDTH, max(1, room // (4 * (tiles + converted))))
        beside = -(-each // itemsize)
        row = heads * vocab_size + tiles * width + beside
        most = max(1, (room - converted * width) // row)
        rows = most if gpu else min(most, cpu_rows(heads * vocab_size, room))
        tokens = _even(n_tokens, rows) if gpu else even_blocks(n_tokens, rows, VECTOR)
        tokens = max(tokens, min(most, together))
        at_once = 0 if gpu or not converted or not wide else min(width, longest)
        if wide:
            spare = (room - tokens * row - converted * width) // (tiles * tokens + converted * gpu)
            most = vocab_size if gpu else min(vocab_size, max(width, CPU_TILE // tokens))
            width = min(most, width + max(0, spare))
            row = heads * vocab_size + tiles * width + beside
        return Slices(tokens, width, itemsize * (tokens * row + converted * (at_once or width)), at_once=at_once)
    most = STREAM_TOKENS["gpu"] if gpu else min(STREAM_TOKENS["cpu"], CPU_TILE // 64)
    tokens = _even(n_tokens, min(most, max(1, budget // (64 * itemsize * tiles + each))))
    room = max(1, (budget - each * tokens) // itemsize)
    tile = room // tiles if gpu else min(CPU_TILE, room // tiles)
    width = max(1, min(vocab_size, longest, tile // tokens, room // (tiles * tokens + converted)))
    if not gpu and read_in_columns(tokens) and BLOCK <= width < vocab_size:
        width = width // BLOCK * BLOCK
    return Slices(tokens, width, itemsize * width * (tiles * tokens + converted) + each * tokens)


def read_in_columns(tokens: int) -> bool:
    """Whether a CPU's threads read logits that do not stay in columns: fewer are transposed, more as fast in rows.

    Only whole halves of vectors of tokens gain by it. docs/decisions/0044
    """
    least, most = READ_IN_COLUMNS
    return least <= tokens <= most and 2 * tokens % VECTOR == 0


def cpu_rows(row: int, room: int) -> int:
    """How many tokens' whole rows a CPU keeps at a time: in half of the room. More rewrite the head's gradient less."""
    least, most = CPU_WHOLE_ROWS
    return max(least, min(most, room // (2 * row)))


def fused_slices_of(
    n_tokens: int,
    vocab_size: int,
    *,
    budget: int,
    itemsize: int = 4,
    heads: int = 1,
    bases: int = 0,
    beside: int = 0,
    converted: int = 0,
    whole: bool = False,
    streamed: int = 0,
    processors: int = 0,
    hidden: int = 1,
    together: int = 0,
) -> Slices:
    """Slice sizes where one kernel reads the products in place, so that few other buffers of a slice are needed.

    bases: products that accumulate on the way, whose weights lie over the slice, a second one's beside it; beside: the
    bytes of a weight where one basis' lie beside the slice, written by a kernel that takes rows of any length;
    streamed: bytes of a slice that is not kept, such as fit a cache, 0 for as many as the budget; processors: of the
    GPU, where sizes are to fill it, 0 elsewhere; hidden: the hidden size; the rest as `slices_of`.
    """
    room = max(1, budget // itemsize)
    tiles = heads + max(0, bases - 1)
    if whole:
        width = vocab_size
        if converted:
            width = min(vocab_size, max(ALIGNED, room // (4 * converted) // ALIGNED * ALIGNED))
        row = tiles * -(-vocab_size // width) * aligned(width)
        most = max(1, (room - converted * width) // row)
        tokens = (
            _tokens_in_waves(n_tokens, most, hidden, processors)
            if processors
            else even_blocks(n_tokens, most, GEMM_ROWS)
        )
        tokens = max(tokens, min(most, together))
        return Slices(tokens, width, itemsize * (tokens * row + converted * width))
    each = itemsize * tiles + beside  # bytes of an entry
    tokens = even_blocks(n_tokens, min(STREAM_TOKENS["gpu"], max(1, budget // each // 64)), GEMM_ROWS)
    most = min(vocab_size, FUSED_WIDTH // heads if bases and not beside else vocab_size)
    if streamed:
        most = min(most, max(ALIGNED, streamed // (itemsize * tokens)))
    width = max(1, min(most, budget // (each * tokens + itemsize * converted)))
    whole_rows = width == vocab_size and each * tokens * aligned(width) + itemsize * converted * width <= budget
    width = width if width < ALIGNED or whole_rows else width // ALIGNED * ALIGNED
    if processors and (beside or not bases):
        width = _width_in_waves(tokens, width, vocab_size, processors)
    return Slices(tokens, width, each * tokens * aligned(width) + itemsize * converted * width)


def sparse_slices(slices: Slices, width: int, vocab_size: int, hidden_size: int, itemsize: int) -> Slices:
    """`slices` of at most `width` entries, with what a sparse backward takes beside them.

    That is three gathered rows (of hidden states, scaled or not, and of their gradient) and SLICE_SHARE for each slice.
    """
    width = min(width, slices.width)
    each = 3 * itemsize * hidden_size + SLICE_SHARE * -(-vocab_size // width)
    return replace(slices, width=width, nbytes=slices.nbytes + slices.tokens * each)


def quack_slices(n_tokens: int, vocab_size: int, hidden_size: int, *, budget: int) -> Slices:
    """The chunks of QuACK's loss: whole rows of so many tokens that they keep to `budget`, down to one block of tokens.

    For each token that is a row of exponentials in bf16, for each block of entries two numbers in fp32 and twice two in
    bf16, two copies of its hidden states, and three numbers.
    """
    each = 2 * vocab_size + 16 * -(-vocab_size // QUACK_TILE) + 4 * hidden_size + 12
    most = min(budget // each, (INT32 - 1) // vocab_size)
    tokens = _even(n_tokens, max(QUACK_TILE, most // QUACK_TILE * QUACK_TILE))
    tokens = -(-tokens // QUACK_TILE) * QUACK_TILE
    return Slices(tokens, vocab_size, tokens * each)


def aligned(width: int) -> int:
    """The entries that a row of a kernel's slice takes."""
    return -(-width // ALIGNED) * ALIGNED


def even_blocks(n_tokens: int, most: int, block: int) -> int:
    """`_even`, in whole blocks of tokens where there are several."""
    tokens = _even(n_tokens, most)
    blocks = -(-tokens // block) * block
    return blocks if tokens > block and blocks <= min(most, n_tokens) else tokens


def waves(rows: int, columns: int, processors: int) -> int:
    """How often all of a GPU's processors compute a block each of a product, the last time mostly not all."""
    blocks = -(-rows // GEMM_ROWS) * -(-columns // GEMM_COLUMNS)
    return -(-blocks // processors)


def _tokens_in_waves(n_tokens: int, most: int, hidden: int, processors: int) -> int:
    """The chunk of at most `most` tokens whose two products of backward take the least time together.

    That of the hidden states has few blocks, so they should fill the processors; that of the head is added to what the
    chunks before gave, so the fewer of them the better. Both times are over the vocabulary's.
    """

    def cost(tokens: int) -> int:
        chunks, last = divmod(n_tokens, tokens)
        filled = chunks * waves(tokens, hidden, processors) + (waves(last, hidden, processors) if last else 0)
        return filled * processors * 2 * GEMM_ROWS * GEMM_COLUMNS + (chunks + bool(last)) * REWRITTEN * hidden

    sizes = range(GEMM_ROWS, min(most, n_tokens) + 1, GEMM_ROWS)
    return min(reversed(sizes), key=cost) if sizes and n_tokens > most else max(1, min(n_tokens, most))


def _width_in_waves(tokens: int, most: int, vocab_size: int, processors: int) -> int:
    """The width of at most `most` entries, three quarters of them at least, whose slices take the fewest waves.

    What a slice costs beside its product's waves is about a quarter of one.
    """

    def cost(width: int) -> float:
        slices, last = divmod(vocab_size, width)
        filled = slices * waves(tokens, width, processors) + (waves(tokens, last, processors) if last else 0)
        return filled + (slices + bool(last)) / 4

    sizes = range(GEMM_COLUMNS * -(-3 * most // (4 * GEMM_COLUMNS)), most + 1, GEMM_COLUMNS)
    return min((most, *reversed(sizes)), key=cost) if most < vocab_size else most


def _even(n_tokens: int, most: int) -> int:
    """Chunks of at most `most` tokens, about equal in size."""
    chunks = max(1, -(-n_tokens // most))
    return max(1, -(-n_tokens // chunks))


def logits_bytes(n_tokens: int, vocab_size: int, itemsize: int) -> int:
    """Bytes of a (tokens, vocabulary) tensor."""
    return n_tokens * vocab_size * itemsize


def dense_loss_bytes(n_tokens: int, vocab_size: int, itemsize: int) -> int:
    """Peak bytes of dense logits with cross-entropy: the logits, their fp32 copy and its log-softmax or gradient."""
    parts = dense_parts(n_tokens, vocab_size, itemsize)
    return parts["logits"] + parts["logits in fp32"] + parts["log-softmax"]


def gemm_flop(n_tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Flop of one product of a (tokens, hidden) and a (hidden, vocabulary) matrix."""
    return 2 * n_tokens * hidden_size * vocab_size


def low_rank_flop(
    price: Price, n_tokens: int, vocab_size: int, *, rank: int, reference_rank: int = 0, backward: int = 0
) -> int:
    """Flop of a call's products with adapters' (tokens, rank) and (vocabulary, rank) factors.

    backward: how many of the two factors get gradients.
    """
    formed = backward if price.materialised else len(price.bases)
    after = {"in-forward": formed, "recompute": backward, "basis": len(price.bases)}.get(price.method, 0)
    own = (price.looks + after) * gemm_flop(n_tokens, rank, vocab_size)
    return own + price.looks * gemm_flop(n_tokens, reference_rank, vocab_size)


def dense_parts(n_tokens: int, vocab_size: int, itemsize: int, softcap: bool = False) -> dict[str, int]:
    """Bytes of each (tokens, vocabulary) tensor that dense cross-entropy makes, forward and backward.

    The first three are alive together in the forward pass (`dense_loss_bytes`); the log-softmax and the two
    gradients in the backward pass, and the softcap's tanh in both.
    """
    wide = logits_bytes(n_tokens, vocab_size, max(itemsize, 4))
    return {
        "logits": logits_bytes(n_tokens, vocab_size, itemsize),
        "logits in fp32": 0 if itemsize >= 4 else wide,
        "log-softmax": wide,
        "gradient of the log-softmax": wide,
        "gradient of the logits": wide,
        "softcap's tanh": logits_bytes(n_tokens, vocab_size, itemsize) if softcap else 0,
    }


def weight_gradient_bytes(vocab_size: int, hidden_size: int, itemsize: int) -> tuple[int, int]:
    """(the fp32 sum of the head's gradient, its copy in the weight's dtype)."""
    wide = logits_bytes(hidden_size, vocab_size, max(itemsize, 4))
    return wide, 0 if itemsize >= 4 else logits_bytes(hidden_size, vocab_size, itemsize)


def whole_rollout_bytes(batch: int, steps: int, vocab_size: int, *, prompt: int, position_bytes: int) -> int:
    """Peak bytes of `steps` soft tokens over the whole vocabulary, as `workbench.grade.legacy` keeps them, and of the
    activations of as many passes over whole prefixes, `position_bytes` for each position that a pass reads."""
    read = sum(prompt + t for t in range(steps))
    return WHOLE_TENSORS * logits_bytes(batch * steps, vocab_size, 4) + batch * read * position_bytes


@dataclass(frozen=True)
class Traffic:
    """What the ranks that share a head's vocabulary tell each other in one call, forward and backward."""

    collectives: int  # small ones, and the sums of gradients
    gathered: int  # bytes that each rank gives to every other
    summed: int  # bytes that are added up over all ranks

    def sent(self, ranks: int) -> int:
        """Bytes that leave each rank, by the ring algorithms."""
        return (ranks - 1) * self.gathered + 2 * (ranks - 1) * self.summed // max(1, ranks)


AGREEMENT = 8 * 22  # bytes of the agreement across ranks on the call that they make: its FACTS


def traffic_of(
    want: tuple[str, ...],
    n_tokens: int,
    *,
    chunks: int,
    itemsize: int = 4,
    label: bool = True,
    numbers: int = 0,
    top_k: int = 0,
    widths: tuple[int, ...] = (),
) -> Traffic:
    """The traffic of a call over a sharded head: its `chunks` of tokens, and the gradients of tokens.

    numbers: candidates; top_k: as asked for; widths: of the gradients per token, the hidden size where hidden states
    need one, and the adapters' rank where they do.
    """
    sums = sums_of(want)
    top_k = best_entries(sums, top_k)
    floats = 2 + len(sums & {"t", "r", "zsum", "qe"}) + 6 * ("ref" in sums) + 2 * ("tail" in sums) + numbers + top_k
    floats += label * (1 + ("ref" in sums)) + len(sums.intersection(SECOND_LOOK))
    ints = top_k + ("above" in sums)
    each = 1 + (label and "above" in sums) + looks_twice(sums)
    gathered = AGREEMENT + n_tokens * (itemsize * floats + 8 * ints)
    return Traffic(1 + chunks * each + len(widths), gathered, n_tokens * sum(widths) * itemsize)


def traffic_over_sets(
    entries: int, n_tokens: int, *, chunks: int, heads: int, itemsize: int = 4, widths: tuple[int, ...] = ()
) -> Traffic:
    """The traffic of a call over sampling masks: each head's logits of all `entries`; the rest as in `traffic_of`.

    heads: 2 with a reference.
    """
    gathered = AGREEMENT + heads * entries * itemsize
    return Traffic(1 + chunks * heads + len(widths), gathered, n_tokens * sum(widths) * itemsize)
