"""Our class for lm-evaluation-harness beside its own `HFLM`: `python -m bench.lm_eval.compare [--out FILE]`.

SmolLM2-135M-Instruct on the tasks beside this file, each class and task in a process of its own: CPU seconds, the most
memory above the loaded model, and the largest difference between their answers, per scored token. It needs lm-eval
(`make test-lm-eval` puts it into build/lm-eval) and the package of SmolLM2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.harness import MB, results

HERE = Path(__file__).parent
TASKS = ("docstrings_choice", "docstrings_cloze", "docstrings_text")
CLASSES = ("hf", "logitless")
MODEL = "smollm2"


def evaluated(kind: str, task: str, limit: int, batch_size: int) -> dict[str, Any]:
    """What a class does with a task's first documents."""
    from lm_eval.api.registry import get_model  # pyright: ignore[reportMissingImports]
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    import logitless.integrations.lm_eval  # noqa: F401  # its name is known from here on
    from logitless.resident import Watch
    from logitless.workbench.sources.converted import directory_of

    lm = get_model(kind)(pretrained=str(directory_of(MODEL)), device="cpu", dtype="float32", batch_size=batch_size)
    given = {"task_manager": TaskManager(include_defaults=False), "bootstrap_iters": 0}
    place = str(HERE / f"{task}.yaml")
    simple_evaluate(lm, tasks=[place], limit=1, **given)  # what a first call sets up is no part of the measure
    begin = time.process_time()
    with Watch(torch.device("cpu")) as watch:
        found = simple_evaluate(lm, tasks=[place], limit=limit, **given)
    seconds = time.process_time() - begin
    answers = [x for sample in found["samples"][task] for response in sample["resps"] for x in response]
    totals = [x[0] if isinstance(x, tuple | list) else x for x in answers]
    metrics = {name.split(",")[0]: x for name, x in found["results"][task].items() if isinstance(x, float)}
    return {"seconds": seconds, "peak_mb": watch.peak / MB, "totals": totals, "metrics": metrics}


def apart(kind: str, task: str, options: argparse.Namespace) -> dict[str, Any]:
    """`evaluated` in a process of its own."""
    given = ["--one", kind, task, "--limit", str(options.limit), "--batch-size", str(options.batch_size)]
    threads = ["--threads", str(options.threads)]
    command = [sys.executable, "-m", "bench.lm_eval.compare", *given, *threads]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lm_eval.compare", description=__doc__)
    parser.add_argument("--limit", type=int, default=12, help="documents of each task")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", nargs=2, metavar=("CLASS", "TASK"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(evaluated(*options.one, options.limit, options.batch_size)))
        return 0
    write = results(options.out, model=MODEL, limit=options.limit, batch_size=options.batch_size)
    for task in TASKS:
        found = {kind: apart(kind, task, options) for kind in CLASSES}
        theirs, ours = (found[kind].pop("totals") for kind in CLASSES)
        difference = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(theirs, ours, strict=True))
        row = {"task": task, "requests": len(ours), "largest_relative_difference": difference, **found}
        print(json.dumps(row), flush=True)
        write(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
