"""`split_matrices`: each rank holds a part of every matrix, by torch's tensor parallelism and transformers' plans."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from ..errors import ConfigError, OptionError
from ..vocab.face import localised, place, unwrapped

COLUMNS, ROWS, PARTS = "colwise", "rowwise", "replicated_with_grad_allreduce"  # in the words of transformers' plans
HIDDEN = "hidden_states"
COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def check_split(config: Any, ranks: int, sparse: bool = False) -> None:
    """ConfigError or OptionError where a model of this transformers configuration cannot be split over `ranks` ranks.

    sparse: whether its attention is native sparse attention.
    """
    text = config.get_text_config()
    foreign = set(_plan(text).values()) - {COLUMNS, ROWS, PARTS}
    if foreign or not _plan(text):
        found = f"splits by {min(foreign)}" if foreign else "has none"
        raise ConfigError(
            f"--tensor-parallel {ranks}: expected a model whose plan in transformers splits columns and rows, "
            f"{text.model_type} {found}; use --sharding fsdp2"
        )
    if sparse:
        raise OptionError(f"--tensor-parallel {ranks} cannot split --attention nsa; use --sharding fsdp2")
    sizes = {name: n for name in COUNTS if (n := getattr(text, name, None))}
    counts = [(name, n) for name, each in sizes.items() for n in (each if isinstance(each, list) else [each])]
    for name, count in counts:
        if count % ranks:
            common = math.gcd(*(n for _, n in counts))
            fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise OptionError(
                f"--tensor-parallel {ranks} must divide the model's {name}, which is {count}; use one of {fitting}"
            )
    if text.vocab_size < ranks**2:
        raise OptionError(f"--tensor-parallel {ranks} needs a vocabulary of {ranks**2} or more, got {text.vocab_size}")


def split_matrices(model: nn.Module, mesh: Any) -> nn.Module:
    """The model with its matrices, embedding and head split over a mesh of one dimension, in place.

    Dense equivalent: the model itself; every rank gives the same tokens and has the same hidden states. Every
    parameter becomes a DTensor: matrices Shard(0) or Shard(1), embedding and head Shard(0), the rest Replicate. The
    gradients of norms of a part of the heads are sums that are due (Partial) until somebody redistributes them.
    model: a transformers causal LM that `check_split` accepts, with or without LoRA adapters; logits come from
    `logitless.install` alone. Raises ConfigError for parameters that the plan does not reach.
    Memory: the whole model on each rank before, its part afterwards. (Megatron-LM, arXiv 1909.08053.)
    """
    inner: Any = unwrapped(model)
    plan, sharing = _plan(inner.config.get_text_config()), set[str]()
    _split_vocabulary(inner, mesh)
    for name, module in list(inner.base_model.named_modules()):
        if style := plan.get(re.sub(r"\.\d+\.", ".*.", name)):
            _split(module, style, mesh)
            if style == COLUMNS:
                sharing.add(name.rpartition(".")[0])
    for name in sharing:
        inner.base_model.get_submodule(name).register_forward_pre_hook(partial(_share, mesh), with_kwargs=True)
    for name, module in list(inner.named_modules()):
        own = list(module.parameters(recurse=False))
        if all(isinstance(x, DTensor) for x in own):
            continue
        if next(module.children(), None) is not None:
            raise ConfigError(f"--tensor-parallel: {name} ({type(module).__name__}) has parameters that no plan splits")
        _hold_whole(module, mesh, Replicate())
    return model


class SplitEmbedding(nn.Embedding):
    """Looks up the rows that this rank holds; the sum over ranks is the embedding.

    torch's own split embedding forms the gradient of all rows on every rank.
    """

    def forward(self, input: Tensor) -> Tensor:
        whole: Any = self.weight
        weight, shard = localised("embedding", whole)
        rows, here = place(input, shard.offset, weight.shape[0])
        ignored = -1 if self.padding_idx is None else self.padding_idx - shard.offset
        ignored = ignored if 0 <= ignored < weight.shape[0] else None
        part = F.embedding(rows, weight, ignored).masked_fill(~here[..., None], 0)
        terms: Any = _alike(part, whole.device_mesh, Partial())
        return terms.redistribute(placements=[Replicate()]).to_local()  # whose gradient is each rank's own


def _plan(config: Any) -> dict[str, str]:
    return getattr(config, "base_model_tp_plan", None) or {}


def _split_vocabulary(model: Any, mesh: Any) -> None:
    """Embedding and head by rows; one parameter where they are tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
        found = f"{type(embedding).__name__} and {type(head).__name__}"
        raise ConfigError(f"--tensor-parallel: expected an nn.Embedding and a head that is an nn.Linear, got {found}")
    tied = head.weight is embedding.weight
    kind: Any = type(embedding)  # of a scaled embedding, what it scales is replaced
    embedding.__class__ = SplitEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, SplitEmbedding), {})
    _distribute(embedding, mesh, Shard(0))
    if tied:
        head.weight = embedding.weight
    _distribute(head, mesh, Shard(0))


def _distribute(module: nn.Module, mesh: Any, placement: Placement) -> None:
    for name, x in list(module.named_parameters(recurse=False)):
        if not isinstance(x, DTensor):
            split = distribute_tensor(x.detach(), mesh, [placement])
            module.register_parameter(name, nn.Parameter(split, requires_grad=x.requires_grad))


def _split(module: Any, style: str, mesh: Any) -> None:
    """One module by its style; of a LoRA layer the base layer, and the factor that has the split width."""
    if style == PARTS:
        _hold_whole(module, mesh, Shard(-2))  # (..., heads, width)
        return
    kind: type[ParallelStyle] = ColwiseParallel if style == COLUMNS else RowwiseParallel
    if not hasattr(module, "base_layer"):
        parallelize_module(module, mesh, kind())
        return
    parallelize_module(module.base_layer, mesh, kind())
    split, whole = (module.lora_B, module.lora_A) if style == COLUMNS else (module.lora_A, module.lora_B)
    for factor in split.values():
        parallelize_module(factor, mesh, kind())
    for factor in whole.values():
        _hold_whole(factor, mesh, Replicate())


def _share(mesh: Any, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Hidden states as a DTensor: their gradients of several matrices then add up over ranks in one collective."""
    if args:
        args = (_alike(args[0], mesh, Replicate()), *args[1:])
    elif HIDDEN in kwargs:
        kwargs = {**kwargs, HIDDEN: _alike(kwargs[HIDDEN], mesh, Replicate())}
    return args, kwargs


def _alike(x: Tensor, mesh: Any, layout: Placement) -> Tensor:
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [layout], run_check=False)


def _hold_whole(module: nn.Module, mesh: Any, layout: Placement) -> None:
    """Every rank holds the module's parameters. layout: what its input and its output are of all ranks'."""

    def enter(_: nn.Module, inputs: Any, mesh: Any) -> Any:
        return tuple(_alike(x, mesh, layout) for x in inputs)

    def leave(_: nn.Module, output: Any, __: Any) -> Any:
        return output.to_local()

    distribute_module(module, mesh, input_fn=enter, output_fn=leave)
