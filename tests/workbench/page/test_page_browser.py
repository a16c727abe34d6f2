"""The page in a real browser: it loads in silence, its controls plan as Python does, and a keyboard is enough."""

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from logitless.cli.options import parse
from logitless.cli.plan import PlanConfig
from logitless.models.catalog import shape_of
from logitless.units import format_bytes
from logitless.workbench.page.page import formulas, write_page
from logitless.workbench.page.translate import translate
from logitless.workbench.plan.commands import planned
from logitless.workbench.plan.plan import at_length, both
from logitless.workbench.plan.setting import GIB, Setting
from tests.support.workbench.browser import CHROMIUM, CONTRAST, Browser, chromium
from tests.support.workbench.settings import TOLD, grid, told

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)"),
]
SETTING = Setting(
    shape_of("qwen2.5-1.5b"),
    "intuitor",
    batch_size=64,
    prompt_length=2048,
    response_length=4096,
    gpus=8,
    gradient_checkpointing=True,
)
CELLS = '[...document.querySelectorAll("#%s ~ div tbody tr")].map((row) => [...row.cells].map((c) => c.innerText))'
SHOWN, ROWS = CELLS % "phases", CELLS % "components"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_page(path, both(SETTING)[1])
    return path


def expected(setting: Setting) -> list[list[str]]:
    """The table of phases."""
    dense, ours = both(setting)
    rows = []
    for phase, after in ours.peaks.items():
        before = dense.peaks[phase]
        saved = "–" if before == after else format_bytes(before - after)
        rows.append([phase, format_bytes(before), format_bytes(after), saved])
    return rows


def change(browser: Browser, control: str, value: object, event: str = "change") -> None:
    browser.evaluate(
        f"{{ const box = document.getElementById({json.dumps(control)}); box.value = {json.dumps(str(value))};"
        f" box.dispatchEvent(new Event({json.dumps(event)})); }}"
    )


def test_it_loads_in_silence(browser, path):
    for scheme in ("light", "dark"):
        browser.open(path, scheme=scheme)
        assert browser.complaints == []
        assert browser.requests == []
        assert browser.evaluate(SHOWN) == expected(SETTING)
        assert browser.evaluate("document.title").startswith("qwen2.5-1.5b (1,543,714,304 parameters) · intuitor")


def test_the_script_plans_as_python_does(browser, path):
    browser.open(path)
    settings = list(grid())
    browser.evaluate(f"var planned = {translate({**formulas(SETTING), 'settings': settings})}; 0")
    found = browser.evaluate(f"(() => {{ const planner = planned; {TOLD} return planner.settings.map(told); }})()")
    assert found == json.loads(json.dumps([told(setting) for setting in settings]))


def test_sliders_plan_as_python_does(browser, path):
    browser.open(path)
    steps = [2**k for k in range(13)]
    for batch in (1, 512):
        change(browser, "batch_size", steps.index(batch), "input")
        assert browser.evaluate(SHOWN) == expected(replace(SETTING, batch_size=batch))
    change(browser, "gpus", 4, "input")
    setting = replace(SETTING, batch_size=512, gpus=16)
    assert browser.evaluate(SHOWN) == expected(setting)
    change(browser, "length-exact", 30_000)
    assert browser.evaluate(SHOWN) == expected(at_length(setting, 30_000))
    assert browser.evaluate("document.getElementById('length').getAttribute('aria-valuetext')") == "30,000"
    browser.evaluate("document.getElementById('reset').click()")
    assert browser.evaluate(SHOWN) == expected(SETTING)
    assert browser.complaints == []


def test_every_other_control_plans_as_python_does(browser, path):
    browser.open(path)
    setting = replace(
        SETTING, model=shape_of("gemma-2-2b"), algorithm="dpo", sharding="zero2", optimizer="adamw-8bit", micro_batch=2
    )
    for control in ("algorithm", "sharding", "optimizer", "micro_batch"):
        change(browser, control, getattr(setting, control))
    change(browser, "model", "gemma-2-2b")
    assert browser.evaluate(SHOWN) == expected(setting)
    browser.evaluate("document.getElementById('gradient_checkpointing').click()")
    assert browser.evaluate(SHOWN) == expected(replace(setting, gradient_checkpointing=False))
    browser.evaluate("document.getElementById('offload_activations').click()")
    said = "document.querySelector('[role=alert]').innerText"
    assert browser.evaluate(said).startswith("--offload-activations needs --gradient-checkpointing")
    browser.evaluate("document.getElementById('gradient_checkpointing').click()")
    light = replace(setting, offload_activations=True)
    assert browser.evaluate(SHOWN) == expected(light) != expected(setting)
    change(browser, "mlp_tiles", 16)
    assert browser.evaluate(SHOWN) == expected(replace(light, mlp_tiles=16)) != expected(light)
    assert browser.evaluate(said) == ""
    assert browser.evaluate("document.getElementById('headline').textContent").startswith("gemma-2-2b (2,614,341,888")


def test_verdicts(browser, path):
    browser.open(path)
    dense, ours = both(SETTING)
    text = {
        way: browser.evaluate(f"document.getElementById('verdict-{way}').innerText") for way in ("dense", "logitless")
    }
    assert f"does not fit, {format_bytes(-dense.margin)} too much" in text["dense"]
    assert f"fits, {format_bytes(ours.margin)} left" in text["logitless"]
    assert f"largest single allocation: {ours.largest.name}, {format_bytes(ours.largest.largest)}" in text["logitless"]


def test_a_mistake_is_one_line_and_the_numbers_stay(browser, path):
    browser.open(path)
    change(browser, "batch_size-exact", 0)
    assert browser.evaluate("document.querySelector('[role=alert]').innerText") == (
        "--batch-size must be 1 to 2^63-1, got 0"
    )
    assert browser.evaluate(SHOWN) == expected(SETTING)
    change(browser, "batch_size-exact", 32)
    assert browser.evaluate("document.querySelector('[role=alert]').innerText") == ""
    assert browser.evaluate(SHOWN) == expected(replace(SETTING, batch_size=32))
    assert browser.complaints == []


def test_text_that_is_no_number_is_said(browser, path):
    browser.open(path)
    said = "document.querySelector('[role=alert]').innerText"
    change(browser, "batch_size-exact", "many")
    assert browser.evaluate(said) == 'Batch size: expected a number, got "many"'
    assert browser.evaluate("document.getElementById('batch_size-exact').getAttribute('aria-invalid')") == "true"
    assert browser.evaluate(SHOWN) == expected(SETTING)
    change(browser, "gpu_bytes-exact", "-1")
    assert browser.evaluate(said) == 'GPU memory: expected a number of GiB, got "-1"'
    change(browser, "length-exact", "8,192")
    assert browser.evaluate(said) == ""
    assert browser.evaluate("document.getElementById('batch_size-exact').value") == "64"
    assert browser.evaluate(SHOWN) == expected(at_length(SETTING, 8192))


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_model_and_memory_are_above_the_fold(browser, path, width, height):
    browser.open(path, width=width, height=height)
    for control in ("model", "gpu_bytes", "gpu_bytes-exact"):
        box = browser.evaluate(f"document.getElementById({control!r}).getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] < box["bottom"] <= height


def other(browser: Browser) -> Setting:
    """A setting far from the page's own, set by its controls."""
    change(browser, "model", "qwen3-4b")
    change(browser, "gpu_bytes-exact", "22.5")
    change(browser, "batch_size-exact", 24)
    change(browser, "optimizer", "adamw-bf16")
    browser.evaluate("document.getElementById('master_weights').click()")
    shape = shape_of("qwen3-4b")
    sizes = {"gpu_bytes": int(22.5 * GIB), "batch_size": 24}
    return replace(SETTING, model=shape, optimizer="adamw-bf16", master_weights=False, **sizes)


def test_a_link_restores_the_setting(browser, path, tmp_path):
    browser.open(path)
    setting = other(browser)
    assert browser.evaluate(SHOWN) == expected(setting)
    fragment = browser.evaluate("document.getElementById('link').getAttribute('href')")
    assert fragment == browser.evaluate("location.hash")
    sent = shutil.copy(path, tmp_path / "sent.html")
    browser.open(sent, fragment=fragment)
    assert browser.evaluate(SHOWN) == expected(setting)
    browser.open(shutil.copy(path, tmp_path / "damaged.html"), fragment="#batch_size=24&model=nothing&gpus=0x")
    said = browser.evaluate("document.querySelector('[role=alert]').innerText")
    assert said == "the link's model=nothing, gpus=0x cannot be read, and is left out"
    assert browser.evaluate(SHOWN) == expected(replace(SETTING, batch_size=24))
    browser.open(shutil.copy(path, tmp_path / "refused.html"), fragment="#batch_size=0")
    assert browser.evaluate("document.querySelector('[role=alert]').innerText").startswith("--batch-size must be")
    assert browser.evaluate(SHOWN) == expected(SETTING)
    assert browser.complaints == []


def test_the_command_plans_the_same(browser, path):
    browser.open(path)
    told = "document.getElementById('command').textContent"
    assert browser.evaluate(told) == planned(SETTING)
    setting = other(browser)
    assert browser.evaluate(told) == planned(setting)
    arguments = shlex.split(planned(setting))[2:]
    read = parse(PlanConfig, prog="logitless plan", description="", arguments=arguments)
    assert expected(read.setting()) == expected(setting)


def test_bytes_past_two_to_the_53(browser, path):
    browser.open(path)
    change(browser, "length-exact", 2**40 + 1)
    assert browser.evaluate(SHOWN) == expected(at_length(SETTING, 2**40 + 1))


def test_a_keyboard_is_enough(browser, path):
    browser.open(path)
    reached = []
    for _ in range(14):
        browser.press("Tab")
        reached.append(browser.evaluate("document.activeElement.id || document.activeElement.className"))
    assert reached[:2] == ["skip", "theme"]
    assert {"batch_size", "length", "gpus", "batch_size-exact", "reset"} <= set(reached)
    browser.evaluate("document.getElementById('batch_size').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate(SHOWN) == expected(replace(SETTING, batch_size=128))
    browser.press("Home")
    assert browser.evaluate(SHOWN) == expected(replace(SETTING, batch_size=1))
    browser.evaluate("document.getElementById('theme').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate("document.getElementById('theme').getAttribute('aria-pressed')") == "true"


def test_dense_against_logitless(browser, path):
    browser.open(path)
    segments = "document.querySelectorAll('figure rect').length"
    both_ways = browser.evaluate(segments)
    browser.evaluate("document.querySelector('input[value=logitless]').click()")
    one = browser.evaluate(segments)
    assert 0 < one < both_ways
    titles = browser.evaluate("[...document.querySelectorAll('figure rect title')].map((t) => t.textContent)")
    assert all(title.startswith("logitless, ") for title in titles)
    browser.evaluate("document.querySelector('input[value=dense]').click()")
    assert browser.evaluate(segments) == both_ways - one


def test_a_phase_filters_the_components(browser, path):
    browser.open(path)
    ours = both(SETTING)[1]
    everything = browser.evaluate(ROWS)
    browser.evaluate("document.querySelector('[data-phase=rollout]').click()")
    rollout = browser.evaluate(ROWS)
    assert len(rollout) < len(everything)
    names = {c.name for c in ours.components if "rollout" in c.phases}
    assert names <= {row[0] for row in rollout}
    assert browser.evaluate("document.activeElement.dataset.phase") == "rollout"
    browser.press("Enter")
    assert browser.evaluate(ROWS) == everything


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_is_wider_than_the_window(browser, path, width):
    browser.open(path, width=width, height=800)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelector('svg').getBoundingClientRect().right") <= width
    browser.evaluate("document.querySelector('details').open = true")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_has_a_name(browser, path):
    """Each control and each picture has an accessible name."""
    browser.open(path)
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"slider", "spinbutton", "button", "combobox", "checkbox", "radio", "image", "region", "table"}
    nodes = [n for n in tree if not n.get("ignored") and n.get("role", {}).get("value") in roles - {"table"}]
    assert len(nodes) > 10
    assert [n for n in nodes if not n.get("name", {}).get("value")] == []


def test_a_profile(browser, tmp_path):
    run = {
        "stages": [
            {"name": "parameters", "bytes": 8 * GIB, "peak_bytes": 8 * GIB, "start": 0, "end": 2},
            {"name": "loss", "bytes": 20 * GIB, "peak_bytes": 30 * GIB, "start": 2, "end": 6},
        ],
        "peak": {
            "bytes": 30 * GIB,
            "stage": "loss",
            "op": "mm.default",
            "module": "lm_head",
            "event": 5,
            "categories": {"parameters": 8 * GIB, "logits": 22 * GIB},
            "tensors": [
                {"bytes": 9, "shape": [1, 2], "dtype": "bfloat16", "op": "mm", "module": "x", "category": "logits"}
            ],
        },
        "timeline": [[0, 0], [2, 8 * GIB], [5, 30 * GIB], [6, 20 * GIB]],
        "lint": [],
    }
    path = tmp_path / "profile.html"
    write_page(path, both(SETTING)[1], {"schema": 1, "runs": {"dense": run, "logitless": run}})
    browser.open(path)
    assert browser.complaints == []
    text = browser.evaluate("document.body.innerText")
    assert "30.00 GiB in loss, asked for by mm.default in lm_head" in text
    assert browser.evaluate("document.querySelectorAll('#timeline ~ figure path.trace').length") == 2
    assert browser.evaluate(SHOWN) == expected(SETTING)
    write_page(path, profile={"schema": 1, **run})
    browser.open(path)
    assert browser.complaints == []
    assert "30.00 GiB in loss" in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.getElementById('phases')") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser, path, scheme):
    """Contrast of at least 4.5 to 1, as WCAG 2 asks of text."""
    browser.open(path, scheme=scheme)
    found = browser.evaluate(CONTRAST)
    assert len(found) > 50
    assert [(text, round(ratio, 2)) for text, ratio in found if ratio < 4.5] == []
