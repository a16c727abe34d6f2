"""The parts `generate` and `generate-greedy`: whole generations with a record of each token against `output_logits`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.sampling.parts import Part

KEEP = 20
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
GREEDY = {"do_sample": False}
SHAPES = {"full": (4, 512, 512, 131_072), "quick": (4, 32, 256, 16_384), "tiny": (2, 6, 16, 301)}  # B, T, H, V
LOGIT_SPREAD = 5.0
CHECKED = 16  # tokens of each sequence that are held against a forward pass in float64


@dataclass
class Generating:
    """A Qwen3 of four layers and prompts, the same in every process."""

    size: str
    options: dict[str, Any]

    def __post_init__(self) -> None:
        batch, self.length, hidden, vocab = SHAPES[self.size]
        torch.manual_seed(22)
        config = transformers.Qwen3Config(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=max(8, hidden // 8), eos_token_id=None,
        )  # fmt: skip
        self.model = transformers.Qwen3ForCausalLM(config).eval()
        self.model.lm_head.weight.data.normal_(std=LOGIT_SPREAD / hidden**0.5)
        self.prompts = {"input_ids": torch.randint(vocab, (batch, 16))}
        self.prompts["attention_mask"] = torch.ones_like(self.prompts["input_ids"])

    def run(self) -> Any:
        return self.generate(self.length)

    def generate(self, length: int) -> Any:
        raise NotImplementedError

    def error(self) -> float:
        return 0.0  # the reference itself

    @cached_property
    def checked(self) -> int:
        return min(CHECKED, self.length)


class Ours(Generating):
    """`logitless.generate`."""

    def generate(self, length: int) -> Any:
        import logitless as ll

        return ll.generate(self.model, self.prompts, keep=KEEP, max_new_tokens=length, **self.options)

    @torch.no_grad()
    def error(self) -> float:
        """Log-probs and best logits against a forward pass over what was generated; its greedy tokens as well."""
        out = self.generate(self.checked)
        z = self.model(out.ids).logits[:, 15:-1].double()
        drawn = out.ids[:, 16:, None]
        worst = float((out.record.logprob.double() - z.log_softmax(-1).gather(-1, drawn)[..., 0]).abs().max())
        worst = max(worst, float((out.record.topk_logits.double() - z.topk(KEEP).values).abs().max()))
        same = self.options["do_sample"] or torch.equal(out.ids, self.theirs())
        return worst if same else float("inf")

    def theirs(self) -> Tensor:
        return self.model.generate(**self.prompts, max_new_tokens=self.checked, **self.options)


class WithLogits(Generating):
    """transformers, every row of logits kept."""

    def generate(self, length: int) -> Any:
        kept = {"return_dict_in_generate": True, "output_logits": True}
        return self.model.generate(**self.prompts, max_new_tokens=length, **self.options, **kept)


class Plain(Generating):
    """transformers, tokens alone."""

    def generate(self, length: int) -> Any:
        return self.model.generate(**self.prompts, max_new_tokens=length, **self.options)


def part(title: str, options: dict[str, Any]) -> Part:
    def made(way: type[Generating]) -> Callable[[str], Generating]:
        return lambda size: way(size, options)

    return Part(
        title=f"Generating, {title}, keep {KEEP}",
        ways={"logitless": made(Ours), "transformers, output_logits": made(WithLogits), "transformers": made(Plain)},
        sizes={name: _said(*shape) for name, shape in SHAPES.items()},
        unit="nat",
        error_limit=1e-3,
        limits={"transformers, output_logits": 1.05},
    )


def _said(batch: int, length: int, hidden: int, vocab: int) -> str:
    """A size in words, with what the records take."""
    ours, theirs = batch * length * (40 + 8 * KEEP) / 1e6, batch * length * vocab * 4 / 1e6
    return f"B={batch}, T={length}, H={hidden}, V={vocab:,}; records {ours:.2g} MB, logits {theirs:,.4g} MB"


GENERATE = part("temperature 0.8, top_p 0.95", SAMPLED)
GENERATE_GREEDY = part("greedy", GREEDY)
