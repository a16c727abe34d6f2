"""Which units the sizes in a printed table have."""

import re

SIZE = re.compile(r"[\d.,]+ ([TGMK]iB|[TGMk]B|B)\b")


def assert_one_unit(text: str, begin: str, end: str) -> None:
    """All sizes between the lines that hold these words, two or more, have one unit."""
    part = text[text.index(begin) : text.index(end, text.index(begin))]
    found = SIZE.findall(part)
    assert len(found) > 1, part
    assert len(set(found)) == 1, part
