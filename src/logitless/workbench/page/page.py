"""The report as one HTML file that opens offline: the plan, computed again in the page, and a profile's timeline."""

from __future__ import annotations

import html
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...models.catalog import CONFIGS, shape_of
from ...pages import document, fill, script_value
from ...units import format_bytes
from ...versions import version_of
from ..common.files import write_text
from ..plan.commands import ALWAYS
from ..plan.plan import Plan, at_length, both
from ..plan.plots import CATEGORIES, category
from ..plan.report import headline, lives, notes
from ..plan.setting import CHOICES, Setting
from .translate import translate

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("dom.js", "plan.js", "timeline.js", "main.js")
FORMULAS = (at_length, both, category, format_bytes, headline, lives, notes)


def write_page(path: Path, plan: Plan | None = None, profile: dict[str, Any] | None = None, units: str = "GiB") -> None:
    """Writes the page of a plan, of a profile (its JSON), or of both."""
    write_text(path, page(plan, profile, units))


def page(plan: Plan | None = None, profile: dict[str, Any] | None = None, units: str = "GiB") -> str:
    """The HTML. The plan's script is translated from the planner's own functions; nothing is fetched."""
    title = _title(plan, profile or {}, units)
    parts = {
        "title": html.escape(title),
        "planner": translate(formulas(None if plan is None else plan.setting)),
        "profile": script_value(profile),
        "units": script_value(units),
        "script": "\n".join(_asset(name) for name in SCRIPTS),
        "footer": f"Made by logitless {version_of('logitless')}. All sizes are those of one GPU.",
    }
    return document(title, _asset("page.css"), fill(ASSETS / "page.html", parts))


def _title(plan: Plan | None, profile: dict[str, Any], units: str) -> str:
    if plan is not None:
        return headline(plan.setting, units)
    if "step" not in profile:
        return "A training step"
    from ..profile.step import Step
    from ..profile.tables import headline as headline_of_step

    return headline_of_step(Step(**profile["step"]), profile["parameters"])


def formulas(setting: Setting | None) -> dict[str, Any]:
    """What the page's script knows of Python: functions, and with a setting every preset's shape and all choices."""
    if setting is None:
        return {"format_bytes": format_bytes}
    models = {name: shape_of(name) for name in CONFIGS} | {setting.model.name: setting.model}
    values = {"setting": setting, "models": models, "choices": CHOICES, "categories": CATEGORIES}
    values |= {"knobs": [f.name for f in fields(Setting)], "defaults": Setting(setting.model), "always": ALWAYS}
    return {**{function.__name__: function for function in FORMULAS}, **values}


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
