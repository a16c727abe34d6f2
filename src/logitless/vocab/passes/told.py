"""What passes over the vocabulary take and why, told by the logger `logitless` at INFO, once of each kind."""

from __future__ import annotations

import logging

from ...algebra.costs import Price
from ...units import plural
from ..call.call import Call
from ..call.choice import passed_over
from ..call.validate import compilable_logits

LOGGER = logging.getLogger("logitless")

_told: set[str] = set()


def tell(call: Call, price: Price) -> None:
    """Says which backend serves a call, at which price, where somebody listens."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    others = passed_over_by(call)
    line = (
        f"{', '.join(call.options.want)}: {plural(price.gemms, 'GEMM')} ({price.method}), "
        f"backend {call.options.backend}{f' ({others})' if others else ''}"
    )
    if line not in _told:
        _told.add(line)
        LOGGER.info("%s", line)


def passed_over_by(call: Call) -> str:
    """The backends that are preferred where they run and fit, and why this call gets another."""
    o, hidden = call.options, call.inputs.hidden
    return passed_over(o.backend, hidden.device, compilable_logits(hidden, call.head), o.want, o.named)
