"""Options: files, defaults, and what has no meaning."""

from pathlib import Path
from typing import get_type_hints

import pytest

from logitless.cli.doctor import DoctorConfig
from logitless.cli.options import method_of
from logitless.cli.plan import PlanConfig
from logitless.cli.profile import ProfileConfig
from logitless.cli.verify import VerifyConfig
from logitless.errors import OptionError
from logitless.units import format_bytes, parse_bytes
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.common.options import Option, check_values, from_dict, read_file
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.sampling.config import SampleConfig
from logitless.workbench.scoring.config import ScoreConfig
from logitless.workbench.sft.config import TrainConfig

MODELS = (AlignConfig, GradeConfig, ScoreConfig, SampleConfig)  # options of commands that load a model, beside train's
TOML = """
max-steps = 7
learning_rate = 1e-4
memory-budget = "64MiB"
lora_rank = 4
data = "x.txt"
loss = "dense"
"""


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MiB", 2**28), ("10GB", 10**10), ("10 gb", 10**10), ("1.5KiB", 1536), ("7", 7), ("1e3", 1000), (512, 512)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "0", "10 parsecs", "1.2.3", "nan"])
def test_sizes_without_a_meaning(text):
    with pytest.raises(OptionError, match="--memory-budget must be"):
        TrainConfig(memory_budget=text).check()


def test_sizes_for_people():
    shown = [format_bytes(n) for n in (3 * 2**29, 2**28, 2048, 5, 3 * 2**40)]
    assert shown == ["1.50 GiB", "256 MiB", "2 KiB", "5 B", "3,072.00 GiB"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_length", 1),
        ("batch_size", 0),
        ("gradient_accumulation_steps", -1),
        ("max_steps", 0),
        ("max_steps", 2**31),
        ("lora_rank", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate", 1e39),
        ("seed", -1),
        ("seed", 2**32),
        ("device", "tpu"),
        ("model", ""),
    ],
)
def test_values_without_a_meaning(name, value):
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} must be"):
        TrainConfig(**{name: value}).check()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "max-steps: 7\nlearning_rate: 1e-4\nmemory-budget: 64MiB\nlora_rank: 4\ndata: x.txt\nloss: dense\n"),
        ("a.toml", TOML),
    ],
)
def test_files(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    expected = TrainConfig(
        max_steps=7, learning_rate=1e-4, memory_budget="64MiB", lora_rank=4, data="x.txt", loss="dense"
    )
    assert read_file(path, TrainConfig()) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "max_step: 7", "unknown option 'max_step'"),
        ("a.yaml", "max_steps: many", "max_steps must be of type int, got 'many'"),
        ("a.yaml", "max_steps: 1.5", "must be of type int"),
        ("a.yaml", "max_steps: true", "must be of type int"),
        ("a.yaml", "gradient_checkpointing: 1", "must be of type bool"),
        ("a.yaml", "loss: fast", "must be one of auto, dense, logitless"),
        ("a.yaml", "output_dir: 7", "output_dir must be of type Path, got 7"),
        ("a.yaml", "data: ''", "a.yaml: data is empty: give a value, or leave it out"),
        ("a.yaml", "- a\n- b", "expected a table of options"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "not YAML"),
        ("a.toml", "max_steps = = 1", "a.toml"),
        ("a.ini", "", "expected a .yaml, .toml or .json file"),
    ],
)
def test_files_that_hold_something_else(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        read_file(path, TrainConfig())
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OptionError, match="No such file"):
        read_file(tmp_path / "none.yaml", TrainConfig())


def test_a_record_of_the_options_gives_them_back():
    config = TrainConfig(max_steps=3, dtype="bfloat16", data="d", learning_rate=1e-3, json=Path("x"))
    again = from_dict(config.to_dict(), "here", TrainConfig())
    assert again == TrainConfig(max_steps=3, dtype="bfloat16", data="d", learning_rate=1e-3)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("memory_budget", (AlignConfig, GradeConfig, ScoreConfig, SampleConfig, DoctorConfig)),
        ("lora_rank", (AlignConfig, GradeConfig, PlanConfig, ProfileConfig)),
        ("dtype", (AlignConfig, GradeConfig, ScoreConfig, SampleConfig)),
        ("device", (AlignConfig, GradeConfig, ScoreConfig, SampleConfig, DoctorConfig)),
        (
            "json",
            (
                AlignConfig,
                GradeConfig,
                ScoreConfig,
                SampleConfig,
                PlanConfig,
                ProfileConfig,
                DoctorConfig,
                VerifyConfig,
            ),
        ),
        ("mlp_tiles", (PlanConfig, ProfileConfig)),
    ],
)
def test_an_option_of_several_commands_is_declared_once(name, kinds):
    """Its type, its help and its check."""
    first = get_type_hints(TrainConfig, include_extras=True)[name]
    assert any(isinstance(part, Option) for part in first.__metadata__)
    for kind in kinds:
        assert get_type_hints(kind, include_extras=True)[name] == first


@pytest.mark.parametrize("kind", [SampleConfig, DoctorConfig])
def test_shared_options_are_checked_for_every_command(kind):
    for name, value in (("device", "tpu"), ("memory_budget", "nothing")):
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} must be"):
            check_values(kind(**{name: value}))


VALUES = {
    "a tag that does not fit": ("max_steps: !!bool x", "not YAML: a value that its tag does not fit"),
    "another": ("max_steps: !!timestamp x", "not YAML: a value that its tag does not fit"),
    "digits": ("max_steps: 0x" + "f" * 5000, "max_steps must be of type int, got a number of too many digits"),
    "digits for text": ("data: 0x" + "f" * 5000, "data must be of type str, got a number of too many digits"),
    "digits for a name": (
        "? 0x" + "f" * 5000 + "\n: 1",
        "unknown option a number of too many digits; options are model,",
    ),
    "infinity for text": ("data: .inf", "data must be of type str, got inf"),
    "NUL": ('output_dir: "a\\0b"', "output_dir must be without NUL and halves of characters, got 'a\\x00b'"),
    "half a character": ('data: "\\ud800"', "data must be without NUL and halves of characters, got '\\ud800'"),
    "long": ("max_steps: " + "x" * 5000, "max_steps must be of type int, got 'xxxx"),
    "a list": ("[]", "expected a table of options, got list"),
    "a number": ("0", "expected a table of options, got int"),
    "an option twice": ("max_steps: 1\nmax-steps: 2", "max_steps is given twice, as max_steps and as max-steps"),
    "an option twice, in one spelling": ("max_steps: 1\nmax_steps: 2", "'max_steps' is given twice: give it once"),
    "deep": ("max_steps: [[[[[[1]]]]]]", "max_steps must be of type int, got [[[...]]]"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_a_file_that_no_option_can_have(kind, tmp_path):
    """Each is one short line, however PyYAML and Python fail at them."""
    text, expected = VALUES[kind]
    path = tmp_path / "given.yaml"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        read_file(path, TrainConfig())
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("suffix", "text"), [("yaml", "seed: 7"), ("json", '{"seed": 7}'), ("toml", "seed = 7")])
def test_a_byte_order_mark_is_passed_over(suffix, text, tmp_path):
    path = tmp_path / f"given.{suffix}"
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert read_file(path, TrainConfig()).seed == 7


def test_an_option_twice_in_json(tmp_path):
    path = tmp_path / "given.json"
    path.write_text('{"max_steps": 1, "seed": 2, "max_steps": 1}')
    with pytest.raises(OptionError, match=r"--config .*given.json: 'max_steps' is given twice: give it once"):
        read_file(path, TrainConfig())


def test_an_empty_file_gives_no_option(tmp_path):
    path = tmp_path / "given.yaml"
    path.write_text("# nothing\n")
    assert read_file(path, TrainConfig()) == TrainConfig()


def test_a_file_of_other_bytes_than_utf8_has_its_name():
    assert from_dict({"data": "caf\udce9"}, "run.json", TrainConfig()).data == "caf\udce9"


def test_a_method_of_too_many_digits(tmp_path):
    path = tmp_path / "given.yaml"
    path.write_text("method: 0x" + "f" * 5000)
    assert method_of(["--config", str(path)]) == "a number of too many digits"
