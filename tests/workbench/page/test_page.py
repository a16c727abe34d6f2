"""The report's page: one file that needs nothing else, and a script that plans exactly as Python does."""

import json
import re
from dataclasses import replace

import pytest

from logitless.models.catalog import CONFIGS, shape_of
from logitless.workbench.page.page import formulas, page, write_page
from logitless.workbench.page.translate import translate
from logitless.workbench.plan.plan import plan
from logitless.workbench.plan.setting import Setting
from tests.support.workbench.browser import NODE, run_node
from tests.support.workbench.settings import TOLD, grid, told

SETTING = Setting(shape_of("qwen3-0.6b"), batch_size=8, response_length=4096)
PROFILE = {
    "schema": 1,
    "stages": [{"name": "parameters", "bytes": 5, "peak_bytes": 5, "start": 0, "end": 1}],
    "peak": {
        "bytes": 9,
        "stage": "loss",
        "op": "mm",
        "module": "</script>",
        "event": 1,
        "categories": {},
        "tensors": [],
    },
    "timeline": [[0, 0], [1, 9]],
    "lint": [],
}
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def test_a_page_is_whole():
    text = page(plan(SETTING))
    assert not re.findall(r"\{\{\w*\}\}", text)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, nothing that is fetched
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", text)
    assert "default-src 'none'" in text
    assert "751,632,384 parameters" in text or f"{SETTING.model.parameters:,} parameters" in text
    for name in CONFIGS:
        assert json.dumps(name) in text


def test_names_are_text_and_never_markup():
    named = replace(SETTING, model=replace(SETTING.model, name="</script><b>&\u2028"))
    text = page(plan(named), PROFILE)
    assert text.count("</script>") == 2
    assert "<b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in text


def test_a_page_of_a_profile_alone():
    text = page(profile=PROFILE)
    step = {"model": "a <b", "context_length": 4096, "batch_size": 2}
    titled = page(profile={**PROFILE, "step": step, "parameters": 1234})
    assert "<title>a &lt;b (1,234 parameters) · 2 × 4,096 tokens" in titled
    assert "<title>A training step</title>" in text
    assert "dense_parts" not in text
    assert set(formulas(None)) == {"format_bytes"}


def test_it_is_written_as_utf8(tmp_path):
    write_page(tmp_path / "a.html", plan(SETTING))
    assert "8 × 4,096 tokens" in (tmp_path / "a.html").read_text(encoding="utf-8")


@needs_node
def test_the_script_plans_as_python_does():
    settings = list(grid())[::3]  # all of them in the browser's tests
    settings.append(replace(SETTING, gpu_bytes=3 << 29, reserve=99 << 30))
    script = translate({**formulas(SETTING), "settings": settings})
    found = run_node(f"const planner = {script};\n{TOLD}\nconsole.log(JSON.stringify(planner.settings.map(told)));")
    expected = [told(setting) for setting in settings]
    assert found == json.loads(json.dumps(expected))
    failed = [text for text in expected if isinstance(text, str)]
    assert failed[-1].endswith("--reserve 99.00 GiB leaves nothing of a GPU's 1.50 GiB")
    assert len(expected) - len(failed) > 150  # plans,
    assert len(failed) > 20  # and mistakes, with the same words
    assert max(int(plans[2][0][3]) for plans in expected if not isinstance(plans, str)) > 2**53
