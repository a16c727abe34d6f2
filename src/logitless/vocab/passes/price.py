"""What a call pays: its price, by what is wanted and which gradients are needed, and the slices it gets at one."""

from __future__ import annotations

from dataclasses import replace

from ...algebra.costs import Price, Slices, looking_again_is_cheaper, price_of
from ...algebra.stats import looks_twice, sums_of
from ..backends.conversions import rounds_weights
from ..backends.load import load
from ..call import compiled_support
from ..call.call import Call, Needs
from ..call.choice import WORTH_REGISTERS
from ..call.validate import check_sparse, compilable_logits
from ..head.sparse import SparseBackward
from ..ranks.agreement import layout_of


def stats_price(call: Call, needs: Needs) -> Price:
    """What `token_stats` pays."""
    return _price(call, needs, one_hots=bool(call.options.top_k) or call.inputs.candidates is not None)


def loss_price(call: Call, needs: Needs) -> Price:
    """What `token_loss` and `linear_cross_entropy` pay."""
    price = _price(call, needs, loss=True)
    if call.options.backend != "compiled":
        return price
    # one product for all of backward, as of logits that stay, and these need not
    streamed = replace(price, bases=stats_price(call, needs).bases, materialised=False)
    return streamed if streamed.bases == ("p",) and load("compiled").adds_up(call, streamed) else price


def _price(call: Call, needs: Needs, *, one_hots: bool = False, loss: bool = False) -> Price:
    if call.sampling_mask is not None:
        return Price("kept", 0)
    # the adapters' gradients need the logits' gradient at all entries, as a bias does
    everywhere = needs.bias or needs.lora_b or (needs.lora_hidden and not needs.hidden)
    return price_of(
        call.options.want,
        hidden_grad=needs.hidden,
        weight_grad=needs.weight,
        bias_grad=everywhere,
        one_hots=one_hots,
        loss=loss,
        softcap=bool(call.head.softcap),
        reference_products=int(call.reference_rows is None),
        half_products=rounds_weights(call),
    )


def by_registers(call: Call, needs: Needs, formed: bool) -> Call:
    """The call of a caller who names no backend, by `compiled` where all it needs is one small library.

    That is one whose logits are added up in registers, with no gradient, a frozen head's, or one of p alone: it pays
    for far fewer of them than what Inductor has to compile. formed: whether a gradient is formed in the forward pass.
    """
    hidden, options = call.inputs.hidden, call.options
    if options.named or options.backend != "eager" or compilable_logits(hidden, call.head) < WORTH_REGISTERS:
        return call
    alone = call.sampling_mask is None and call.reference_rows is None and options.sparse is None
    if not alone or compiled_support.why_not(hidden.device):
        return call
    compiled = replace(call, options=replace(options, backend="compiled"))
    price = (loss_price if formed else stats_price)(compiled, needs)
    return compiled if load("compiled").adds_up(call, price) else call


def slices_for(
    call: Call, n_tokens: int, price: Price, wide: bool = False, together: int = 0, summed: bool = False
) -> Slices:
    """The slice sizes that a call gets at a price, of at most `n_tokens` valid tokens; the rest as a backend's."""
    shard, rows = call.shard, call.head.rows
    most = rows if shard is None else layout_of(shard, rows).widest  # all ranks take the same chunks of tokens
    backend = load(call.options.backend)
    return backend.slices(call, n_tokens, most, price, wide=wide, together=together, summed=summed)


def planned(call: Call, price: Price, wide: bool = False, together: int = 0) -> tuple[Price, Slices]:
    """The price with its slices: where few whole rows would stay for a second look, this makes the products again."""
    summed = price.method in ("values", "one-hot") and not price.materialised
    slices = slices_for(call, call.n_tokens, price, wide, together, summed)
    if price.method == "in-forward" or not looks_twice(sums_of(call.options.want)):
        return price, slices
    products = 1 + (call.reference is not None)
    again = replace(price, gemms=price.gemms + products, materialised=False, looks_again=True)
    streamed = slices_for(call, call.n_tokens, again, wide)
    if looking_again_is_cheaper(slices.tokens, streamed.tokens, call.inputs.hidden.device.type):
        return again, streamed
    return price, slices


def sparse_of(call: Call, price: Price) -> SparseBackward | None:
    """The head's sparse backward, where the price has a pass for it to leave things out of. Raises OptionError."""
    sparse = call.options.sparse if price.skips else None
    if sparse is not None:
        check_sparse(call)
    return sparse
