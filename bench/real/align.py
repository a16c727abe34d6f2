"""A pretrained model aligned by `logitless align`, long enough to see its reward move: GRADE, GRPO, Intuitor.

python -m bench.real.align [--runs all grpo intuitor --model smollm2 --keep DIR --out FILE]

all: every method of soft tokens on continuations of this Python's library, `--method all`; ste, reinforce and so on are
one of them by itself. grpo and intuitor: answers to the questions that the package carries, with the exact KL. The
reward of all and grpo is a rule, text without the letter e (`bench.real.rules`); Intuitor's is the policy's
self-certainty. Each run is a command in a process of its own, and goes on with --keep (and a new --out) where it was
killed. A number of GRPO and Intuitor is told by its means over the first and last sixth of steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from bench.harness import read_lines, results
from logitless.workbench.demo.run import CHATS
from logitless.workbench.grade.comparison.report import table
from logitless.workbench.grade.config import GRADE_METHODS

GRPO = ["--exact-kl", "--completion-length", "32", "--generations-per-prompt", "8", "--batch-size", "8",
        "--gradient-accumulation-steps", "2", "--lora-rank", "16", "--learning-rate", "5e-4"]  # fmt: skip
SOFT = ["--token-reward", "bench.real.rules:without_e", "--prompt-length", "16", "--completion-length", "16",
        "--batch-size", "8", "--gradient-accumulation-steps", "1", "--learning-rate", "1e-3", "--beta", "0.02",
        "--evaluation-prompts", "32", "--variance-samples", "4"]  # fmt: skip
RUNS = {
    **{method: ["--method", method, *SOFT] for method in GRADE_METHODS},
    "grpo": ["--method", "grpo", "--rewards", "bench.real.rules:words_without_e", *GRPO],
    "intuitor": ["--method", "intuitor", *GRPO],
}  # fmt: skip
SOFT_STEPS, STEPS = 16, 36
TOLD = ("reward", "kl", "kl/exact", "entropy", "completions/mean_length", "self_certainty/mean")


def prompts(place: Path) -> Path:
    """The questions of the package as prompts of conversations."""
    rows = [json.loads(line)["messages"][:1] for line in CHATS.read_text(encoding="utf-8").splitlines()]
    file = place / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), encoding="utf-8")
    return file


def aligned(name: str, model: str, steps: int, place: Path) -> dict:
    """What a run came to."""
    run = place / name
    if not (run / "summary.json").exists():
        command = [sys.executable, "-m", "logitless.cli", "align"]
        if (run / "run.json").exists():
            command += ["--resume", str(run)]
        else:
            command += ["--model", model, "--output-dir", str(run), "--max-steps", str(steps), "--device", "cpu"]
            command += [*RUNS[name], *(() if name in GRADE_METHODS else ("--data", str(prompts(place))))]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    row = {"kind": "align", "run": name, "model": model, "steps": steps, "options": RUNS[name]}
    if name == "all":
        kept = ("methods", "beside_legacy", "criteria", "left_out")
        return row | {key: summary[key] for key in kept if key in summary}
    if name in GRADE_METHODS:
        return row | {"methods": table([summary])["methods"], "summary": summary}
    records = [x for x in read_lines(run / "metrics.jsonl") if "reward" in x]
    few = max(1, len(records) // 6)
    numbers = {
        key: [round(fmean(x[key] for x in part), 4) for part in (records[:few], records[-few:])]
        for key in TOLD
        if all(key in x for x in records)
    }
    return row | {"first_and_last": numbers, "curve": [round(x["reward"], 4) for x in records], "summary": summary}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["all", "grpo", "intuitor"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, help="instead of each run's own number")
    parser.add_argument("--keep", type=Path, help="where the runs lie and go on; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    write = results(o.out)
    with tempfile.TemporaryDirectory() as temporary:
        place = o.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        for name in o.runs:
            usual = SOFT_STEPS if name in GRADE_METHODS else STEPS
            row = aligned(name, o.model, o.steps or usual, place)
            print(json.dumps(row), flush=True)
            write(row)


if __name__ == "__main__":
    main()
