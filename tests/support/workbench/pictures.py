"""Draws the pictures of the page in the documentation: python -m tests.support.workbench.pictures docs/images"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from logitless.models.catalog import shape_of
from logitless.workbench.page.page import write_page
from logitless.workbench.plan.plan import plan
from logitless.workbench.plan.setting import Setting
from tests.support.workbench.browser import chromium


def draw(folder: Path) -> None:
    """report-light.png and report-dark.png."""
    setting = Setting(
        shape_of("qwen2.5-1.5b"),
        "intuitor",
        batch_size=32,
        responses_per_prompt=8,
        prompt_length=2048,
        response_length=2048,
        gpus=8,
        gradient_checkpointing=True,
    )
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        page = Path(directory) / "plan.html"
        write_page(page, plan(setting))
        with chromium(Path(directory) / "profile") as browser:
            for scheme in ("light", "dark"):
                browser.open(page, width=1180, height=1340, scheme=scheme)
                browser.picture(folder / f"report-{scheme}.png", whole=False)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
