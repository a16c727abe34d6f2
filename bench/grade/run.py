"""GRADE measured: soft tokens over k entries against whole distributions, and against the score function.

python -m bench.grade.run --part memory|storage|time|curves|variance|learning|legacy [...] [--out FILE]

memory, storage and time are of random models with a real vocabulary; curves, variance and learning of the embedded
task of `logitless align`, on the policy that --model names. learning and legacy read what `align --method all` left in
the folder --run; legacy also runs of single methods there, each in a folder METHOD-SEED. Each part is one line
of the file, with the machine and versions; a part that is measured again replaces its line.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.grade.sizes import Sizes, memory, storage, timing
from bench.grade.task import curves, learning, legacy, variance
from bench.harness import SCHEMA, environment, read_lines
from logitless.workbench.common.options import SMALL_MODEL
from logitless.workbench.grade.config import GradeConfig


def given(o: argparse.Namespace, **names: str) -> dict[str, Any]:
    """The options that were given, by the names that they have elsewhere."""
    return {name: getattr(o, option) for option, name in names.items() if getattr(o, option) is not None}


def sizes_of(o: argparse.Namespace) -> Sizes:
    same = {name: name for name in ("vocab", "hidden", "layers", "prompt", "steps", "batch", "device")}
    return Sizes(**given(o, **same, top_k="k"))


def config_of(o: argparse.Namespace) -> GradeConfig:
    same = {name: name for name in ("model", "reward_model", "data", "top_k")}
    found = given(
        o, **same, prompt="prompt_length", steps="completion_length", batch="batch_size", rate="learning_rate"
    )
    return replace(GradeConfig(**found).defaults(), **found, max_steps=o.rounds, device="cpu").check()


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "memory": lambda o: memory(sizes_of(o)),
    "storage": lambda o: storage(sizes_of(o)),
    "time": lambda o: timing(sizes_of(o), o.rounds),
    "curves": lambda o: curves(config_of(o), o.rounds),
    "variance": lambda o: variance(config_of(o), o.samples, o.blocks),
    "learning": lambda o: learning(o.run),
    "legacy": lambda o: legacy(o.run),
}


def write(path: Path, record: dict[str, Any]) -> None:
    """Puts the part's line in its place in the file, which stays in the order of PARTS."""
    lines = {line["kind"]: line for line in (read_lines(path) if path.exists() else [])}
    lines[record["kind"]] = {"schema": SCHEMA} | record
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(lines[kind]) + "\n" for kind in PARTS if kind in lines), "utf-8")


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    sizes = {
        "vocab": "of the random models", "hidden": "of the random policy", "layers": "of the random policy",
        "prompt": "tokens of a prompt", "steps": "generated tokens", "batch": "sequences",
        "top-k": "entries of a soft token",
    }  # fmt: skip
    for name, what in sizes.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: the random models', or the trainer's)")
    numbers = {
        "rounds": (5, "of time; optimiser steps of curves"), "samples": (128, "draws of variance"),
        "blocks": (4, "of the draws, for their spread"), "threads": (1, "of torch"),
    }  # fmt: skip
    for name, (default, what) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of memory (default: cpu)")
    parser.add_argument("--model", default=SMALL_MODEL)
    parser.add_argument("--reward-model")
    parser.add_argument("--data")
    parser.add_argument("--rate", type=float, help="learning rate of curves (default: the trainer's)")
    parser.add_argument("--run", type=Path, default=Path("runs/all"))
    parser.add_argument("--out", type=Path, help="write the part's line here, in the place of its former one")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    torch.set_num_threads(o.threads)
    machine = {name: value for name, value in environment().items() if name != "kind"}
    found = PARTS[o.part](o)
    if o.out is not None:
        write(o.out, {"kind": o.part, "environment": machine, **found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
