"""The exported names are the documented ones, few, and each says what it is."""

import inspect
import re
from pathlib import Path

import pytest

import logitless

API_PAGE = Path(__file__).parents[1] / "docs" / "api.md"
SOURCE = re.compile(r"arXiv:\d{4}\.\d{5}|, (19|20)\d\d\.$", flags=re.MULTILINE)
WITHOUT_SOURCE = {"batch_loss", "nll", "record_kl", "sequence_logprob"}  # no paper's own


def test_few_names():
    assert len(logitless.__all__) <= 20
    assert set(logitless.__all__) <= set(dir(logitless))


def test_exported_names_are_the_documented_ones():
    documented = re.findall(r"^::: logitless\.(\w+)\s*$", API_PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(documented) == sorted([*logitless.__all__, "errors"])  # a module that is imported by itself


@pytest.mark.parametrize("name", logitless.__all__)
def test_every_name_explains_itself(name):
    assert (inspect.getdoc(getattr(logitless, name)) or "").strip()


@pytest.mark.parametrize("name", logitless.losses.__all__)
def test_every_loss_cites_its_source_and_shows_its_formula(name):
    doc = inspect.getdoc(getattr(logitless.losses, name)) or ""
    assert bool(SOURCE.search(doc)) == (name not in WITHOUT_SOURCE)
    assert re.search(r"^ {4}\S", doc, flags=re.MULTILINE), "the dense equivalent as code"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="token_stats"):
        _ = logitless.no_such_name
