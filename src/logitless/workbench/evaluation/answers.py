"""What tasks' answers come to: their records in one file, and how sure the model was where it was right or wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, NotFiniteError
from ..common.files import remove_whole, strict_json, write_whole
from .config import EvalConfig
from .curves import Calibration, Spectrum

RECORDS = "records.jsonl"
GROUPS, LEAST = 10, 5  # of as many answers each, and how many each has at least
BUFFERED = 1 << 16  # numbers that wait to be counted


@dataclass
class Certainty:
    """Calibration and entropy against being right, of a task's documents or of its tokens."""

    unit: str
    bins: int
    waiting: list[tuple[float, float, bool]] = field(default_factory=list)  # confidence, entropy, right

    def __post_init__(self) -> None:
        self.calibration, self.entropy = Calibration(self.bins, self.unit), Spectrum(self.unit)

    def add(self, rows: Iterator[tuple[float, float, bool]] | Sequence[tuple[float, float, bool]]) -> None:
        self.waiting += rows
        if len(self.waiting) >= BUFFERED:
            self._count()

    def _count(self) -> None:
        if self.waiting:
            confidence, entropy, right = map(np.array, zip(*self.waiting, strict=True))
            self.calibration.add(confidence, right)
            self.entropy.add(entropy, right)
            self.waiting = []

    def summary(self) -> dict[str, Any] | None:
        self._count()
        if not self.calibration.count.any():
            return None
        groups = min(GROUPS, max(1, int(self.calibration.count.sum()) // LEAST))
        found = {"auroc": self.entropy.auroc(), **self.entropy.means(), "groups": self.entropy.groups(groups)}
        return {"of": self.unit, **self.calibration.summary(), "entropy": found}


def record_files(folder: Path) -> list[Path]:
    """Where several runs and ranks wrote their records."""
    return sorted(folder.glob(f"{Path(RECORDS).stem}*.jsonl"))


class Gathered:
    """The records that several runs and ranks wrote, by the question that they answer."""

    def __init__(self, folder: Path) -> None:
        from ...integrations.lm_eval_records import read_records

        self.folder, self.damaged = folder, 0  # lines that were changed or are unfinished
        self.answers: dict[str, Any] = {}  # the newest of each question
        self.places: dict[str, list[tuple[Path, int]]] = {}
        for path in record_files(folder):
            for start, record in read_records(path):
                if record is None:
                    self.damaged += 1
                    continue
                self.answers[record["key"]] = record["answer"]
                self.places.setdefault(record["key"], []).append((path, start))

    @property
    def count(self) -> int:
        """How many answers there are, of one question too."""
        return sum(map(len, self.places.values()))

    def write_cache(self, path: Path) -> None:
        """The answers as the harness' own cache, in whose place whatever lies there goes."""
        from sqlitedict import SqliteDict  # pyright: ignore[reportMissingImports]

        if os.path.lexists(path):
            remove_whole(path)
        with SqliteDict(str(path)) as cache:
            cache.update({k: tuple(x) if isinstance(x, list) else x for k, x in self.answers.items()})
            cache.commit()

    def newest(self, key: str, count: int) -> Iterator[dict[str, Any]]:
        """The last `count` records of a question: a run that was killed may have answered it once more."""
        for path, start in self.places.get(key, [])[-count:]:
            with path.open("rb") as file:
                file.seek(start)
                yield json.loads(file.readline())


def conclude_answers(found: dict[str, Any], folder: Path, config: EvalConfig, beams: int) -> dict[str, Any]:
    """Writes records.jsonl, in the order of tasks and documents, and says what it comes to.

    found: what simple_evaluate gives, with samples; folder: where the records were written as they came; beams: of
    generation, where a task does not say. Returns {certainty: {task: curves}, requests, cut_requests, answers}, of
    which the last are all that were given, this time or before. NotFiniteError for a document whose scores are no
    numbers; null is the log-prob, -inf, of what the model holds impossible.
    """
    gathered = Gathered(folder)
    curves: dict[str, Any] = {}
    counts = {"requests": 0, "cut_requests": 0, "answers": gathered.count}

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for task, samples in found["samples"].items():
                about = found["configs"][task]
                unit = "tokens" if about["output_type"].startswith("loglike") else "documents"
                certainty = Certainty(unit, config.bins)
                for sample in _documents(samples):
                    records = _records(gathered, task, sample, about, beams)
                    if any(np.isnan(x[name]).any() for x in records for name in ("logprob", "confidence")):
                        what = f"the scores of document {sample['doc_id']} of task {task}"
                        raise NotFiniteError(f"--model {config.model}: {what} are not finite")
                    file.writelines(strict_json(record) + "\n" for record in records)
                    asked = len(sample["resps"]) * (about.get("repeats") or 1)
                    counts["requests"] += asked
                    counts["answers"] += 0 if records else asked  # by beams, which leave no record
                    counts["cut_requests"] += sum(record["cut"] > 0 for record in records)
                    certainty.add(_rows(about["output_type"], sample, records))
                if summary := certainty.summary():
                    curves[task] = summary

    write_whole(config.folder / RECORDS, write)
    return {"certainty": curves, **counts}


def _documents(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each document once, in order: the harness lists it for each of a task's filters, rank by rank."""
    once = {sample["doc_id"]: sample for sample in reversed(samples)}
    return [once[number] for number in sorted(once)]


def _records(
    gathered: Gathered, task: str, sample: dict[str, Any], config: dict[str, Any], beams: int
) -> list[dict[str, Any]]:
    from lm_eval.api.model import hash_args  # pyright: ignore[reportMissingImports]

    kind = "loglikelihood" if config["output_type"] == "multiple_choice" else config["output_type"]
    out: list[dict[str, Any]] = []
    for number, arguments in enumerate(sample["arguments"]):
        found = list(gathered.newest(hash_args(kind, arguments), config.get("repeats") or 1))
        if not found and not (kind == "generate_until" and arguments[1].get("num_beams", beams) > 1):  # beams have none
            what = f"the record of document {sample['doc_id']} of task {task}"
            raise DataError(f"{gathered.folder} has lost {what}: the same command answers it again")
        for record in found:
            known = {name: x for name, x in record.items() if name not in ("answer", "key", "hash")}
            out.append(known | {"task": task, "document": sample["doc_id"], "request": number})
    return out


def _rows(kind: str, sample: dict[str, Any], records: list[dict[str, Any]]) -> Iterator[tuple[float, float, bool]]:
    """(confidence, entropy, right) of each scored token, or of the document's answer."""
    if kind == "multiple_choice":
        yield from _of_choices(sample)
    elif kind == "generate_until":
        yield from _of_texts(sample, records)
    else:
        for record in records:
            right = (rank == 1 for rank in record["rank"])
            yield from zip(record["confidence"], record["entropy"], right, strict=True)


def _of_choices(sample: dict[str, Any]) -> Iterator[tuple[float, float, bool]]:
    """The softmax over the choices' log-probs, and whether the task calls the best of them right."""
    if "acc" not in sample:
        return
    logps = [float(answers[0][0]) for answers in sample["resps"]]
    if "acc_mutual_info" in sample:  # whose second half are the choices without the question
        logps = logps[: len(logps) // 2]
    possible = np.array([x for x in logps if x > -np.inf])
    if not len(possible):
        return  # nothing to choose from
    z = possible - possible.max()
    logp = z - np.log(np.exp(z).sum())
    yield float(np.exp(logp.max())), float(-(np.exp(logp) * logp).sum()), bool(sample["acc"])


def _of_texts(sample: dict[str, Any], records: list[dict[str, Any]]) -> Iterator[tuple[float, float, bool]]:
    """The mean over a generated text's tokens, where the task's first metric says that it is right or wrong."""
    score = sample[sample["metrics"][0]] if sample["metrics"] else None
    if isinstance(score, int | float) and score in (0, 1) and records and records[0]["ids"]:
        yield float(np.exp(np.mean(records[0]["logprob"]))), float(np.mean(records[0]["entropy"])), bool(score)
