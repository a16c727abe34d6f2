"""Machine code as `nvdisasm -c` prints it: instructions, the loop that most time is spent in, widths of accesses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

LABEL = re.compile(r"^\s*(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)([A-Z0-9_.]*)\s*([^;]*);")
RESOURCES = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
# What runs at half the rate of additions and products: comparisons, selections, integers.
HALF_RATE = frozenset(
    name
    for names in ("ISETP FSETP FSEL SEL FMNMX FMNMX3 IMNMX VIMNMX", "LOP3 PLOP3 SHF IADD3 VIADD LEA PRMT FLO POPC")
    for name in names.split()
)
READS = ("LDG", "LDGSTS", "UTMALDG", "UBLKCP")
ATOMICS = ("ATOM", "ATOMG", "RED", "REDG", "UTMAREDG", "UTMAREDP", "UBLKRED")  # ATOMS books tensor memory on 10.0
LEAST_LOOP = 12  # instructions: shorter ones are a wait's


@dataclass(frozen=True)
class Instruction:
    """One instruction; `target` is the place of the one that it branches to."""

    opcode: str
    modifiers: str
    conditional: bool
    target: int | None = None


@dataclass(frozen=True)
class Loop:
    """A loop's counts, as they stand in the code: `always` is without what a branch inside it can skip."""

    instructions: int
    always: int
    barriers: int
    half_rate: int  # of `always`, as the next
    functions: int  # e^x, 1/x, log: a quarter of the rate of `half_rate`


@dataclass(frozen=True)
class Way:
    """What a warp runs from a kernel's beginning to its end, without what branches mostly skip."""

    once: int  # instructions outside of loops
    barriers_once: int
    turn: int  # instructions of one turn of every loop
    barriers_a_turn: int


def parse(code: str) -> list[Instruction]:
    """The instructions in order."""
    found: list[tuple[str, str, bool, str]] = []
    places: dict[str, int] = {}
    for line in code.splitlines():
        label, instruction = LABEL.match(line), INSTRUCTION.match(line)
        if label:
            places[label[1]] = len(found)
        elif instruction:
            predicate, opcode, modifiers, operands = instruction.groups()
            to = re.search(r"\.L_\w+", operands) if opcode == "BRA" else None
            # a branch on "always" has its predicate among the operands
            conditional = bool(predicate) or (to is not None and bool(re.match(r"!?U?P\w", operands)))
            found.append((opcode, modifiers, conditional, to[0] if to else ""))
    return [Instruction(op, more, maybe, places.get(label)) for op, more, maybe, label in found]


def resources(text: str) -> dict[str, int]:
    """Registers, stack and shared memory, as `cuobjdump -res-usage` prints them."""
    return {name: int(count) for name, count in RESOURCES.findall(text)}


def _loops(code: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """(first, last) of each loop; what comes back from behind a kernel's end, where it waits for threads, is none."""
    for last, instruction in enumerate(code[: _end(code)]):
        first = instruction.target
        if first is not None and first <= last and last - first >= LEAST_LOOP:
            yield first, last


def hot_loop(code: Sequence[Instruction], reads: int = 1) -> Loop | None:
    """The innermost loop that reads memory or multiplies matrices; of several the longest.

    reads: how often a kernel goes over its entries; so many loops count together.
    """
    found = []
    for first, last in _loops(code):
        if any(i.opcode in READS or "GMMA" in i.opcode for i in code[first : last + 1]):
            found.append((first, last))
    inner = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    if not inner:
        return None
    longest = sorted(inner, key=lambda loop: loop[0] - loop[1])[:reads]
    counts = [_loop(code, *loop) for loop in longest]
    return Loop(*map(sum, zip(*map(astuple, counts), strict=True)))


def _loop(code: Sequence[Instruction], first: int, last: int) -> Loop:
    body = code[first : last + 1]
    skipped: set[int] = set()
    for at, instruction in enumerate(body):
        to = instruction.target
        if to is not None and instruction.conditional and first + at < to <= last:
            skipped.update(range(at + 1, to - first))
    always = [i for at, i in enumerate(body) if at not in skipped]
    return Loop(
        instructions=len(body),
        always=len(always),
        barriers=sum(i.opcode == "BAR" for i in always),
        half_rate=sum(i.opcode in HALF_RATE for i in always),
        functions=sum(i.opcode == "MUFU" for i in always),
    )


def _end(code: Sequence[Instruction]) -> int:
    ends = [at for at, i in enumerate(code) if i.opcode == "EXIT" and not i.conditional]
    return ends[-1] if ends else len(code)


def way(code: Sequence[Instruction]) -> Way:
    """A kernel's way: of two arms of a branch the longer one, of what a branch can skip an outermost loop alone."""
    code = code[: _end(code)]
    loops = list(_loops(code))
    inside = {at for first, last in loops for at in range(first, last + 1)}
    skipped: set[int] = set()
    for at, instruction in enumerate(code):
        to = instruction.target
        if to is None or not instruction.conditional or to <= at:
            continue
        last = code[min(to, len(code)) - 1]
        end = last.target if last.target is not None and not last.conditional else to
        if end > to:
            skipped.update(range(to, end) if to - at > end - to else range(at + 1, to))
        elif at in inside or not any(at < first < to for first, _ in loops):
            skipped.update(range(at + 1, to))
    once = [i for at, i in enumerate(code) if at not in skipped | inside]
    turn = [code[at] for at in sorted(inside - skipped)]
    return Way(len(once), _barriers(once), len(turn), _barriers(turn))


def _barriers(code: Sequence[Instruction]) -> int:
    return sum(i.opcode == "BAR" for i in code)


def widths(code: Sequence[Instruction], opcodes: Sequence[str]) -> dict[str, int]:
    """How many accesses of each width there are: bits -> instructions."""
    found: Counter[str] = Counter()
    for i in code:
        if i.opcode in opcodes:
            bits = [x for x in i.modifiers.split(".") if x in ("U8", "S8", "U16", "S16", "64", "128")]
            found[bits[0].lstrip("US") if bits else "32"] += 1
    return dict(sorted(found.items(), key=lambda item: int(item[0])))
