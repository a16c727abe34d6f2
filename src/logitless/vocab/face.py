"""What `sample`, `relax`, `models`, `integrations` and the workbench may use of the pass: nothing else of it is theirs.

The public names of `logitless` come first; the rest is for whoever reads a pass's chunks or adds to its gradients.
"""

from .api import TokenStats, explain, linear_cross_entropy, token_loss, token_stats
from .backends.base import Accumulated
from .backends.chunk import Chunk, Tile
from .backends.compiled.search import search_of
from .backends.eager.topk import keep_topk
from .backends.load import load
from .backends.logits import exp_
from .backends.rows import add_at, dot, scatter, weighted
from .call.call import Call
from .call.choice import CANDIDATES
from .call.lora import agreed, lora_b_of, lora_hidden_of, with_lora
from .call.options import Options
from .call.sampling_mask import SamplingMask
from .call.validate import check_hidden, check_logits, check_real, divisor_of, flatten
from .devices import autocast_dtype, capturing, default_budget, full_precision
from .dtypes import compute_dtype, dtype_of, of_integers
from .head.from_model import encodes, transforms_of, transforms_of_model
from .head.lm_head import LMHead, place
from .head.peft import unwrapped
from .head.quantised import QuantisedWeight
from .head.shard import VocabShard, group_named, localised
from .noise import Noise, at_a_time, gumbel
from .passes.engine import Pass
from .passes.max_pool import Documents, max_pool, max_pool_kept
from .ranks.agreement import gather_rows, on_all
from .ranks.collectives import Ranks, best_of_all, first_on_all, reason_of, spread, summed
from .reference import dense_cross_entropy
from .sizing import Sizing, current_sizing, sizing

__all__ = [
    "CANDIDATES",
    "Accumulated",
    "Call",
    "Chunk",
    "Documents",
    "LMHead",
    "Noise",
    "Options",
    "Pass",
    "QuantisedWeight",
    "Ranks",
    "SamplingMask",
    "Sizing",
    "Tile",
    "TokenStats",
    "VocabShard",
    "add_at",
    "agreed",
    "at_a_time",
    "autocast_dtype",
    "best_of_all",
    "capturing",
    "check_hidden",
    "check_logits",
    "check_real",
    "compute_dtype",
    "current_sizing",
    "default_budget",
    "dense_cross_entropy",
    "divisor_of",
    "dot",
    "dtype_of",
    "encodes",
    "exp_",
    "explain",
    "first_on_all",
    "flatten",
    "full_precision",
    "gather_rows",
    "group_named",
    "gumbel",
    "keep_topk",
    "linear_cross_entropy",
    "load",
    "localised",
    "lora_b_of",
    "lora_hidden_of",
    "max_pool",
    "max_pool_kept",
    "of_integers",
    "on_all",
    "place",
    "reason_of",
    "scatter",
    "search_of",
    "sizing",
    "spread",
    "summed",
    "token_loss",
    "token_stats",
    "transforms_of",
    "transforms_of_model",
    "unwrapped",
    "weighted",
    "with_lora",
]
