"""`python -m docs.page_picture`: docs/images/report-light.png and report-dark.png, a plan's page in Chromium."""

from pathlib import Path
from tempfile import TemporaryDirectory

from logitless.models.catalog import shape_of
from logitless.workbench.page.page import write_page
from logitless.workbench.plan.plan import plan
from logitless.workbench.plan.setting import Setting
from tests.support.workbench.browser import chromium

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    """Takes both pictures."""
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
                browser.picture(IMAGES / f"report-{scheme}.png", whole=False)


if __name__ == "__main__":
    main()
