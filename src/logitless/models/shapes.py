"""The sizes of a decoder and what follows from them: exact parameter counts, cache sizes (no torch import)."""

from __future__ import annotations

from dataclasses import dataclass

from .nsa.options import NSAOptions

BLOCK, STRIDE, SELECTED = NSAOptions.block, NSAOptions.stride, NSAOptions.selected


@dataclass(frozen=True)
class Traced:
    """Bytes per token that layers take, 0: not known; `scores`: for each token of the sequence, where made whole."""

    kept: int = 0  # by all layers for their backward pass
    layer: int = 0  # by the largest
    work: int = 0  # at work in it beyond that
    kept_scores: int = 0
    layer_scores: int = 0
    work_scores: int = 0
    rank: int = 0  # of the adapters that they had; 0: all was trained


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; counts are exact for `transformers`' class of the same model_type."""

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # width of a dense MLP
    tied: bool
    norms: int = 2
    qk_norm: bool = False
    fp32_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    softcap: bool = False
    attention_softcap: bool = False
    window: int = 0  # tokens that a windowed layer attends to
    windowed_layers: int = 0
    moe_layers: int = 0
    experts: int = 0
    active_experts: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0  # width of the expert that every token passes
    adapted_experts: bool = False  # PEFT adapts the experts and their router, and then no dense MLP beside them
    sparse: bool = False  # native sparse attention, with blocks of the usual sizes
    in_catalog: bool = True  # False: of a family that only transformers knows
    uncounted: int = 0  # parameters of such a one beyond this arithmetic
    traced: Traced = Traced()  # what the layers of such a family take
    stateful: bool = False  # layers carry a state from token to token, as Mamba's and linear attention's do
    positions: int = 0  # the longest context that they reach; 0: not stated
    stretches: bool = False  # whether --rope-scaling takes the positions further

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads together; the value heads' too."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; of an untied head as well."""
        return self.vocab * self.hidden

    @property
    def head(self) -> int:
        """Parameters of a head of its own, 0 when tied."""
        return 0 if self.tied else self.embedding

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a dense layer's matrices, in the order q, k, v, o, gate, up, down."""
        h, q, k, i = self.hidden, self.query, self.key, self.mlp
        return (h, q), (h, k), (h, k), (q, h), (h, i), (h, i), (i, h)

    @property
    def sparse_linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of what sparse attention adds to a layer: gates, and keys and values compressed."""
        block = BLOCK * self.head_dim
        return ((self.hidden, 3 * self.heads), (block, self.head_dim), (block, self.head_dim)) if self.sparse else ()

    @property
    def sparse_parameters(self) -> int:
        """Parameters of these, with their biases."""
        return sum(a * b + b for a, b in self.sparse_linears)

    @property
    def layer_matrices(self) -> int:
        """Parameters of a dense layer's matrices."""
        return sum(a * b for a, b in self.linears)

    @property
    def layer_vectors(self) -> int:
        """Parameters of a layer's norms and attention biases."""
        bias = self.qkv_bias * (self.query + 2 * self.key) + self.out_bias * self.hidden
        return self.norms * self.hidden + self.qk_norm * 2 * self.head_dim + bias

    @property
    def dense_layer(self) -> int:
        """Parameters of a layer with one MLP."""
        bias = self.mlp_bias * (2 * self.mlp + self.hidden)
        return self.layer_matrices + self.layer_vectors + self.sparse_parameters + bias

    @property
    def moe_layer(self) -> int:
        """Parameters of a mixture-of-experts layer."""
        h = self.hidden
        shared = 3 * h * self.shared_mlp + h if self.shared_mlp else 0
        experts = self.experts * (h + 3 * h * self.expert_mlp) + shared
        return sum(a * b for a, b in self.linears[:4]) + self.layer_vectors + self.sparse_parameters + experts

    @property
    def body(self) -> int:
        """Parameters of the layers and the last norm."""
        layers = (self.layers - self.moe_layers) * self.dense_layer + self.moe_layers * self.moe_layer
        return layers + self.hidden + self.uncounted

    @property
    def vectors(self) -> int:
        """Parameters of norms and biases, which tensor parallelism keeps whole."""
        return self.layers * self.layer_vectors + self.hidden

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer, what a sharded model gathers at a time; of the uncounted its equal part."""
        dense = self.dense_layer if self.moe_layers < self.layers else 0
        return max(dense, self.moe_layer if self.moe_layers else 0) + self.uncounted // self.layers

    @property
    def last_matrix(self) -> int:
        """Parameters of a layer's last matrix, or stack of experts': the first to get a gradient."""
        dense = self.hidden * self.mlp if self.moe_layers < self.layers else 0
        return max(dense, self.experts * self.hidden * self.expert_mlp if self.moe_layers else 0)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.body

    def expert_factors(self, rank: int) -> int:
        """Parameters of a layer's adapted experts; gate and up are one matrix of twice the rank."""
        h, i = self.hidden, self.expert_mlp
        return self.experts * rank * (2 * (h + 2 * i) + i + h)

    def lora(self, rank: int) -> int:
        """Parameters of rank-r adapters as PEFT puts them on "all-linear": on everything linear but the head."""
        attention, mlp = (*self.linears[:4], *self.sparse_linears), self.linears[4:]
        shared = (self.hidden, self.shared_mlp)
        beside = (shared, shared, shared, (self.hidden, 1)) if self.shared_mlp else ()
        routed = rank * sum(a + b for a, b in (*attention, *beside))
        if self.adapted_experts:
            routed += self.expert_factors(rank) + rank * (self.hidden + self.experts)
        dense = rank * sum(a + b for a, b in (attention if self.adapted_experts else (*attention, *mlp)))
        return (self.layers - self.moe_layers) * dense + self.moe_layers * routed

    def kv_tokens(self, length: int) -> int:
        """Tokens in a sequence's key-value cache, summed over the layers; windowed layers keep their window."""
        windowed = self.windowed_layers
        return (self.layers - windowed) * length + windowed * min(length, self.window or length)
