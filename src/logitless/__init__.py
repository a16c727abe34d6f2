"""Language-model losses, statistics and sampling without the vocabulary-sized logits tensor.

Names are imported on first use (PEP 562), so that `import logitless` costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logitless import losses as losses
    from logitless import memory as memory
    from logitless import relax as relax
    from logitless.integrations.transformers.generation import generate as generate
    from logitless.integrations.transformers.install import hidden_states as hidden_states
    from logitless.integrations.transformers.install import install as install
    from logitless.integrations.transformers.install import uninstall as uninstall
    from logitless.integrations.transformers.scoring import score as score
    from logitless.logits import chunked_self_certainty as chunked_self_certainty
    from logitless.logits import per_token_logps as per_token_logps
    from logitless.sample.tokens import sample_tokens as sample_tokens
    from logitless.vocab.api import TokenStats as TokenStats
    from logitless.vocab.api import explain as explain
    from logitless.vocab.api import linear_cross_entropy as linear_cross_entropy
    from logitless.vocab.api import token_loss as token_loss
    from logitless.vocab.api import token_stats as token_stats
    from logitless.vocab.head.lm_head import LMHead as LMHead
    from logitless.vocab.head.low_rank import LowRank as LowRank
    from logitless.vocab.head.shard import VocabShard as VocabShard
    from logitless.vocab.ranks.collectives import count_tokens as count_tokens

_MODULE_OF = {
    "LMHead": "logitless.vocab.head.lm_head",
    "LowRank": "logitless.vocab.head.low_rank",
    "VocabShard": "logitless.vocab.head.shard",
    "count_tokens": "logitless.vocab.ranks.collectives",
    "TokenStats": "logitless.vocab.api",
    "token_stats": "logitless.vocab.api",
    "token_loss": "logitless.vocab.api",
    "linear_cross_entropy": "logitless.vocab.api",
    "explain": "logitless.vocab.api",
    "sample_tokens": "logitless.sample.tokens",
    "generate": "logitless.integrations.transformers.generation",
    "score": "logitless.integrations.transformers.scoring",
    "per_token_logps": "logitless.logits",
    "chunked_self_certainty": "logitless.logits",
    "losses": "logitless.losses",
    "relax": "logitless.relax",
    "memory": "logitless.memory",
    "install": "logitless.integrations.transformers.install",
    "uninstall": "logitless.integrations.transformers.install",
    "hidden_states": "logitless.integrations.transformers.install",
}

__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name == "__version__":
        from logitless.versions import version_of

        globals()[name] = version_of("logitless")
        return globals()[name]
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'logitless' has no attribute {name!r}; it has {', '.join(sorted(_MODULE_OF))}")
    module = import_module(_MODULE_OF[name])
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "__version__"])
