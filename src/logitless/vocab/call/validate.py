"""What a call's tensors and options must be, and how they become a flat problem."""

from __future__ import annotations

import difflib
import math
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from ...algebra.options import check_ignore_index, check_numbers, check_reduction, check_want, is_number
from ...algebra.rules import TEMPERATURES, are_temperatures, is_temperature
from ...algebra.stats import STATISTICS, sums_of
from ...errors import ConfigError, DeviceError, DtypeError, GradientError, NotFiniteError, OptionError, ShapeError
from ...upstream import refuse_duals
from ..devices import autocast_dtype, capturing
from ..dtypes import dtype_of, of_integers
from ..head.draft import split
from ..head.lm_head import LMHead
from ..head.shard import is_dtensor
from ..head.sparse import BOUNDED
from ..sizing import current_sizing
from . import quack_support
from .call import Call, Inputs
from .choice import choose, require
from .lora import lora_b_of
from .options import DEFAULTS, CallOptions, Options
from .rows_of_reference import RowsOfReference, RowSource
from .sampling_mask import SamplingMask

BESIDE = ("inputs", "reduction", "per", "loss")  # arguments of `token_loss` and `explain`, for who misspells one


def flatten(hidden: Tensor, head: LMHead, labels: Tensor | None, **options: Unpack[Options]) -> Call:
    """The checked call, its tensors flat; the adapters' products of hidden (`lora.with_lora`) are to come."""
    _refuse_functorch()
    o = _with_defaults(options)
    lead = check_hidden(hidden, head)
    _refuse_dtensors(hidden=hidden, labels=labels, **{name: o[name] for name in ("temperature", "candidates")})
    factors = (x for each in head.adapters for x in (each.a, each.b))
    refuse_duals(hidden, head.weight_tensor, head.bias, *factors, o["temperature"])
    n = math.prod(lead)
    want = check_want(o["want"], labels is not None, o["reference"] is not None, o["candidates"] is not None)
    check_ignore_index(o["ignore_index"])
    check_numbers(head.rows, o["top_k"], o["jsd_beta"], o["memory_budget"])
    if labels is not None:
        labels = _check_ids("labels", labels, lead, hidden).reshape(n)
    candidates = _check_candidates(o["candidates"], lead, hidden)
    mask = _check_sampling_mask(o, n, hidden)
    temperature, temperatures = _check_temperature(o["temperature"], lead, hidden)
    ref_hidden, ref_head, ref_rows = _check_reference(o["reference"], lead, head, hidden)
    if "ref" not in sums_of(want):  # no statistic reads it: its products would be made for nothing
        ref_hidden = ref_head = ref_rows = None
    cast = autocast_dtype(hidden)
    sparse = head.sparse if torch.is_grad_enabled() else None
    logits = 0 if mask is not None else compilable_logits(hidden, head)
    backend = _backend(o["backend"], want, hidden.device, sparse is not None, ref_rows is not None, logits)
    checked = CallOptions(
        want=want,
        temperature=temperature,
        ignore_index=int(o["ignore_index"]),
        top_k=int(o["top_k"]),
        jsd_beta=float(o["jsd_beta"]),
        memory_budget=int(o["memory_budget"] or 0),
        backend=backend,
        named=o["backend"] is not None,
        autocast=cast,
        sparse=sparse,
    )
    inputs = Inputs(
        hidden=(hidden if cast is None else hidden.to(cast)).reshape(n, head.hidden_size),
        weight=head.weight_tensor,
        bias=head.bias,
        lora_b=lora_b_of(head),
        labels=labels,
        temperature=temperatures,
        candidates=candidates,
    )
    if ref_head is None or ref_hidden is None:
        return Call(checked, head, inputs, sampling_mask=mask, reference_rows=ref_rows)
    return _beside(Call(checked, head, inputs, sampling_mask=mask), ref_hidden, ref_head)


def flatten_whole_loss(hidden: Tensor, head: LMHead, labels: Tensor | None, **options: Unpack[Options]) -> Call:
    """`flatten` for `linear_cross_entropy` by QuACK, which takes what `quack_support` says."""
    options["backend"] = None
    call = flatten(hidden, head, labels, **options)
    require(quack_support.NAME, hidden.device)
    quack_support.check_call(call)
    return replace(call, options=replace(call.options, backend=quack_support.NAME, named=True))


def _backend(
    name: str | None, want: tuple[str, ...], device: torch.device, sparse: bool, rows: bool, logits: int
) -> str:
    """The backend that serves a call; only "eager" has a sparse backward, the candidates' tail, a reference's rows.

    logits: as `compilable_logits` counts them.
    """
    tail = "tail" in sums_of(want)
    if (tail or rows) and name is not None and str(name) != "eager":
        what = "want: tail_logprob is" if tail else "reference: rows of logits are"
        raise OptionError(f"{what} for backend 'eager', got {name!r}; leave backend out")
    if name is None and (sparse or tail or rows):
        name = "eager"
    return choose(name, device, logits, want)


def compilable_logits(hidden: Tensor, head: LMHead) -> int:
    """The call's logits; 0 where nothing is to be compiled: while torch traces, or of tensors without numbers."""
    plain = not torch.compiler.is_compiling() and type(hidden) is Tensor and current_sizing() is None
    return hidden.shape[:-1].numel() * head.rows if plain else 0


def check_loss_fn(loss_fn: Any) -> None:
    """Raise OptionError where a loss is no function."""
    if not callable(loss_fn):
        raise OptionError(
            f"loss_fn: expected a function of (stats, *inputs), got {type(loss_fn).__name__}; it comes first: "
            "token_loss(loss_fn, hidden, head, labels)"
        )


def check_loss(reduction: str, per: str, hidden: Tensor) -> None:
    """Raise where a loss has no such reduction, or where it is not per token and there are no such sequences."""
    check_reduction(reduction)
    if not isinstance(per, str) or per not in ("token", "sequence"):
        raise OptionError(f"per: expected 'token' or 'sequence', got {per!r}")
    if per == "token":
        return
    if isinstance(hidden, Tensor) and hidden.dim() < 3:
        raise ShapeError(f"per='sequence': expected hidden (B, T, H), B sequences, got {tuple(hidden.shape)}")
    if isinstance(hidden, Tensor) and capturing(hidden):
        raise OptionError("per='sequence': expected no CUDA graph, got one being captured: sequences are ragged")


def flatten_inputs(inputs: tuple[Tensor, ...], hidden: Tensor, per: str) -> tuple[Tensor, ...]:
    """The loss function's own inputs, (N, ...) each, or (B, ...) of sequences."""
    lead = hidden.shape[:1] if per == "sequence" else hidden.shape[:-1]
    if not isinstance(inputs, tuple | list):
        got = "one tensor" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DtypeError(f"inputs: expected a tuple of tensors, got {got}; pass inputs=(tensor,)")
    for x in inputs:
        if not isinstance(x, Tensor):
            raise DtypeError(f"inputs: expected tensors of labels' shape, got {type(x).__name__}; close over constants")
        if x.shape[: len(lead)] != lead:
            raise ShapeError(f"inputs: expected leading dimensions {tuple(lead)}, got {tuple(x.shape)}")
        if x.device != hidden.device:
            raise DeviceError(f"inputs: one is on {x.device}, hidden on {hidden.device}; move one of them")
    refuse_duals(*inputs)
    return tuple(x.reshape(math.prod(lead), *x.shape[len(lead) :]) for x in inputs)


def divisor_of(denominator: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:  # ()
    """What divides a loss's sum, of a number or a tensor of one, whose value is not looked at."""
    shape = tuple(getattr(denominator, "shape", ()))
    if math.prod(shape) != 1:
        raise OptionError(f"denominator: expected one number, got shape {shape}")
    if isinstance(denominator, Tensor):
        check_real("denominator", denominator)
        if denominator.is_meta and device.type != "meta":
            raise DeviceError(f"denominator is on meta, hidden on {device}; give it a value there")
        return denominator.detach().reshape(())
    positive = is_number(denominator) and 0 < denominator < math.inf
    if not positive or float(denominator) > torch.finfo(dtype).max:
        raise OptionError(
            f"denominator: expected a positive number, finite in {dtype}, or a tensor of one, got {denominator!r}"
        )
    return torch.full((), float(denominator), dtype=dtype, device=device)


def check_real(name: str, x: Tensor) -> None:
    """Raise DtypeError for complex numbers, of which a conversion would drop the imaginary part."""
    if x.is_complex():
        raise DtypeError(f"{name}: expected real numbers, got {x.dtype}; pass {name}.real")


def check_logits(logsumexp: Tensor) -> None:
    """Raise NotFiniteError where a token's logits are NaN, +inf, or all -inf."""
    if not logsumexp.isfinite().all():
        raise NotFiniteError("head: expected finite logits, got NaN or infinity; the model has diverged")


@torch.compiler.assume_constant_result  # a graph is traced within the transforms that it holds
def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active()


def _refuse_functorch() -> None:
    if _is_transformed():
        raise GradientError(
            "logitless: expected plain tensors, got a call under torch.func (grad, vjp, jvp, vmap); "
            "use torch.autograd.grad and a batch dimension, or the dense oracle (logitless.vocab.reference)"
        )


def _with_defaults(options: Options) -> dict[str, Any]:
    for name in options:
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, {*DEFAULTS, *BESIDE} - {name}, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(DEFAULTS)}"
            raise OptionError(f"options: no option is called {name!r}; {hint}")
    return {**DEFAULTS, **options}


def _alongside(head: LMHead, reference: LMHead) -> slice:
    """The reference's rows that lie beside the head's own: all, or of a whole head those of this rank."""
    if head.shard is None and reference.shard is None:
        return slice(None)
    if head.shard is not None and reference.shard is None:
        return slice(head.vocab_start, head.vocab_start + head.weight.shape[0])
    here, there = ((x.shard and x.shard.name, x.vocab_start, x.local_rows) for x in (head, reference))
    if here != there:
        raise ConfigError(
            f"reference: expected its rows sharded as the head's (group, first, rows) = {here}, or whole, got {there}; "
            "shard both alike"
        )
    return slice(0, head.local_rows)


def _beside(call: Call, ref_hidden: Tensor, given: LMHead) -> Call:
    """The call with a reference, of which the rows that lie beside the head's own."""
    head, cast = call.head, call.options.autocast
    reference, outside = _of_draft(head, given)
    outside = None if call.sampling_mask is not None else outside  # whose entries are all the head's
    if outside is not None and "reverse_kl" in call.options.want:
        raise OptionError(
            "want: reverse_kl is infinite where the head, with token_ids, lacks entries of the reference; want "
            "reverse_kl_shared, over the entries that both have, or kl, acceptance or total_variation"
        )
    rows, weight, lora_b = _alongside(head, reference), reference.weight_tensor, lora_b_of(reference)
    inputs = call.inputs._replace(
        ref_hidden=ref_hidden if cast is None else ref_hidden.to(cast),
        ref_weight=None if weight is None else weight[rows].detach(),
        ref_bias=None if reference.bias is None else reference.bias[rows].detach(),
        ref_lora_b=None if lora_b is None else lora_b[rows].detach(),
    )
    if head.shard is not None:
        reference = replace(
            reference,
            weight=reference.weight[rows] if inputs.ref_weight is None else inputs.ref_weight,
            bias=inputs.ref_bias,
            vocab_size=head.rows,
            adapters=tuple(replace(x, b=x.b.detach()[rows]) for x in reference.adapters),
            shard=head.shard,
        )
    return replace(call, inputs=inputs, reference=reference, outside=outside)


def _refuse_dtensors(**given: Any) -> None:
    """ConfigError where a token's operand is a DTensor, which no collective of the pass knows of."""
    for name, x in given.items():
        if is_dtensor(x):
            raise ConfigError(
                f"{name} is a DTensor with {tuple(x.placements)}, expected a plain tensor; pass {name}.full_tensor(), "
                f"or {name}.to_local() where each rank has tokens of its own"
            )


def check_hidden(hidden: Tensor, head: LMHead, of: str = "") -> tuple[int, ...]:
    """The leading dimensions of hidden states; raises where they are none, or none of this head."""
    if not isinstance(head, LMHead):
        got = type(head).__name__
        got = f"{type(head).__module__}.{got}" if got == LMHead.__name__ else got  # JAX's
        raise DtypeError(f"{of}head: expected an LMHead, got {got}; use LMHead.of(model) or LMHead(weight)")
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        got = dtype_of(hidden)
        raise DtypeError(
            f"{of}hidden: expected a floating-point tensor, got {got}; of a transformers model it is "
            "hidden_states(model, batch)"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != head.hidden_size:
        raise ShapeError(
            f"{of}hidden: expected (..., {head.hidden_size}), the width of the {of}head's weight "
            f"{tuple(head.weight.shape)}, got {tuple(hidden.shape)}; give what the head is called with rather than its "
            "logits, and a weight (vocab, hidden)"
        )
    if hidden.device != head.weight.device:
        raise DeviceError(f"{of}hidden is on {hidden.device}, the {of}head on {head.weight.device}; move one of them")
    return tuple(hidden.shape[:-1])


def _check_candidates(candidates: Tensor | None, lead: tuple[int, ...], hidden: Tensor) -> Tensor | None:
    if candidates is None:
        return None
    if not isinstance(candidates, Tensor):
        raise DtypeError(f"candidates: expected integer ids in a tensor, got {type(candidates).__name__}")
    if candidates.dim() != len(lead) + 1:
        expected = ", ".join([*map(str, lead), "K"])
        raise ShapeError(f"candidates: expected shape ({expected}), got {tuple(candidates.shape)}")
    width = candidates.shape[-1]
    return _check_ids("candidates", candidates, (*lead, width), hidden).reshape(math.prod(lead), width)


def _check_sampling_mask(o: dict[str, Any], n_tokens: int, hidden: Tensor) -> SamplingMask | None:
    mask = o["sampling_mask"]
    if mask is None:
        return None
    if not isinstance(mask, SamplingMask):
        raise DtypeError(
            f"sampling_mask: expected a SamplingMask, got {type(mask).__name__}; use SamplingMask(token_ids, offsets) "
            "or SamplingMask.of(lists)"
        )
    if o["top_k"] or o["candidates"] is not None:
        raise OptionError(
            "sampling_mask: expected no top_k or candidates beside it, which are of the whole row; take them in a call "
            "of their own"
        )
    if o["reference"] is not None and not isinstance(o["reference"], tuple):
        raise OptionError(
            "sampling_mask: expected a reference (hidden, head) beside it, got rows of logits; give their head"
        )
    if capturing(hidden):
        raise OptionError("sampling_mask: expected no CUDA graph, got one being captured: sets are ragged")
    mask.check_layout(n_tokens, hidden.device)
    return mask


def _check_ids(name: str, ids: Tensor, shape: tuple[int, ...], hidden: Tensor) -> Tensor:
    if not of_integers(ids):
        got = dtype_of(ids)
        hint = "; probability targets are not supported: see losses.soft_targets" if name == "labels" else ""
        raise DtypeError(f"{name}: expected integer ids, got {got}{hint}")
    if tuple(ids.shape) != shape:
        hint = "; one for each hidden state: shift them by padding with ignore_index" if name == "labels" else ""
        raise ShapeError(f"{name}: expected shape {shape}, hidden's leading dimensions, got {tuple(ids.shape)}{hint}")
    if ids.device != hidden.device:
        raise DeviceError(f"{name} is on {ids.device}, hidden on {hidden.device}; move one of them")
    return ids.long()


def _check_temperature(
    temperature: float | Tensor, lead: tuple[int, ...], hidden: Tensor
) -> tuple[float, Tensor | None]:
    if not isinstance(temperature, Tensor):
        if not is_temperature(temperature):
            raise OptionError(
                f"temperature: expected a number in {TEMPERATURES} or a tensor of such, got {temperature!r}"
            )
        return float(temperature), None
    check_real("temperature", temperature)
    if temperature.requires_grad and torch.is_grad_enabled():
        raise GradientError("temperature: it gets no gradient here; pass temperature.detach()")
    if temperature.is_meta and not hidden.is_meta:
        raise DeviceError(f"temperature is on meta, hidden on {hidden.device}; give it values there")
    unread = torch.compiler.is_compiling() or capturing(hidden) or temperature.is_meta
    if not unread and not bool(are_temperatures(temperature.float()).all()):
        raise OptionError(
            f"temperature: expected values in {TEMPERATURES}, got some that are zero, negative, infinite or NaN"
        )
    try:
        expanded = temperature.detach().to(hidden.device).expand(lead)
    except RuntimeError:
        raise ShapeError(
            f"temperature: expected a number or a shape that broadcasts to {lead}, got {tuple(temperature.shape)}"
        ) from None
    return 1.0, expanded.reshape(math.prod(lead))


def _check_reference(
    reference: tuple[Tensor, LMHead] | Tensor | RowSource | None, lead: tuple[int, ...], head: LMHead, hidden: Tensor
) -> tuple[Tensor | None, LMHead | None, RowsOfReference | None]:
    if reference is None:
        return None, None, None
    if isinstance(reference, Tensor):
        if not reference.is_floating_point():
            raise DtypeError(f"reference: expected floating logits or log-probs, got {reference.dtype}")
        if tuple(reference.shape) != (*lead, head.rows):
            got = tuple(reference.shape)
            raise ShapeError(f"reference: expected rows of logits or log-probs, {(*lead, head.rows)}, got {got}")
        return None, None, RowsOfReference.of(reference)
    # a module is callable, too, but not with tokens and entries
    if callable(reference) and not isinstance(reference, torch.nn.Module):
        return None, None, RowsOfReference(reference)
    if not (isinstance(reference, tuple) and len(reference) == 2):
        raise OptionError(
            f"reference: expected (hidden, head), rows of logits or what reads them, got {type(reference).__name__}; "
            "of a transformers model it is (hidden_states(model, batch), LMHead.of(model))"
        )
    ref_hidden, ref_head = reference
    _refuse_dtensors(**{"reference[0]": ref_hidden})
    ref_lead = check_hidden(ref_hidden, ref_head, of="reference ")
    if ref_lead != lead:
        raise ShapeError(f"reference hidden: expected leading dimensions {lead}, hidden's, got {ref_lead}")
    if ref_head.rows != head.rows and not is_draft(head, ref_head):
        raise ShapeError(
            f"reference: expected a head over the same vocabulary ({head.rows} entries), got {ref_head.rows}; "
            "set vocab_size on both, or token_ids on a draft's head"
        )
    if ref_hidden.device != hidden.device:
        raise DeviceError(f"reference is on {ref_hidden.device}, hidden on {hidden.device}; move one of them")
    return ref_hidden.detach().reshape(math.prod(lead), ref_head.hidden_size), ref_head, None


def is_draft(head: LMHead, reference: LMHead) -> bool:
    """Whether the head's rows are a draft's, of the reference's vocabulary."""
    return head.token_ids is not None and reference.token_ids is None


def _same(ids: Tensor, others: Tensor) -> bool:
    """Whether both are the same entries; in a graph, where nobody may wait for them, whether they are as many."""
    unread = torch.compiler.is_compiling() or capturing(ids)
    return ids.shape == others.shape and (unread or torch.equal(ids, others))


def _of_draft(head: LMHead, reference: LMHead) -> tuple[LMHead, LMHead | None]:
    """The reference over the head's entries, and over those that it lacks, None where it has all."""
    ids, theirs = head.token_ids, reference.token_ids
    if theirs is not None and theirs is not ids and (ids is None or not _same(ids, theirs)):
        raise OptionError(
            "reference: expected a head over the whole vocabulary, or one with the head's own token_ids, got other "
            "token_ids; its rows are of other entries: give the whole head"
        )
    if ids is None or theirs is not None:
        return reference, None
    if reference.shard is not None:
        raise ConfigError(
            "reference: expected a whole head beside one with token_ids, got one sharded over ranks; give it whole"
        )
    return split(reference, ids)


def check_sparse(call: Call) -> None:
    """Raise OptionError where a call's gradient cannot be bounded, or not made without waiting."""
    options = call.options
    wrong = [name for name in options.want if not STATISTICS[name].bases <= BOUNDED]
    if wrong:
        raise OptionError(
            f"sparse: expected statistics whose gradient p bounds (logprob, logsumexp, entropy, ...), got "
            f"{', '.join(wrong)}; take these in a call of their own whose head has no sparse"
        )
    if call.head.softcap and "zsum" in sums_of(options.want):  # one coefficient of all entries is not one behind it
        raise OptionError(
            "sparse: expected no label_smoothing, mean_logit or self_certainty where the head has a softcap, got "
            f"softcap={call.head.softcap}; leave out one of them, or give a head without sparse"
        )
    if call.shard is not None:
        raise OptionError("sparse: expected a whole head, got one that is sharded over ranks; pass a head without it")
    if options.backend != "eager":
        raise OptionError(f"sparse: expected backend 'eager', got {options.backend!r}; leave backend out")
    if capturing(call.inputs.hidden):
        raise OptionError("sparse: expected no CUDA graph, got one being captured; pass a head without sparse")
