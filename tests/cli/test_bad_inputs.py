"""Every command against bad inputs of every kind: one line that says what is wrong, and never a traceback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logitless.cli.main import main
from logitless.errors import LogitlessError
from logitless.workbench.common.options import DEFAULT_MODEL
from logitless.workbench.common.sealed import write_sealed
from logitless.workbench.runs.ending import how_to_go_on
from logitless.workbench.scoring import run as scoring
from logitless.workbench.sft import run as sft
from tests.support.workbench.damage import DEEP, JSON, MARK, REWARDS, REWARDS_SAY, TEMPLATES
from tests.support.workbench.micro import micro_directory, micro_model

NUMBERS = {
    "plan": [
        "--batch-size",
        "--context-length",
        "--response-length",
        "--micro-batch",
        "--top-k",
        "--lora-rank",
        "--sweep",
    ],
    "profile": ["--context-length", "--batch-size", "--mlp-tiles", "--lora-rank", "--memory-budget", "--savings"],
    "doctor": ["--tokens", "--hidden-size", "--vocab-size", "--memory-budget", "--device"],
    "verify": ["--vocab-size", "--sequence-lengths", "--loss-threshold", "--seed"],
    "train": [
        "--max-steps",
        "--batch-size",
        "--context-length",
        "--learning-rate",
        "--seed",
        "--lora-rank",
        "--rope-scaling",
    ],
    "align": ["--max-steps", "--beta", "--temperature", "--generations-per-prompt", "--method", "--seed"],
    "score": ["--keep", "--context-length", "--stride", "--batch-tokens", "--memory-budget"],
    "eval": [
        "--context-length",
        "--stride",
        "--batch-tokens",
        "--memory-budget",
        "--top-k",
        "--bins",
        "--num-fewshot",
        "--limit",
    ],
    "demo": ["--max-steps", "--max-new-tokens", "--learning-rate", "--memory-budget", "--seed"],
    "sample": ["--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--max-new-tokens", "--repetition-penalty"],
}
TOO_MUCH = {str(10**30), str(2**63), "1e400", "nan", "inf", "-1", "x", "[/]", "\x1b[31m", "ü" * 300}
PATHS = {
    "train": ["--data", "--model", "--config", "--resume"],
    "align": ["--data", "--model", "--config", "--resume"],
    "score": ["--data", "--model"],
    "eval": ["--data", "--model", "--against"],
    "demo": ["--model"],
    "sample": ["--model", "--prompt-file"],
    "plan": ["--model", "--critic-shape"],
    "profile": ["--model"],
    "align --method ppo": ["--model", "--reward-model"],
}


def files(place: Path) -> Iterator[Path]:
    """Files and folders that no option can mean."""
    contents = {
        "deep.yaml": "[" * DEEP,
        "deep.json": "[" * DEEP,
        "deep.toml": "a = " + "[" * DEEP,
        "date.yaml": "max_steps: 2020-99-99",
        "digits.json": '{"max_steps": ' + "9" * 5000 + "}",
        "float.yaml": "max_steps: .inf\nseed: .nan",
        "list.yaml": "- max_steps",
        "unknown.toml": "[/] = 1",
        "bytes.yaml": b"\xff\xfe\x00",
        "null.yaml": b"a: \x00",
        "empty.json": "",
        "deep.jsonl": '{"text": ' + "[" * DEEP,
        "config.json": '{"model_type": "qwen3", "vocab_size": -1}',
        "raises.py": "1 / 0",
        "leaves.py": "raise SystemExit(3)",
    }
    for name, content in contents.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        yield place / name
    (place / "run").mkdir()
    (place / "run" / "run.json").write_text("[" * DEEP)
    os.mkfifo(place / "pipe.yaml")
    (place / "circle.yaml").symlink_to("circle.yaml")
    for name in (
        "run",
        "pipe.yaml",
        "circle.yaml",
        "nothing",
        "[/]",
        "\x1b[31m",
        "two\nlines",
        "nothing/[bold]",
    ):
        yield place / name


def told(call: list[str], capsys) -> str:
    """What a call that must fail says, on its one line."""
    try:
        status = main(call)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2, (call, error)
    assert error.count("\n") == 1, (call, error)
    assert "\x1b" not in error
    return error


def refused(call: list[str], capsys, expected: int = 2) -> str:
    """The last line of a call that must fail, after what it says of its progress."""
    try:
        status = main(call)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == expected, (call, error)
    assert "Traceback" not in error
    last = error.splitlines()[-1]
    assert last.startswith("logitless: "), (call, error)
    return last


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))


@pytest.fixture
def nothing_runs(monkeypatch):
    """A call that is accepted would take minutes: it fails here."""

    def accepted(*_: object, **__: object) -> None:
        raise AssertionError("accepted")

    for name in (
        "sft.run.run",
        "align.run.run",
        "scoring.run.run",
        "grade.run.run",
        "evaluation.run.run",
        "demo.run.run",
    ):
        monkeypatch.setattr(f"logitless.workbench.{name}", accepted)
    monkeypatch.setattr("logitless.workbench.sampling.run.run", accepted)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("command", NUMBERS)
def test_numbers_without_a_meaning(command, capsys):
    for option in NUMBERS[command]:
        given = {"sample": ["--prompt", "a"], "score": ["--data", "."], "eval": ["--data", "."]}
        needed = ["--tasks", "x"] if option in ("--num-fewshot", "--limit") else given.get(command, [])
        for value in sorted(TOO_MUCH):
            if option in ("--learning-rate", "--beta", "--temperature", "--repetition-penalty") and value.isdigit():
                continue  # a number like others
            told([command, *needed, f"{option}={value}"], capsys)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("command", PATHS)
def test_paths_that_lead_nowhere(command, tmp_path, capsys):
    needed = {"sample": ["--prompt", "a"]}.get(command, [])
    for path in files(tmp_path / "here"):
        for option in PATHS[command]:
            if option == "--data" and path.exists():
                continue  # text of some kind, which is read by the command itself
            if option == "--prompt-file" and (path.is_fifo() or path.is_file()):
                continue  # a prompt of some kind
            if (command, option, path.name) == ("train", "--model", "config.json"):
                continue  # refused by transformers itself
            told([*command.split(), *needed, option, str(path)], capsys)


SLOW_TO_IMPORT = "import sys, logitless.cli.main as cli; cli.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "align --method ppo --model {model} --reward-model nope",
            "--reward-model nope: expected a directory",
        ),
        (
            "eval --model {model} --data {model} --against nope",
            "--against nope: expected a directory",
        ),
        ("profile --model nope", "unknown model 'nope'"),
        ("train --data {table}", "expected a text, got a table"),
        ("sample --model nope/ --prompt a", "--model nope/: expected a directory with weights to sample from"),
        ("score --model a/b/c --data {model}", "--model a/b/c: expected a directory with weights to score with"),
    ],
)
def test_a_path_that_leads_nowhere_is_found_before_torch_is_imported(line, message, trained, tmp_path):
    """And so before any work: `--method ppo` would train its policy first."""
    (tmp_path / "rows.csv").write_text("text,label\n")
    given = line.format(model=trained, table=tmp_path / "rows.csv")
    command = [sys.executable, "-c", SLOW_TO_IMPORT, *given.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert message in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    micro_directory(place)
    micro_model().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def begun(trained, tmp_path_factory) -> Path:
    """train/, a run of two steps, and scores.parquet.parts/, of a run that was stopped."""
    place = tmp_path_factory.mktemp("begun")
    (place / "text.txt").write_text("a line of text\n" * 200)
    shared = ["--model", str(trained), "--data", str(place / "text.txt"), "--context-length", "32", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "measure", lambda *_: {m: {"not_measured": "test"} for m in ("logitless", "dense")})
        assert main(["train", *shared, "--max-steps", "2", "--output-dir", str(place / "train")]) == 0
        patch.setattr(scoring, "conclude", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["score", *shared, "--out", str(place / "scores.parquet")]) == 130
    return place


RESUMED = ["train", "--resume", "copy/train", "--max-steps", "3"]
SCORED = [
    "score",
    "--data",
    "copy/text.txt",
    "--context-length",
    "32",
    "--device",
    "cpu",
    "--out",
    "copy/scores.parquet",
]
CHANGED = {
    "train/checkpoint-2/optimizer.pt": RESUMED,
    "scores.parquet.parts/manifest.json": SCORED,
    "tokenizer.json": ["sample", "--model", "copy", "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"],
    "tokenizer_config.json": ["sample", "--model", "copy", "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"],
}


@pytest.mark.parametrize("name", CHANGED)
def test_files_that_anything_may_lie_in_the_place_of(name, trained, begun, capsys, monkeypatch):
    """Refused in one line, or gone on without; steps are left out, and test_restoring has a run's other files."""

    def accept(*_: object, **__: object) -> None:
        raise LogitlessError("accepted")

    monkeypatch.setattr("transformers.Trainer._inner_training_loop", accept)
    for change in JSON.values():
        shutil.copytree(trained if "/" not in name else begun, "copy")
        change(Path("copy") / name)
        more = ["--model", str(trained)] if CHANGED[name] is SCORED else []
        try:
            status = main([*CHANGED[name], *more])
        except SystemExit as stop:
            status = stop.code
        error = capsys.readouterr().err
        assert status in (0, 2), error
        assert status == 0 or error.splitlines()[-1].startswith("logitless: "), error
        assert "Traceback" not in error
        shutil.rmtree("copy")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("command", ["train", "align"])
@pytest.mark.parametrize("damage", JSON)
def test_a_damaged_run_is_named_where_it_is_resumed(damage, command, tmp_path, capsys):
    """`align` reads its method before all else."""
    (tmp_path / "run.json").write_text(json.dumps({"config": {"model": DEFAULT_MODEL}}, indent=2))
    JSON[damage](tmp_path / "run.json")
    said = told([command, "--resume", str(tmp_path)], capsys)
    assert f"{tmp_path}/run.json does not hold what was written there" in said
    assert "put back what was there, or begin another run" in said


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../../x.safetensors", "/x.safetensors", "a/b.safetensors", 3])
def test_an_index_of_other_files_is_refused(name, trained, capsys):
    """torch.load would run what a .bin says, and files outside of a model's directory are not the model's."""
    index = trained / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}))
    for call in (["train"], ["align"], ["score", "--data", "."], ["sample", "--prompt", "a"]):
        assert "expected .safetensors files of this directory" in told([*call, "--model", str(trained)], capsys)
    index.unlink()


WEIGHTS_SAY = {
    "folder": "model.safetensors: expected a file, got a folder, a device or a pipe",
    "link": "model.safetensors: No such file or directory",
    "short": "model.safetensors is cut short, or no safetensors file: copy or download it again",
    "empty": "model.safetensors is cut short, or no safetensors file: copy or download it again",
    "text": "model.safetensors is cut short, or no safetensors file: copy or download it again",
}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("kind", WEIGHTS_SAY)
def test_weights_that_cannot_be_read_are_named_before_anything_runs(kind, trained, tmp_path, capsys):
    place = tmp_path / "model"
    shutil.copytree(trained, place)
    weights = place / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    if kind == "folder":
        weights.mkdir()
    elif kind == "link":
        weights.symlink_to("nowhere")
    else:
        weights.write_bytes({"short": whole[:-8], "empty": b"", "text": b"version https://git-lfs.github.com"}[kind])
    for call in (["train"], ["align"], ["score", "--data", "."], ["sample", "--prompt", "a"]):
        assert f"--model {place}: {WEIGHTS_SAY[kind]}" in told([*call, "--model", str(place)], capsys)


CHAT = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me."}]


@pytest.mark.parametrize("begin", ["", MARK], ids=["plain", "marked"])
@pytest.mark.parametrize("kind", ["a loop", "memory", "syntax"])
def test_chat_templates_that_fail_or_never_end(kind, begin, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("logitless.workbench.sources.tokenizer.MOST_SECONDS", 0.2)
    template, said = TEMPLATES[kind]
    (trained / "chat_template.jinja").write_text(begin + template)
    data = tmp_path / "chat.jsonl"
    data.write_text((json.dumps({"messages": CHAT}) + "\n") * 40)
    try:
        short = ["--context-length", "32"]
        few = ["--prompt-length", "8", "--completion-length", "8"]
        read = (["train", *short], ["align", *few], ["align", "--method", "dpo", *few], ["score", *short])
        for call in (["sample", "--prompt", "a"], *([*call, "--data", str(data)] for call in read)):
            assert said in refused([*call, "--model", str(trained), "--device", "cpu"], capsys)
    finally:
        (trained / "chat_template.jinja").unlink()


def test_rewards_that_cannot_be_imported(tmp_path, trained, capsys):
    list(files(tmp_path / "here"))
    call = ["align", "--model", str(trained), "--method", "grpo", "--device", "cpu", "--data"]
    (tmp_path / "text").write_text("a line\n" * 200)
    for rewards in (
        "raises:f",
        "leaves:f",
        ":f",
        "raises:",
        "no.such:f",
        "json:none",
        "json:__name__",
        "..:f",
        "[/]:x",
    ):
        assert "--rewards" in told([*call, str(tmp_path / "text"), "--rewards", rewards], capsys)


SHORT = ["--prompt-length", "8", "--completion-length", "8", "--batch-size", "4", "--max-steps", "1"]


@pytest.mark.parametrize("name", ["text", "fails", "later_leaves", "nobody", "nan"])
def test_rewards_that_fail_in_a_run(name, tmp_path, trained, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    (tmp_path / "here" / "my_rewards.py").write_text(REWARDS)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(40)))
    call = ["align", "--model", str(trained), "--method", "grpo", "--device", "cpu", "--data", str(data)]
    call += [*SHORT, "--rewards", f"my_rewards:{name}"]
    said = {**REWARDS_SAY, "nobody": "nobody returned None for every completion of a step"}[name]
    assert said in refused(call, capsys, 1 if name == "nan" else 2)
    assert Path("runs", "grpo").exists() == (name in ("nan", "nobody"))  # of the others nothing was measured


@pytest.mark.usefixtures("nothing_runs")
def test_a_resumed_run_runs_no_code_unless_it_is_trusted(tmp_path, capsys):
    """What lies in a run's directory may be anybody's."""
    run, given = tmp_path / "run", tmp_path / "given.yaml"
    run.mkdir()
    given.write_text("max-steps: 7\n")
    for method, option in (("grpo", "rewards"), ("ste", "token-reward")):
        config = {"model": DEFAULT_MODEL, "method": method, option.replace("-", "_"): "json:loads"}
        write_sealed(run / "run.json", {"schema": 2, "config": config})
        call = ["align", "--resume", str(run)]
        for more in ([], ["--config", str(given)]):
            assert f"give --{option} on the command line, or --trust-config" in told([*call, *more], capsys)
        for more in (["--trust-config"], [f"--{option}", "json:loads"]):
            with pytest.raises(AssertionError, match="accepted"):
                main([*call, *more])
    (run / "run.json").write_text(json.dumps({"config": config}))
    assert how_to_go_on(run, "align").startswith(f"logitless align --resume {run} --trust-config goes on")


@pytest.mark.usefixtures("nothing_runs")
def test_a_configuration_runs_no_code_unless_it_is_trusted(tmp_path, capsys):
    given = tmp_path / "align.yaml"
    given.write_text("method: grpo\nrewards: json:loads\n")
    assert "run its code: give --rewards on the command line, or --trust-config" in told(
        ["align", "--config", str(given)], capsys
    )
    for more in (["--trust-config"], ["--rewards", "json:loads"], ["--rewards", "python_lines"]):
        with pytest.raises(AssertionError, match="accepted"):
            main(["align", "--config", str(given), *more])
    given.write_text("method: ste\ntoken-reward: json:loads\n")
    assert "give --token-reward on the command line, or --trust-config" in told(
        ["align", "--config", str(given)], capsys
    )
    given.write_text("method: grpo\nrewards: json:loads\ntrust-config: true\n")
    assert "unknown option 'trust-config'" in told(["align", "--config", str(given)], capsys)


CAFE = os.fsdecode(b"caf\xe9")  # a name of bytes that are not UTF-8


@pytest.fixture
def named_otherwise(tmp_path, trained) -> None:
    """A text, a folder of it and a model, whose names are not UTF-8, where the system has such names."""
    try:
        (tmp_path / "here" / CAFE).mkdir()
    except OSError:
        pytest.skip("names are UTF-8 here")
    Path(CAFE, f"{CAFE}.txt").write_text("a line of text\n" * 20)
    pq.write_table(pa.table({"text": ["another text"]}), Path("a.parquet"))
    Path("a.parquet").rename(Path(CAFE, f"{CAFE}.parquet"))
    shutil.copytree(trained, f"{CAFE}.model")


@pytest.mark.usefixtures("named_otherwise")
@pytest.mark.parametrize(
    "line",
    [
        "score --model {model} --data {cafe}",
        "score --model {model} --data {cafe}/{cafe}.txt --documents {cafe}.jsonl --json {cafe}.json --store hidden",
        "eval --model {model} --data {cafe}",
        "sample --model {model} --prompt a --max-new-tokens 2 --json {cafe}.json --html {cafe}.html --parquet {cafe}.p",
        "plan --model {cafe}.model --json {cafe}.json --html {cafe}.html --png {cafe}.png",
        "profile --model {cafe}.model --context-length 8 --json {cafe}.json --html {cafe}.html --png {cafe}.png",
    ],
)
def test_names_that_are_not_utf8_are_shown_safely(line, trained, capsys):
    call = [part.format(model=trained, cafe=CAFE) for part in line.split()]
    assert main([*call, *(["--device", "cpu"] if "--max" in line or "--data" in line else [])]) == 0
    said = capsys.readouterr()
    (said.out + said.err).encode()
    for page in Path().rglob("*.html"):
        assert CAFE not in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("named_otherwise", "nothing_runs")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --model {model} --output-dir {cafe}", "--output-dir caf\\udce9: expected a path in UTF-8"),
        ("train --model {model} --resume {cafe}", "--resume caf\\udce9: no run in this directory"),
        ("align --model {model} --output-dir {cafe}/x", "--output-dir caf\\udce9/x: expected a path in UTF-8"),
        ("align --method ste --model {model} --output-dir {cafe}", "--output-dir caf\\udce9: expected a path in UTF-8"),
        ("demo --output-dir {cafe}", "--output-dir caf\\udce9: expected a path in UTF-8"),
        ("score --model {cafe}.model --data {cafe}", "--model caf\\udce9.model: expected a name in UTF-8"),
        ("sample --model {cafe}.model --prompt a", "--model caf\\udce9.model: expected a name in UTF-8"),
        ("eval --model {model} --data {cafe} --against {cafe}.model", "--against caf\\udce9.model: expected a name in"),
        ("train --model {model} --teacher {cafe}.model", "--teacher caf\\udce9.model: expected a name in UTF-8"),
        ("sample --model {model} --prompt a --stop {cafe}", "--stop must be UTF-8 text, got caf\\udce9"),
        ("sample --model {model} --prompt {cafe}", "--prompt 1: not UTF-8 text"),
    ],
)
def test_names_that_are_not_utf8_are_refused_where_models_are(line, message, trained, capsys):
    assert message in told([part.format(model=trained, cafe=CAFE) for part in line.split()], capsys)


def test_messages_without_a_chat_template(tmp_path, trained, capsys):
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = [
        "align",
        "--model",
        str(trained),
        "--data",
        str(tmp_path / "chat.jsonl"),
        "--method",
        "grpo",
        "--prompt-length",
        "8",
    ]
    call += ["--completion-length", "8"]
    assert "prompts of messages need a chat template" in refused([*call, "--device", "cpu"], capsys)


def test_memory_that_is_not_there_is_one_line(monkeypatch, capsys):
    for error in (
        MemoryError(),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ):

        def fail(arguments, error=error):
            raise error

        monkeypatch.setattr("logitless.cli.train.main", fail)
        assert "train: out of memory" in told(["train"], capsys)
