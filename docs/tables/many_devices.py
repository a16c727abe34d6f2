"""Many GPUs on paper: what each holds and sends in a step, by the planner's formulas."""

from docs.tables.shared import grid
from docs.tables.traffic import traffic
from logitless.models.catalog import shape_of
from logitless.workbench.plan.plan import plan
from logitless.workbench.plan.setting import Setting

MODEL, LENGTH, TOKENS = "qwen3-8b", 131_072, 1 << 25
LAYOUTS = (  # GPUs, sharding, tensor parallel, context parallel
    (8, "fsdp2", 1, 1),
    (8, "fsdp2", 8, 1),
    (8, "fsdp2", 1, 8),
    (64, "fsdp2", 1, 1),
    (64, "fsdp2", 8, 1),
    (64, "fsdp2", 1, 8),
    (1024, "fsdp2", 8, 1),
    (1024, "fsdp2", 8, 8),
)
COLUMNS = {
    "gradients": "gradients",
    "weights of the layers": "layers' weights",
    "weights of the head": "head",
    "the split head": "head",
    "hidden states of the layers": "hidden states",
    "keys and values": "keys, values",
}
GIB = 1 << 30


def setting(gpus: int, sharding: str, tensor: int, context: int) -> Setting:
    return Setting(
        shape_of(MODEL),
        batch_size=TOKENS // LENGTH,
        response_length=LENGTH,
        micro_batch=1,
        gpus=gpus,
        sharding=sharding,
        tensor_parallel=tensor,
        context_parallel=context,
        gradient_checkpointing=True,
    ).check()


def scale() -> str:
    """Two tables: memory of each GPU, dense and streamed, and what leaves it in a step."""
    held, sent = [], []
    columns = list(dict.fromkeys(COLUMNS.values()))
    for layout in LAYOUTS:
        given = setting(*layout)
        gpus, _, tensor, context = layout
        where = [f"{gpus:,}", str(given.shards // context), str(tensor), str(context)]
        dense, ours = plan(given, "dense"), plan(given)
        peaks = [f"{made.peak / GIB:,.0f} GiB" for made in (dense, ours)]
        held.append([*where, str(given.accumulation), *peaks, ours.peak_phase])
        amounts = dict.fromkeys(columns, 0)
        for row in traffic(given):
            amounts[COLUMNS[row.name.split(",")[0]]] += row.nbytes
        cells = [f"{nbytes / GIB:,.1f}" if nbytes else "" for nbytes in amounts.values()]
        sent.append([*where, *cells, f"{sum(amounts.values()) / GIB:,.0f}"])
    first = ["GPUs", "data", "tensor", "context"]
    return "\n\n".join(
        [
            grid([*first, "passes a step", "peak, dense logits", "peak, logitless", "at"], held),
            "GiB that leave each GPU in a step:",
            grid([*first, *columns, "in all"], sent),
            f"{MODEL}, {TOKENS // LENGTH} sequences of {LENGTH:,} tokens a step, one at a time on each GPU, FSDP2 over "
            "data and context, checkpointing, AdamW in fp32 with master weights.",
        ]
    )
