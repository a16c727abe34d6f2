"""Tasks of lm-evaluation-harness: its names and YAML files, evaluated by `LogitlessLM`."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from ...errors import ConfigError, DataError, NotFiniteError, OptionError, in_one_line
from ...hashes import hash_of
from ...integrations.transformers.lm_head import replaced
from ...resident import peak_bytes, reset_peak
from ...units import plural
from ...versions import versions
from ..common.device import device_of
from ..common.files import folders_for
from ..common.options import MOST
from ..common.say import quiet, say
from ..scoring.parts import Parts
from ..scoring.run import explained, identities, joined, opened
from ..scoring.summary import finished
from ..sft.default_model import default_model
from ..sources.model import ModelSource, load_model, load_tokenizer, resolve_trained
from ..sources.tokenizer import TextTokenizer
from .answers import RECORDS, Gathered, conclude_answers, record_files
from .config import EvalConfig
from .page import page_of_tasks, write_pages

SCHEMA = 1
ANSWERS = "answers"  # of the harness' own cache, which a run that goes on reads
NO_METRICS = ("name", "alias", "sample_len", "sample_count")  # of a task's results
MOST_ROWS = 1024  # of a batch, where that many fit


def run_tasks(config: EvalConfig, console: Console | None = None) -> dict[str, Any]:
    """Evaluates config.tasks and returns the summary; writes records.jsonl, summary.json and page.html.

    Answers are kept as they come, so that the same call goes on where a killed one stopped. Under torchrun each rank
    has documents of its own. Raises LogitlessError for bad input and Interrupted. On the other ranks the summary is
    empty.
    """
    console = console or Console(stderr=True)
    quiet()
    tasks = _load(config.task_names)
    with folders_for(config.written()):
        return _run_tasks(config, tasks, console)


def _run_tasks(config: EvalConfig, tasks: list[Any], console: Console) -> dict[str, Any]:
    rank, ranks = joined()
    if ranks > 1:
        _check_shares(config, tasks, ranks)
    default_model(config.model, config.device, console)
    source = resolve_trained(config.model, "evaluate")
    tokenizer, device = load_tokenizer(source), device_of(config.device, rank)
    model = load_model(source, dtype=config.dtype, length=config.context_length or 1).eval().to(device)
    parts = Parts(config.place)
    with explained(config.place), opened(config, parts, lambda: _manifest(config, source, tokenizer), console):
        reset_peak(device)
        begin = time.perf_counter()
        with _taken_up(parts, rank, console) as before:
            found = _evaluated(config, model, tokenizer, tasks, parts.folder)
        if rank:
            return {}
        seconds, answered = time.perf_counter() - begin, found.pop("answers") - before
        summary = {
            "schema": SCHEMA,
            "options": config.deciding(),
            **found,
            "out": str(config.folder),
            "requests_answered_now": answered,
            "seconds": round(seconds, 3),
            "requests_per_second": round(answered / seconds, 3),
            "peak_memory_bytes": peak_bytes(device),
            "ranks": ranks,
            "device": str(device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "versions": versions("torch", "transformers", "lm-eval"),
        }
        write_pages(config, summary, page_of_tasks(summary))
        return finished(config, parts, summary)


def _load(names: Sequence[str]) -> list[Any]:
    """The harness' tasks and groups. Raises ConfigError without it, DataError for a task that cannot be loaded."""
    try:
        with warnings.catch_warnings(action="ignore"):
            from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        missing = "lm-eval" if (error.name or "").startswith("lm_eval") else error.name
        raise ConfigError(f"--tasks needs {missing}, which is not installed: pip install lm-eval") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_defaults=not all(Path(name).is_file() for name in names))
    known = {*manager.all_tasks, *manager.all_groups, *manager.all_tags}
    out: list[Any] = []
    for name in names:
        if name not in known and not Path(name).is_file():
            near = get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise DataError(f"--tasks {name}: lm-eval has no task of this name, and there is no such YAML file{hint}")
        try:
            with warnings.catch_warnings(action="ignore"):
                found = manager.load([name])
        except Exception as error:  # YAML, templates, data sets and the network each have their own
            why = in_one_line(error)
            raise DataError(f"--tasks {name}: lm-eval cannot load it ({why})") from None
        groups = found.get("groups", {})
        out += [groups[name]] if name in groups else [*found["tasks"].values()]
    return out


def _check_shares(config: EvalConfig, tasks: list[Any], ranks: int) -> None:
    """OptionError where a rank would have no document of a task, which the harness refuses."""
    groups = (found.get_all_tasks() if hasattr(found, "get_all_tasks") else [found] for found in tasks)
    for task in chain.from_iterable(groups):
        count = min(len(task.eval_docs), config.limit or MOST)
        if count < ranks:
            few = f"{plural(count, 'document')} for {ranks} ranks"
            raise OptionError(f"--tasks {task.task_name}: {few}: start fewer ranks, or give a higher --limit")


def _manifest(config: EvalConfig, source: ModelSource, tokenizer: TextTokenizer) -> dict[str, Any]:
    """What an unfinished run must have in common with the one that goes on with it."""
    files = {f"the content of {name}": hash_of(Path(name)) for name in config.task_names if Path(name).is_file()}
    return {"schema": SCHEMA, **config.deciding(), **identities(tokenizer, {"model": source}), **files}


@contextmanager
def _taken_up(parts: Parts, rank: int, console: Console) -> Iterator[int]:
    """Gives the harness the answers that a killed run left, as whole records say them; yields how many there are."""
    folder = parts.folder
    gathered = Gathered(folder)
    if rank == 0 and gathered.damaged:
        lines = plural(gathered.damaged, "record")
        say(console, f"{lines} in {folder} unfinished or damaged: what they answered is asked again")
    cache = folder / f"{ANSWERS}_rank{rank}.db"  # as the harness calls it
    gathered.write_cache(cache)
    try:
        yield gathered.count
    except NotFiniteError:
        if rank == 0:  # whose folder it is: asked again, the model would say the same
            parts.remove()
        raise
    finally:
        if not any(record_files(folder)):  # so that nothing stays of a run that was refused
            cache.unlink(missing_ok=True)


def _evaluated(
    config: EvalConfig, model: Any, tokenizer: TextTokenizer, tasks: list[Any], folder: Path
) -> dict[str, Any]:
    """Metrics and curves of each task and group, and how many requests there were; on other ranks nothing."""
    from lm_eval import evaluator  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from ...integrations.lm_eval import LogitlessLM

    lm = LogitlessLM(
        pretrained=model,
        tokenizer=tokenizer.saved,
        batch_size="auto",
        max_batch_size=MOST_ROWS,
        max_length=config.context_length,
        memory_budget=config.memory_budget_bytes,
        over_ranks=True,
        records=folder / RECORDS,
    )
    with warnings.catch_warnings(action="ignore"), redirect_stdout(sys.stderr), _told(config):  # stdout: the results'
        found = evaluator.simple_evaluate(
            lm,
            tasks=tasks,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            use_cache=str(folder / ANSWERS),
            task_manager=TaskManager(include_defaults=False),
        )
    if found is None:
        return {}
    counts = {name: count["effective"] for name, count in found["n-samples"].items()}
    known = conclude_answers(found, folder, config, lm.beams)
    certainty = known.pop("certainty")
    results = {
        name: {
            "documents": counts.get(name) or metrics.get("sample_len", 0),
            "metrics": _metrics(metrics),
            "certainty": certainty.get(name),
        }
        for name, metrics in found["results"].items()
    }
    return {"tasks": results, **known, "longest": lm.max_length}


@contextmanager
def _told(config: EvalConfig) -> Iterator[None]:
    """What the harness says in its own way: git's complaint of no repository here, and of too few examples to show."""
    from lm_eval import evaluator  # pyright: ignore[reportMissingImports]

    try:
        with replaced(evaluator, "get_git_commit_hash", lambda: None):
            yield
    except ValueError as error:
        if "larger than population" not in str(error):
            raise
        asked = "num_fewshot of a task" if config.num_fewshot is None else f"--num-fewshot {config.num_fewshot}"
        raise OptionError(f"{asked}: more examples than a task has to show: give a lower --num-fewshot") from None


def _metrics(metrics: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """{name: value and standard error} of what the harness names `acc,none` and `acc_stderr,none`."""
    out: dict[str, dict[str, float | None]] = {}
    for key, value in metrics.items():
        name, _, filtered = key.partition(",")
        if key in NO_METRICS or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = metrics.get(f"{name}_stderr,{filtered}")
        shown = name if filtered in ("", "none") else f"{name} ({filtered})"
        out[shown] = {"value": value, "standard_error": error if isinstance(error, float) else None}
    return out
