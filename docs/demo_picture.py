"""`python -m docs.demo_picture [demo.html]`: docs/images/demo.png, the demo's page as Chromium shows it.

Without a page: that of the newest run of `logitless demo` below runs/.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.workbench.browser import chromium

IMAGE = Path(__file__).parent / "images" / "demo.png"
WIDTH, HEIGHT = 1100, 1250


def newest() -> Path:
    """The page of the newest run."""
    return max(Path("runs").glob("demo*/demo.html"), key=lambda path: path.stat().st_mtime)


def main(arguments: list[str]) -> None:
    """Takes the picture and says where it lies."""
    page = Path(arguments[0]) if arguments else newest()
    with TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        browser.open(page, WIDTH, HEIGHT)
        browser.picture(IMAGE, whole=False)
    print(f"{IMAGE}: {page}")


if __name__ == "__main__":
    main(sys.argv[1:])
