"""`LMHead`: what turns a hidden state into logits, without doing it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError, DeviceError, DtypeError, OptionError, ShapeError


@dataclass(frozen=True, eq=False)
class LMHead:
    """A language-model head: z = softcap(scale · (h · Wᵀ + b)) over the first `vocab_size` rows of W.

    Dense equivalent:

        z = scale * F.linear(hidden, weight[:vocab_size], bias[:vocab_size])
        z = softcap * torch.tanh(z / softcap) if softcap else z

    weight: (V, H), any floating dtype. bias: (V,) or None. Rows of W past `vocab_size` (padding) do not exist:
    they get no probability and no gradient. Holds references, copies nothing.
    Raises ShapeError, DtypeError, DeviceError, OptionError.
    """

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Tensor) or self.weight.dim() != 2:
            got = tuple(self.weight.shape) if isinstance(self.weight, Tensor) else type(self.weight).__name__
            raise ShapeError(f"LMHead: weight must be a (vocab, hidden) tensor, got {got}")
        if not self.weight.is_floating_point():
            raise DtypeError(f"LMHead: weight must be floating point, got {self.weight.dtype}; dequantise it first")
        rows = self.weight.shape[0]
        if self.bias is not None and not (isinstance(self.bias, Tensor) and self.bias.is_floating_point()):
            got = self.bias.dtype if isinstance(self.bias, Tensor) else type(self.bias).__name__
            raise DtypeError(f"LMHead: bias must be a floating point tensor or None, got {got}")
        if self.bias is not None and tuple(self.bias.shape) != (rows,):
            raise ShapeError(f"LMHead: bias must have shape ({rows},), one per row, got {tuple(self.bias.shape)}")
        if self.bias is not None and self.bias.device != self.weight.device:
            raise DeviceError(f"LMHead: bias is on {self.bias.device}, weight on {self.weight.device}; move one")
        if rows == 0:
            raise ShapeError("LMHead: weight has no rows; a vocabulary needs at least one entry")
        size = self.vocab_size
        if size is not None and not (isinstance(size, int) and 1 <= size <= rows):
            raise OptionError(f"LMHead: vocab_size must be in 1..{rows}, a whole number of weight's rows, got {size}")
        if not isinstance(self.scale, Real) or not math.isfinite(self.scale):
            raise OptionError(f"LMHead: scale must be a finite number, got {self.scale}")
        if self.softcap is not None and not (isinstance(self.softcap, Real) and 0 < self.softcap < math.inf):
            raise OptionError(f"LMHead: softcap must be positive or None, got {self.softcap}")

    @property
    def rows(self) -> int:
        """The number of vocabulary entries that exist."""
        return self.vocab_size if self.vocab_size is not None else self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    @classmethod
    def of(cls, module: nn.Module) -> LMHead:
        """The head of an `nn.Linear` or of a transformers model: weight, bias, tied embedding, softcap, scale.

        Dense equivalent: `z` of the returned head equals `module(hidden)` or `model(...).logits`.
        Look it up anew for every call: wrappers replace parameters. Raises ConfigError for a module without an
        output head and for heads it does not know (quantised, adapted), which it never ignores.
        """
        if _plain_linear(module):
            return cls(module.weight, module.bias)  # type: ignore[arg-type]
        find = getattr(module, "get_output_embeddings", None)
        if find is None:
            raise ConfigError(
                f"LMHead.of: {type(module).__name__} is no nn.Linear and has no get_output_embeddings(); "
                "pass LMHead(weight, bias)"
            )
        linear = find()
        if linear is None:
            raise ConfigError(f"LMHead.of: {type(module).__name__} has no output head; load the ...ForCausalLM class")
        if not _plain_linear(linear):
            raise ConfigError(
                f"LMHead.of: the output head is a {type(linear).__name__}, not a plain nn.Linear; "
                "merge its adapter or dequantise it, then pass LMHead(weight, bias)"
            )
        scale, softcap = _transforms(module)
        return cls(linear.weight, linear.bias, scale=scale, softcap=softcap)


def _plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear  # a parametrised or adapted one is of another class


MULTIPLIES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVIDES = ("logits_scaling", "logits_mup_width_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def _transforms(model: Any) -> tuple[float, float | None]:
    """(scale, softcap) that the model's configuration applies to its logits."""
    config = getattr(model, "config", None)
    if config is None:
        raise ConfigError(
            f"LMHead.of: {type(model).__name__} has no config to read softcap and scale from; pass LMHead(weight, bias)"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"LMHead.of: {type(model).__name__} is an encoder-decoder; pass LMHead(weight, bias, scale)")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = getattr(config, "model_type", "")
    scale = 1.0
    for name in MULTIPLIES + DIVIDES:
        value = getattr(config, name, None)
        if value is None or kind == "mpt":  # MPT's configuration has a logit_scale that its model never applies
            continue
        divides = name in DIVIDES and not kind.startswith("hyperclovax")
        scale = scale / float(value) if divides else scale * float(value)
    softcap = next((float(c) for name in SOFTCAPS if (c := getattr(config, name, None))), None)
    return scale, softcap
