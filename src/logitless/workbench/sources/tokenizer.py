"""Tokenizers: the Tekken vocabulary that mistral-common carries, or whatever a model's directory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, LogitlessError, in_one_line
from ..common.bounds import bounded

TEKKEN_FILE = "tekken_240911.json"
# A chat template is a program, of whoever made the model: what it may take for a conversation, and write beside it.
MOST_SECONDS, MOST_BYTES, MOST_CHARACTERS = 5.0, 2**28, 2**20
Spans = list[tuple[int, int]]  # of characters: from, to
Tools = list[dict[str, Any]] | None  # JSON schemas of functions


class TemplateError(ConfigError):
    """A chat template that fails, as many do at conversations of a form that they do not know."""


class UnreadError(ConfigError):
    """A text that a tokenizer cannot read, as where one of words has no id for a word."""


@dataclass(frozen=True)
class TextTokenizer:
    """Text -> ids, with what a run needs to know about the vocabulary; `saved` is transformers' own object."""

    encode: Callable[[list[str]], list[list[int]]]  # plain text only: "</s>" in a document is text, not an end
    saved: Any
    size: int  # every id is below it
    eos_id: int
    opening: tuple[int, ...] = ()  # what the tokenizer puts before every text by itself: its begin-of-text id, or none

    def documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Each non-empty document's ids with the opening before and the end-of-document id behind, (length,) uint32.

        Raises UnreadError that names the document.
        """
        kept = ((number, text) for number, text in enumerate(texts, 1) if text)
        while batch := list(islice(kept, 64)):
            for ids in self._encoded(batch):
                yield np.array([*self.opening, *ids, self.eos_id], dtype=np.uint32)

    def _encoded(self, batch: list[tuple[int, str]]) -> list[list[int]]:
        try:
            return self.encode([text for _, text in batch])
        except UnreadError as error:
            if len(batch) == 1:
                number, text = batch[0]
                raise UnreadError(f"document {number}, {text[:40]!r}: {error}") from None
        return [ids for one in batch for ids in self._encoded([one])]


def tekken() -> TextTokenizer:
    """The 131,072-entry Tekken vocabulary, as a fast tokenizer that `AutoTokenizer` loads from a saved directory.

    mistral-common's own encoder does the work here (faster); a test holds the two equal.
    """
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    path = Path(mistral_common.__file__).parent / "data" / TEKKEN_FILE
    encoder = Tekkenizer.from_file(path)
    # An empty template: this vocabulary is for plain text, and a chat template would promise more.
    saved = convert_tekken_tokenizer(str(path), chat_template="")
    saved.chat_template = None
    saved.split_special_tokens = True
    saved.init_kwargs["split_special_tokens"] = True
    # A path into this machine's packages; the saved directory must stand by itself.
    saved.init_kwargs.pop("vocab_file", None)
    return TextTokenizer(
        encode=lambda texts: [encoder.encode(text, bos=False, eos=False) for text in texts],
        saved=saved,
        size=encoder.n_words,
        eos_id=encoder.eos_id,
    )


def pretrained(name: str) -> TextTokenizer:
    """The tokenizer of a local directory or hub id; ConfigError when there is none or it has no end-of-text id."""
    try:
        return _pretrained(name)
    except LogitlessError:
        raise
    except Exception as error:  # of JSON, of tokenizers in Rust, of the network and of transformers' own checks
        why = in_one_line(error)
        raise ConfigError(f"no usable tokenizer at {name}: {why}") from None


def _pretrained(name: str) -> TextTokenizer:
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    vocabulary = saved.get_vocab()
    if vocabulary.keys() <= set(saved.all_special_tokens):  # what transformers makes of a configuration alone
        raise ConfigError(
            f"no tokenizer at {name}: expected one with entries for text, got special tokens alone; put the model's "
            "tokenizer.json and tokenizer_config.json there"
        )
    eos = saved.eos_token_id
    if eos is None:
        raise ConfigError(f"the tokenizer at {name} has no eos_token; set one in its tokenizer_config.json")
    template = getattr(saved, "chat_template", None)
    if not all(isinstance(x, str | None) for x in (template.values() if isinstance(template, dict) else [template])):
        raise ConfigError(f"the tokenizer at {name}: its chat_template must be text, got {template!r:.80}")
    highest = max(chain(vocabulary.values(), [eos]))

    def encode(texts: list[str]) -> list[list[int]]:
        with reading(saved):
            return saved(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    bare, whole = encode(["a"])[0], saved("a")["input_ids"]
    opening = tuple(whole[: whole.index(bare[0])]) if bare and bare[0] in whole else ()
    return TextTokenizer(encode=encode, saved=saved, size=highest + 1, eos_id=eos, opening=opening)


@contextmanager
def reading(saved: Any) -> Iterator[None]:
    """UnreadError for what a tokenizer raises of a text: plain exceptions."""
    try:
        yield
    except Exception as error:
        raise UnreadError(
            f"the tokenizer at {saved.name_or_path} cannot read this text: {in_one_line(error)}"
        ) from None


def as_chat(messages: list[dict[str, Any]], saved: Any, to_answer: bool = True, tools: Tools = None) -> str:
    """Messages as the tokenizer's chat template writes them, and what an answer begins with behind them.

    tools: what the conversation may call. TemplateError where the template fails or writes too much, ConfigError where
    it does not end or takes too much.
    """
    given = {"add_generation_prompt": to_answer, "tokenize": False, "tools": tools}
    return _written((messages, tools), lambda: (saved.apply_chat_template(messages, **given), []))[0]


def as_marked_chat(messages: list[dict[str, Any]], saved: Any, tools: Tools = None) -> tuple[str, Spans]:
    """The same by a template that itself marks what the assistant says, and where that stands; not to be answered."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # What apply_chat_template does, which has no marks to give without tokens.
    kept = [{name: value for name, value in message.items() if value is not None} for message in messages]
    given: dict[str, Any] = {"chat_template": saved.chat_template, "return_assistant_tokens_mask": True, "tools": tools}
    given |= saved.special_tokens_map

    def write() -> tuple[str, Spans]:
        texts, spans = render_jinja_template([kept], **given)
        return texts[0], list(spans[0])  # pyright: ignore[reportReturnType]

    return _written((messages, tools), write)


def _written(given: Any, write: Callable[[], tuple[str, Spans]]) -> tuple[str, Spans]:
    try:
        most = 4 * len(str(given)) + MOST_CHARACTERS  # of objects that are nested too deeply there is no text
        with bounded(MOST_SECONDS, MOST_BYTES):
            text, spans = write()
        if len(text) > most:
            raise ValueError(f"it wrote {len(text):,} characters, expected at most {most:,}")
    except Exception as error:  # whatever a template raises
        kind = ConfigError if isinstance(error, TimeoutError | MemoryError) else TemplateError
        raise kind(f"the chat template failed: {in_one_line(error)}") from None
    return text, spans


def chat_ids(messages: list[dict[str, Any]], saved: Any) -> list[int]:
    """The tokens of messages and of what an answer begins with; the template's own markers are whole tokens."""
    text = as_chat(messages, saved)
    with reading(saved):
        return saved(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]


def prompt_ids(prompts: list[Any], tokenizer: TextTokenizer) -> list[list[int]]:
    """The tokens of prompts: messages through the chat template, text behind the opening, as documents are."""
    return [
        chat_ids(prompt, tokenizer.saved)
        if isinstance(prompt, list)
        else [*tokenizer.opening, *tokenizer.encode([prompt])[0]]
        for prompt in prompts
    ]


def byte_pairs(texts: Iterable[str], size: int) -> Any:
    """A tokenizer of `size` byte pairs learned from these texts, with a start, an end and a padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special.values()), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, split_special_tokens=True, **special)
