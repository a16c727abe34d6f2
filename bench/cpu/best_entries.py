"""What the best entries cost a CPU's pass, and where: `python -m bench.cpu.best_entries [--out FILE]`.

Whole calls of the statistics of `logitless score`, with the best 20 entries and without, over the fastest bare product,
in turn in one process; then the slices of one chunk, one after another as in a call: the search's time by stretches of
the vocabulary, and that of its operations on late slices, medians; and that of compiled loops which read such a slice
for its sums, for the maxima of its blocks, and for both at once. Preload jemalloc, as docs/how-to/cpu.md says, for
memory that is kept. Behind docs/decisions/0047.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import logitless as ll
from bench.harness import THREADS, busiest, in_turns, least, results
from bench.sampling.score import KEEP, TILE, TOKENS, WANT, Scoring, Streamed, TileGemm
from logitless.vocab.backends.eager.topk import BLOCK, TopK

STRETCHES = (0, 1, 8, 32, 64, 128, 256)  # slices


class Alone(Streamed):
    """The same statistics without the best entries."""

    def run(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            stats = ll.token_stats(self.hidden, ll.LMHead(self.weight), self.labels, want=WANT, backend=self.backend)
        return {name: getattr(stats, name) for name in WANT}


def whole_calls(size: str, rounds: int) -> list[dict]:
    """Least and median seconds of each way, and the least over the fastest bare product's."""
    ways = {
        "bare GEMM, vocabulary tiles": TileGemm(size),
        "logitless, compiled": Alone(size, "compiled"),
        f"logitless, compiled, top {KEEP}": Streamed(size, "compiled"),
        "logitless, eager": Alone(size, "eager"),
        f"logitless, eager, top {KEEP}": Streamed(size, "eager"),
    }
    turns = in_turns({name: way.run for name, way in ways.items()}, rounds)
    floor = least(turns["bare GEMM, vocabulary tiles"], "wall")
    return [
        {
            "kind": "whole calls",
            "way": name,
            "seconds": least(found, "wall"),
            "median": statistics.median(turn.wall for turn in found),
            "over the product": round(least(found, "wall") / floor, 3),
            "others": round(busiest(turns), 3),
        }
        for name, found in turns.items()
    ]


def each_slice(inputs: Scoring, work: Callable[[torch.Tensor, int], None], first: int = 0) -> None:
    """`work(z, number)` on the logits of each slice of the first chunk from `first` on, just made."""
    hidden = inputs.hidden[:TOKENS]
    z = torch.empty(len(hidden), TILE)
    for number in range(first, len(inputs.weight) // TILE):
        torch.mm(hidden, inputs.weight[number * TILE : (number + 1) * TILE].T, out=z)
        work(z, number)


def by_stretch(inputs: Scoring) -> dict[str, float]:
    """Milliseconds of the search on the slices of each stretch."""
    best, found = TopK(inputs.hidden[:TOKENS, 0], KEEP), {}

    def work(z: torch.Tensor, number: int) -> None:
        end = next(last for last in STRETCHES if number < last)
        begin = time.perf_counter()
        best.add(z, number * TILE)
        found[end] = found.get(end, 0.0) + 1e3 * (time.perf_counter() - begin)

    each_slice(inputs, work)
    return {f"to slice {end}": ms for end, ms in found.items()}


def late_operations(inputs: Scoring) -> dict[str, float]:
    """Microseconds of what is done to a slice of the vocabulary's second half, in the order of the pass."""
    least = inputs.reference["topk_logits"][:, -1].float().mean()
    times: dict[str, list[float]] = {}

    def work(z: torch.Tensor, number: int) -> None:
        def step(name: str, operation: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
            begin = time.perf_counter()
            result = operation()
            times.setdefault(name, []).append(1e6 * (time.perf_counter() - begin))
            return result

        blocks, own = z.unflatten(1, (-1, BLOCK)), least.expand(len(z), 1)
        (maxima,) = step("maxima of blocks", lambda: (blocks.amax(2),))
        (beats,) = step("comparison", lambda: (maxima > own,))
        row, block = step("which beat it", lambda: beats.nonzero(as_tuple=True))
        step("their entries", lambda: (z.view(-1, BLOCK).index_select(0, row * blocks.shape[1] + block),))
        step("maxima of rows", lambda: (z.amax(1),))

    each_slice(inputs, work, len(inputs.weight) // TILE // 2)
    return {name: round(statistics.median(found), 1) for name, found in times.items()}


def sums_of_rows(z: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A pass's sums, from the maximum of what was seen and of the slice."""
    level = torch.maximum(z.amax(1, keepdim=True), level)
    e = torch.exp(z - level)
    return level, e.sum(1), (e * z).sum(1)


def maxima_of_blocks(z: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return z.unflatten(1, (-1, BLOCK)).amax(2)


def both_at_once(z: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums from the maximum of what was seen alone, and the blocks' maxima, which say whether it still is one."""
    blocks = z.unflatten(1, (-1, BLOCK))
    e = torch.exp(blocks - level[:, :, None])
    return blocks.amax(2), e.sum(2).sum(1), (e * blocks).sum(2).sum(1)


def compiled_reads(inputs: Scoring) -> dict[str, float]:
    """Microseconds of loops that Inductor compiles, each on slices of the vocabulary's second half, just made."""
    tokens, found = len(inputs.hidden[:TOKENS]), {}
    level = inputs.reference["topk_logits"][:, 0].float().mean().repeat(tokens, 1)
    for name, loop in {"sums": sums_of_rows, "maxima of blocks": maxima_of_blocks, "both": both_at_once}.items():
        read, times = torch.compile(loop, dynamic=False), []

        def work(z: torch.Tensor, _: int, read: Callable = read, times: list[float] = times) -> None:
            begin = time.perf_counter()
            read(z, level)
            times.append(1e6 * (time.perf_counter() - begin))

        each_slice(inputs, work, len(inputs.weight) // TILE // 2)
        found[name] = round(statistics.median(times), 1)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    write = results(options.out)

    def tell(row: dict) -> None:
        print(row, flush=True)
        write(row)

    for row in whole_calls(options.size, options.rounds):
        tell(row)
    inputs = Scoring(options.size)
    stretches = [by_stretch(inputs) for _ in range(options.rounds)]
    tell({"kind": "search, ms", **{name: round(min(s[name] for s in stretches), 1) for name in stretches[0]}})
    tell({"kind": "operations on a late slice, us", **late_operations(inputs)})
    tell({"kind": "compiled loops on a late slice, us", **compiled_reads(inputs)})


if __name__ == "__main__":
    main()
