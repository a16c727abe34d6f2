"""Liger-Kernel's cases: its fused cross-entropies, divergences, preference and policy losses."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless as ll
from tests.support.peers.cross_entropy import CrossEntropy
from tests.support.peers.divergences import Divergence
from tests.support.peers.outcomes import (
    Operands,
    Within,
    assert_held,
    assert_same,
    cheapest,
    fit,
    fit_batch,
    outcome,
    seeded,
)
from tests.support.peers.policies import CLIPPED, Policy
from tests.support.peers.preferences import Preference
from tests.support.peers.statistics import Statistics

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LARGE, ODD = (8, 128, 1024, 4096), (4, 47, 31, 123)  # batch, length, width and vocabulary
SMALL = ((2, 2, 8, 8), (9, 7, 41, 41))
FLAGS = (False, True)


def rows_of(shape: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """Tokens, width and vocabulary."""
    batch, length, width, vocab = shape
    return fit(batch * length, width, vocab)


FUSED = [("mean", BF16, 5e-3, 5e-2), ("mean", FP32, 1e-5, 5e-4), ("sum", BF16, 5.0, 50.0), ("sum", FP32, 1e-3, 5e-2)]
SMOOTHED = {"label_smoothing": 0.1, "ignore_index": 42, "z_loss": 1e-4, "softcap": 30.0}
OPTIONS: list[dict[str, Any]] = [{}, SMOOTHED, {"class_weight": True, "ignore_index": 42, "softcap": 30.0}]
LINEAR = [
    CrossEntropy(*rows_of(shape), dtype, Within(atol, rtol), reduction, bias, **options)
    for shape, (reduction, dtype, atol, rtol), bias, options in product((LARGE, ODD), FUSED, FLAGS, OPTIONS)
]
FUNCTIONAL = [
    CrossEntropy(b * t, h, v, dtype, Within(atol, rtol), bias=bias, **{**options, "ignore_index": -100}, ignored=0.0)
    for (b, t, h, v), (_, dtype, atol, rtol), bias, options in product(SMALL, FUSED[:2], FLAGS, OPTIONS)
]
HOPPER = [
    CrossEntropy(*shape, BF16, Within(5e-3, 5e-2), reduction, ignored=ignored)
    for shape, reduction, ignored in product(((128, 256, 512), (256, 512, 768)), ("mean", "sum"), (0.0, 0.25))
]
# On logits: the same vocabularies behind a narrow head, so within the tolerance of the fused tests.
BATCHES = ((2 * 4096, 32000), (3 * 423, 32000))
LOGITS = [(BF16, 5e-3, 5e-2), (FP32, 1e-5, 5e-4)]
REDUCTIONS = ("sum", "mean", "none")


def on_logits(rows: int, vocab: int, dtype: torch.dtype, atol: float, rtol: float, **options: Any) -> CrossEntropy:
    return CrossEntropy(*fit(rows, 16, vocab), dtype, Within(atol, rtol), **options)


VARIANTS: list[dict[str, Any]] = [
    *({"reduction": reduction} for reduction in REDUCTIONS),
    *({"reduction": reduction, "ignore_index": index} for reduction, index in product(REDUCTIONS, (2, -123))),
    *({"label_smoothing": smoothing} for smoothing in (0.1,)),
    *({"label_smoothing": s, "ignore_index": index} for s, index in ((0.1, 1), (0.2, -300))),
    *({"softcap": 30.0, "reduction": reduction} for reduction in REDUCTIONS),
    *({"z_loss": z} for z in (1e-4, 1e-5)),
    *(
        {"z_loss": z, "label_smoothing": s, "ignore_index": index, "reduction": reduction}
        for z, (s, index, reduction) in product((1e-4, 1e-5), ((0.1, 42, "mean"), (0.2, -42, "sum")))
    ),
    *({"class_weight": True, "reduction": reduction} for reduction in REDUCTIONS),
    *(
        {"class_weight": True, "reduction": reduction, "ignore_index": index, "softcap": cap}
        for reduction, (index, cap) in product(REDUCTIONS, ((-100, 30.0), (42, 40.0)))
    ),
    *(
        {"z_loss": z, "label_smoothing": s, "ignore_index": index, "softcap": cap, "reduction": reduction}
        for reduction, (index, z, s, cap) in product(("sum", "mean"), ((-100, 1e-4, 0.1, 30.0), (42, 1e-5, 0.2, 40.0)))
    ),
]
ON_LOGITS = [
    on_logits(rows, vocab, dtype, atol, rtol, **options)
    for (rows, vocab), (dtype, atol, rtol), options in product(BATCHES, LOGITS, VARIANTS)
]
MEGATRON_SHAPES = ((16, 128), (64, 4096), (32, 32000), (64, 32000), (15, 123))
MEGATRON = [
    CrossEntropy(*fit(rows, 16, vocab), dtype, Within(1e-2, 5e-2), "none", **options, spread=spread)
    for (rows, vocab), dtype, options, spread in product(
        MEGATRON_SHAPES,
        (FP32, BF16),
        ({}, {"ignore_index": 2}, {"label_smoothing": 0.1, "ignore_index": 1}),
        (0.5, 1.0, 5.0),
    )
]
CROSS_ENTROPIES = [*LINEAR, *FUNCTIONAL, *HOPPER, *ON_LOGITS, *MEGATRON]
each_cross_entropy = pytest.mark.parametrize("case", cheapest(CROSS_ENTROPIES, lambda case: case.cost, 2), ids=str)


@each_cross_entropy
def test_cross_entropy(case):
    case.check()


# Its kernels are interpreted on a CPU, slowly, and the interpreter has no tanh: small vocabularies, no softcap.
OWN = [case for case in CROSS_ENTROPIES if case.vocab < 1000 and case.softcap is None]
# Its logits are rounded to bfloat16: where they are large, by more than the tolerance of its tests.
ROUNDED = [case for case in OWN if case.dtype == BF16 and case.spread > 1 and case.reduction == "none"]


def fused(case: CrossEntropy):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, class_weight: Any) -> Tensor:
        return liger_fused_linear_cross_entropy(
            *(hidden, weight, labels, bias, class_weight, case.ignore_index, case.z_loss, case.label_smoothing),
            reduction=case.reduction,
            softcap=case.softcap,
        )

    return theirs


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize("case", [case for case in OWN if case not in ROUNDED], ids=str)
def test_its_fused_cross_entropy(case):
    case.check_against(fused(case))


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_its_rounded_logits(case):
    case.check_against_rounded(fused(case))


PAIRS = ((8, 128, 1024, 4096), (3, 47, 31, 123))
PAIRED = [(BF16, 5e-2, 5e-1), (FP32, 1e-5, 5e-4)]


def pairs_of(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Pairs, length, width and vocabulary."""
    pairs, length, width, vocab = shape
    responses, *rest = fit_batch(2 * pairs, length, width, vocab)
    return responses // 2, *rest


DPO: list[dict[str, Any]] = [
    *({"loss": name} for name in ("sigmoid", "apo_zero", "apo_down", "sppo_hard", "nca_pair", "hinge", "bco_pair")),
    {"loss": "robust", "label_smoothing": 0.1},
    {"loss": "exo_pair", "label_smoothing": 1e-3},
    {"loss": "discopop"},
]
WITH_REFERENCE = [
    Preference(
        **{**loss, "nll": nll, "ignore_index": index, "beta": beta},
        **dict(zip(("pairs", "length", "width", "vocab"), pairs_of(shape), strict=True)),
        dtype=dtype,
        within=Within(atol, rtol),
        bias=bias,
        ref_bias=ref_bias,
    )
    for loss, shape, (dtype, atol, rtol), bias, ref_bias, nll, (index, beta) in product(
        DPO, PAIRS, PAIRED, FLAGS, FLAGS, (0.0, 1.0), ((-100, 0.1), (42, 0.2))
    )
]
TINY = [
    Preference(loss["loss"], *shape, dtype, Within(atol, rtol), bias, ref_bias, nll, **smoothing)
    for loss, shape, (dtype, atol, rtol), bias, ref_bias, nll in product(
        DPO, ((2, 2, 8, 8), (3, 47, 31, 123)), PAIRED, FLAGS, FLAGS, (0.0, 1.0)
    )
    for smoothing in [{"label_smoothing": loss.get("label_smoothing", 0.0)}]
]
ALONE = [
    Preference(
        *(name, *pairs_of(shape), dtype, Within(5e-2 if dtype == BF16 else atol, rtol), bias),
        nll=alpha,
        ignore_index=index,
        beta=beta,
        label_smoothing=smoothing,
        gamma=gamma,
    )
    for name, shape, (dtype, atol, rtol), bias, (index, beta, alpha, gamma), smoothing in product(
        ("cpo", "simpo", "orpo"), PAIRS, PAIRED, FLAGS, ((-100, 0.1, 1.0, 0.5), (42, 0.2, 0.85, 0.85)), (0.0, 0.1)
    )
    if name != "orpo" or not (smoothing or alpha != 1.0)  # ORPO has neither
]
PREFERENCES = [*WITH_REFERENCE, *TINY, *ALONE]


@pytest.mark.parametrize("case", cheapest(PREFERENCES, lambda case: case.cost, 2), ids=str)
def test_preference(case):
    case.check()


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize("case", TINY, ids=str)
def test_its_dpo(case):
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(
        ignore_index=case.ignore_index,
        beta=case.beta,
        alpha=case.nll,
        compute_nll_loss=case.nll > 0,
        loss_type=case.loss,
        label_smoothing=case.label_smoothing,
        compiled=False,
    )

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        return loss(weight, hidden, labels, bias, ref["ref_hidden"], ref["ref_weight"], ref["ref_bias"])[0]

    case.check_against(theirs)


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_its_losses_without_a_reference(case):
    from liger_kernel import chunked_loss

    options: dict[str, Any] = {"ignore_index": case.ignore_index, "beta": case.beta, "compiled": False}
    if case.loss != "orpo":
        options |= {"alpha": case.nll, "label_smoothing": case.label_smoothing}
    if case.loss == "simpo":
        options["gamma"] = case.gamma
    name = {"cpo": "CPO", "simpo": "SimPO", "orpo": "ORPO"}[case.loss]
    loss = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(**options)

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        return loss(weight, hidden, labels, bias)[0]

    case.check_against(theirs)


KTO_SHAPES = (*PAIRS, (2, 2, 8, 8))
KTO = list(product(KTO_SHAPES, PAIRED, FLAGS, FLAGS, ((-100, 0.1), (42, 0.2))))


def kto_problem(shape: tuple[int, int, int, int], dtype: torch.dtype, bias: bool, ref_bias: bool, index: int):
    """Responses of which some are desirable, and the baseline that the test gives."""
    case = Preference("kto", *pairs_of(shape), dtype, Within(0, 0), bias, ref_bias, ignore_index=index)
    operands = case.operands()
    desirable = torch.rand(operands["labels"].shape[0], generator=seeded(3)) > 0.5
    return case, desirable, torch.randn(1, generator=seeded(4))


def kto_dense(desirable: Tensor, baseline: Tensor, beta: float, index: int):
    def function(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        def sequences(hidden: Tensor, weight: Tensor, bias: Any) -> Tensor:
            logp = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)
            return (logp.gather(-1, labels.clamp(0, weight.shape[0] - 1)[..., None])[..., 0] * (labels != index)).sum(
                -1
            )

        ratio = sequences(hidden, weight, bias)
        ratio = ratio - sequences(ref["ref_hidden"], ref["ref_weight"], ref["ref_bias"]).detach()
        gain = beta * (ratio - baseline.to(ratio))
        return (1 - torch.sigmoid(torch.where(desirable, gain, -gain))).mean()

    return function


def kto_ours(desirable: Tensor, baseline: Tensor, beta: float, index: int):
    def function(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        def sequences(hidden: Tensor, weight: Tensor, bias: Any) -> Tensor:
            logp = ll.token_stats(hidden, ll.LMHead(weight, bias), labels, ignore_index=index).logprob
            return ll.losses.sequence_logprob(logp, labels != index)

        with torch.no_grad():
            reference = sequences(ref["ref_hidden"], ref["ref_weight"], ref["ref_bias"])
        policy = sequences(hidden, weight, bias)
        return ll.losses.kto(policy, reference, desirable, baseline.to(policy)[0], beta=beta).mean()

    return function


def kto_outcomes(case: Preference, desirable: Tensor, baseline: Tensor, beta: float):
    trained = ("hidden", "weight", "bias")
    ours = outcome(kto_ours(desirable, baseline, beta, case.ignore_index), case.poisoned(), trained)
    dense = kto_dense(desirable, baseline, beta, case.ignore_index)
    return ours, outcome(dense, case.operands(), trained, torch.float64)


@pytest.mark.parametrize("given", cheapest(KTO, lambda given: given[0][2] * given[0][3]))
def test_kto(given):
    shape, (dtype, atol, rtol), bias, ref_bias, (index, beta) = given
    case, desirable, baseline = kto_problem(shape, dtype, bias, ref_bias, index)
    ours, exact = kto_outcomes(case, desirable, baseline, beta)
    assert_held(ours, exact, Within(atol, rtol), 1e-4 if dtype == FP32 else None)


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize("given", KTO)
def test_its_kto(given):
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    shape, (dtype, atol, rtol), bias, ref_bias, (index, beta) = given
    case, desirable, baseline = kto_problem(shape, dtype, bias, ref_bias, index)
    loss = LigerFusedLinearKTOLoss(index, beta, compiled=False, use_ref_model=True)

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        reference = ref["ref_hidden"], ref["ref_weight"], ref["ref_bias"]
        return loss(hidden, weight, labels, bias, desirable, *reference, baseline)[0]

    ours, _ = kto_outcomes(case, desirable, baseline, beta)
    assert_same(ours, outcome(theirs, case.operands(), ("hidden", "weight", "bias")), Within(atol, rtol))


def divergence(shape: tuple[int, int, int, int], within: tuple[torch.dtype, float, float], **options: Any):
    dtype, atol, rtol = within
    return Divergence(*rows_of(shape), dtype, Within(atol, rtol), **options)


JSD_SHAPES, JSD_WITHIN = (LARGE, (4, 423, 167, 1423)), [(BF16, 5e-3, 5e-2), (FP32, 1e-5, 5e-4)]
FUSED_JSD = [
    divergence(shape, within, temperature=temperature, beta=beta, ignore_index=index, ignored=ignored)
    for shape, within, (temperature, beta, index, ignored) in product(
        JSD_SHAPES,
        JSD_WITHIN,
        [
            *((t, beta, -100, 0.0) for t, beta in ((1.0, 0.5), (2.0, 0.1), (1.0, 0.0), (1.0, 1.0))),
            *((t, beta, i, 0.3) for t, beta, i in ((1.0, 0.5, 2), (1.0, 0.0, 2), (2.0, 0.1, 42), (1.0, 1.0, 2))),
            *((t, beta, i, 1.0) for t, beta, i in ((1.0, 0.5, 2), (2.0, 0.1, 42))),  # every token ignored
        ],
    )
] + [
    divergence(shape, within, temperature=t, beta=beta, ignore_index=index)
    for shape, within, (t, beta, index) in product(SMALL, JSD_WITHIN, ((1.0, 0.5, -100), (2.0, 0.1, 42)))
]
CHUNKED_JSD = [
    divergence(shape, within, bias=bias, temperature=t, hard=hard, soft=soft, beta=beta, ignore_index=index)
    for shape, within, bias, (t, hard, soft, beta), index in product(
        PAIRS, PAIRED, FLAGS, ((1.0, 0.5, 0.5, 0.5), (2.0, 0.0, 1.0, 0.8), (0.5, 1.0, 0.0, 0.2)), (-100, 42)
    )
] + [
    divergence(shape, within, bias=bias, temperature=t, hard=hard, soft=soft, ignore_index=index)
    for shape, within, bias, (t, hard, soft, index) in product(
        SMALL, [(BF16, 5e-2, 5e-2), (FP32, 1e-4, 5e-3)], FLAGS, ((1.0, 0.5, 0.5, -100), (2.0, 0.1, 0.9, 42))
    )
]
# Its JSD and KL of log-probs that exist: behind a narrow head, as far as they sum over the vocabulary.
OF_LOGPROBS = [
    divergence((1, rows, 16, vocab), within, beta=beta, reduction=reduction)
    for (rows, vocab), within, beta, reduction in product(
        ((2048, 3200), (16441, 1271), (4096, 32000)),
        [(BF16, 5e-2, 5e-2), (FP32, 1e-5, 1e-3), (FP16, 1e-2, 1e-2)],
        (0.0, 0.1, 0.5, 0.9, 1.0),
        ("mean", "sum"),
    )
]
DIVERGENCES = [*FUSED_JSD, *CHUNKED_JSD, *OF_LOGPROBS]


@pytest.mark.parametrize("case", cheapest(DIVERGENCES, lambda case: case.cost, 2), ids=str)
def test_divergence(case):
    case.check()


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize("case", [case for case in FUSED_JSD if case.vocab < 1000], ids=str)
def test_its_fused_jsd(case):
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        options = case.beta, case.ignore_index, case.temperature
        return liger_fused_linear_jsd(hidden, weight, ref["ref_hidden"], ref["ref_weight"], labels, *options)

    case.check_against(theirs)


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize("case", CHUNKED_JSD, ids=str)
def test_its_chunked_jsd(case):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(case.hard, case.soft, case.beta, case.ignore_index, case.temperature, compiled=False)

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        return loss(hidden, weight, ref["ref_hidden"], ref["ref_weight"], labels, bias, ref["ref_bias"])

    case.check_against(theirs)


def policy(loss: str, shape: tuple[int, int, int, int], within: tuple[torch.dtype, float, float], **options: Any):
    dtype, atol, rtol = within
    return Policy(loss, *fit_batch(*shape), dtype, Within(atol, rtol), **options)


def has(loss: str, level: str, delta: float | None, dtype: torch.dtype) -> bool:
    """Whether Liger has this variant, and tests it."""
    if loss in ("cispo", "sapo", "vespo") and (level == "sequence" or delta is not None):
        return False
    return not (loss == "luspo" and level == "token") and not (loss == "vespo" and dtype == BF16)


GRPO = [
    policy(
        *(loss, shape, within),
        bias=bias,
        beta=beta,
        low=clip,
        high=clip,
        temperature=temperature,
        level=level,
        delta=delta,
        reference=reference,
        old=old,
    )
    for loss, level, delta, shape, within, bias, (beta, clip, temperature), (reference, old) in product(
        (*CLIPPED, "cispo", "sapo", "luspo", "vespo"),
        ("token", "sequence"),
        (None, 2.0),
        PAIRS,
        [(BF16, 1e-1, 5e-1), (FP32, 2e-5, 1e-3)],
        FLAGS,
        ((0.1, 0.2, 1.0), (0.0, 0.1, 2.0)),
        ((True, True), (True, False), (False, True)),
    )
    if has(loss, level, delta, within[0])
]
GRPO_OPTIONS = [
    policy(loss, (2, 128, 16, 1000), (FP32, 1e-5, 5e-4), **options, high=0.4, temperature=0.9)
    for loss, options in [
        *(
            (loss, {"level": level, "beta": 0.04, "reference": True, "corrected_kl": True, "delta": delta})
            for loss, level, delta in product(CLIPPED, ("token", "sequence"), (None, 1.5))
        ),
        *(
            (loss, {"sampler": True, "beta": beta, "level": level})
            for loss, beta, level in product(
                (*CLIPPED, "cispo", "sapo", "luspo", "vespo"), (0.0, 0.04), ("token", "sequence")
            )
            if has(loss, level, None, FP32)
        ),
        *((loss, {"items": items}) for loss, items in product(("dapo", "cispo", "vespo"), (214.0, 428.0, 363.8))),
    ]
]
POLICIES = [*GRPO, *GRPO_OPTIONS]


@pytest.mark.parametrize("case", cheapest(POLICIES, lambda case: case.cost, 3), ids=str)
def test_policy(case):
    case.check()


def counts_padding(case: Policy) -> bool:
    """Whether its LUSPO adds up padding as well: where tokens of a response have numbers of their own."""
    return case.loss == "luspo" and (case.sampler or (case.reference and case.beta > 0))


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in (*(case for case in GRPO if case.vocab == 123 and not case.bias), *GRPO_OPTIONS)
        if not counts_padding(case)
    ],
    ids=str,
)
def test_its_grpo(case):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=case.beta,
        compiled=False,
        use_ref_model=case.reference,
        epsilon_low=case.low,
        epsilon_high=case.high,
        loss_type=case.loss,
        max_completion_length=case.length,
        importance_sampling_level=case.level,
        temperature=case.temperature,
        delta=case.delta,
        use_bias_correction_kl=case.corrected_kl,
    )

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **given: Any) -> Tensor:
        mask, advantages, old, ref, ratio = (given[x] for x in ("mask", "advantages", "old", "ref", "ratio"))
        options = {"vllm_is_ratio": ratio, "num_items_in_batch": case.items}
        return loss(hidden, weight, labels, mask, advantages, bias, ref, old, **options)[0]

    case.check_against(theirs)


SELECTED = [
    Statistics(("logprob",), *fit(rows, width, vocab), dtype, Within(atol, rtol), temperature, bias=bias)
    for (rows, width, vocab), (dtype, atol, rtol), temperature, bias in product(
        ((51, 31, 123), (4096, 256, 5000), (1024, 16, 64000), (1024, 16, 151936)),
        [(FP32, 1e-5, 1e-4), (BF16, 5e-2, 5e-1)],
        (0.7, 0.9),
        FLAGS,
    )
]


@pytest.mark.parametrize("case", cheapest(SELECTED, lambda case: case.cost), ids=str)
def test_selected_logprobs(case):
    case.check()


@pytest.mark.calls_peer("liger_kernel")
@pytest.mark.parametrize("case", [case for case in SELECTED if case.vocab < 64000], ids=str)
def test_its_selected_logprobs(case):
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, temperature: Tensor) -> Operands:
        chunk = LigerFusedLinearPPOBase.chunk_forward
        return {"logprob": chunk(hidden[None], weight, labels[None], bias=bias, temperature=case.temperature)[0]}

    case.check_against(theirs)
