"""`logitless eval --tasks` on tasks in lm-evaluation-harness' format; `make test-lm-eval` has the harness at hand."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from logitless.cli.main import main
from logitless.errors import DataError, OptionError
from logitless.integrations.transformers import continuations
from logitless.workbench.evaluation.config import EvalConfig
from logitless.workbench.evaluation.run import run
from tests.support.forked import FORKED, begin
from tests.support.integrations.launching import torchrun

pytest.importorskip("lm_eval", reason="needs lm-eval: make test-lm-eval")
TASKS = Path(__file__).parents[3] / "bench" / "lm_eval"
CHOICE, TEXT = (str(TASKS / f"docstrings_{name}.yaml") for name in ("choice", "text"))
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def options(micro: Path, out: Path, **more: object) -> EvalConfig:
    given: dict[str, Any] = {"tasks": (CHOICE, TEXT), "limit": 12, "device": "cpu", **more}
    return EvalConfig(model=str(micro), out=out, **given)


def test_a_table_for_people_and_json_for_machines(micro, tmp_path, capsys):
    out = tmp_path / "e"
    given = ["--model", str(micro), "--limit", "5", "--device", "cpu", "--out", str(out), "--json", "-"]
    assert main(["eval", "--tasks", CHOICE, *given]) == 0
    said, shown = capsys.readouterr()
    summary = json.loads(said)
    found = summary["tasks"]["docstrings_choice"]
    assert found["documents"] == 5
    assert 0 <= found["metrics"]["acc"]["value"] <= 1
    assert summary["requests"] == 20
    assert "docstrings_choice" in shown
    assert "docstrings_choice" in (out / "page.html").read_text()
    assert sorted(p.name for p in out.iterdir()) == ["page.html", "summary.json"]
    with pytest.raises(OptionError, match="exists already"):
        run(options(micro, out))


@pytest.fixture(scope="module")
def whole(micro, tmp_path_factory) -> dict:
    return run(options(micro, tmp_path_factory.mktemp("whole") / "e"))


def test_a_killed_run_goes_on(micro, whole, tmp_path):
    begun = FORKED.Event()
    process = begin(_killed, begun, options(micro, tmp_path / "e"))
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert [p.name for p in (tmp_path / "e").iterdir()] == ["summary.json.parts"]
    with pytest.raises(OptionError, match="unfinished run with limit 12, now 11"):
        run(options(micro, tmp_path / "e", limit=11))
    assert same(run(options(micro, tmp_path / "e")), whole)
    assert sorted(p.name for p in (tmp_path / "e").iterdir()) == ["page.html", "summary.json"]


def _killed(begun: Any, config: EvalConfig) -> None:
    torch.set_num_threads(1)
    answers, passes = continuations._answers, 0

    def then_die(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers(*given)

    continuations._answers = then_die
    run(config)


def same(found: dict, expected: dict) -> bool:
    for task, values in expected["tasks"].items():
        for metric, x in values["metrics"].items():
            assert found["tasks"][task]["metrics"][metric]["value"] == pytest.approx(x["value"], rel=1e-5)
    return found["requests"] == expected["requests"] and found["options"] == expected["options"]


def test_two_ranks_give_what_one_gives(micro, whole, tmp_path):
    torchrun("tests.workbench.evaluation.test_tasks", str(micro), str(tmp_path / "e"))
    found = json.loads((tmp_path / "e" / "summary.json").read_text())
    assert found["ranks"] == 2
    assert same(found, whole)


def test_tasks_that_cannot_be_loaded(micro, tmp_path):
    with pytest.raises(DataError, match=r"--tasks hellaswagg: lm-eval has no task .* did you mean .*hellaswag"):
        run(options(micro, tmp_path / "e", tasks=("hellaswagg",)))
    broken = tmp_path / "broken.yaml"
    broken.write_text(
        "task: x\ndataset_path: json\ndataset_kwargs: {data_files: none.json}\noutput_type: loglikelihood\n"
    )
    with pytest.raises(DataError, match=r"--tasks .*broken.yaml: lm-eval cannot load it \("):
        run(options(micro, tmp_path / "e", tasks=(str(broken),)))
    assert not (tmp_path / "e").exists()


def test_a_document_without_a_continuation(micro, tmp_path):
    (tmp_path / "t.yaml").write_text(
        "task: t\ncustom_dataset: !function data.read\noutput_type: loglikelihood\ntest_split: test\n"
        'doc_to_text: "{{text}}"\ndoc_to_target: "{{word}}"\nmetric_list: [{metric: acc}]\ntarget_delimiter: ""\n'
    )
    (tmp_path / "data.py").write_text(
        "from datasets import Dataset\ndef read(**_):\n"
        '    return {"test": Dataset.from_list([{"text": "a", "word": "b"}, {"text": "c", "word": ""}])}\n'
    )
    with pytest.raises(DataError, match="document 2 of task t: expected a continuation to score, got none"):
        run(options(micro, tmp_path / "e", tasks=(str(tmp_path / "t.yaml"),)))


if __name__ == "__main__":
    import sys

    run(options(Path(sys.argv[1]), Path(sys.argv[2])))
