"""verl's engine and its fine-tuning on two processors: its numbers and losses with its own engine and with ours."""

# ruff: noqa: E402 - verl is told of the processor before it asks what there is

import json
import math
import sys
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import _init_utils
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class Processor(PlatformCUDA):
    """A processor as verl's platforms are: it has none of its own."""

    device_name, vendor_name = "cpu", "processor"
    device_module = SimpleNamespace(
        is_available=lambda: False,
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), int),
        mem_get_info=lambda: (0, 0),
        empty_cache=lambda: None,
        set_device=lambda device: None,
        get_device_name=lambda: "CPU",
    )

    def current_device(self):
        return torch.device("cpu")


set_platform(Processor())

import verl.utils.distributed as distributed

all_reduce = dist.all_reduce


def _all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, **more):
    """With a mean too, which gloo does not know."""
    mean = op == dist.ReduceOp.AVG
    done = all_reduce(tensor, dist.ReduceOp.SUM if mean else op, group, **more)
    if mean:
        tensor /= dist.get_world_size(group)
    return done


dist.all_reduce = _all_reduce
_init_utils._check_module_states_for_sync_module_states = lambda states: None  # it wants them on a GPU
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # of what verl offloads: for a GPU
distributed.initialize_global_process_group = lambda: None  # there is one already, which knows one backend for a device

import pandas as pd
import verl.trainer.sft_trainer as sft
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.tracking import Tracking
from verl.workers.config import (
    ActorConfig,
    DistillationConfig,
    DistillationLossConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss, sft_loss

from logitless.errors import ConfigError
from logitless.integrations.transformers.lm_head import causal_lm
from logitless.resident import AllocationTracker
from tests.support.integrations.launching import ROOT, leave

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
V, K = 4000, 64
PROMPTS, RESPONSES = (40, 3, 21, 70), (90, 130, 51, 64)
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"


def prepare(folder: Path) -> Path:
    """A model with its tokenizer, and a few conversations, as verl reads them."""
    texts = [path.read_text("utf-8")[:800] for path in sorted((ROOT / "docs").glob("*.md"))]
    roles = ("user", "assistant")
    messages = [[{"role": r, "content": t} for r, t in zip(roles, (x[:200], x[200:]), strict=True)] for x in texts]
    pd.DataFrame({"messages": messages}).to_parquet(folder / "data.parquet")
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, vocab_size=1000, show_progress=False)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "teacher")
    other = Qwen2Tokenizer().train_new_from_iterator(texts, vocab_size=900, show_progress=False)
    other.save_pretrained(folder / "other")
    own = {"vocab_size": V, "tie_word_embeddings": False, "initializer_range": 0.1, **SHAPE}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**own)).save_pretrained(folder / "model")
    wider = own | {"vocab_size": V + 96, "hidden_size": 48, "tie_word_embeddings": True}  # its weight has more padding
    for name in ("teacher", "other"):
        Qwen3ForCausalLM(Qwen3Config(**wider)).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "narrow")
    Qwen3ForCausalLM(Qwen3Config(**own | {"vocab_size": V - 96})).save_pretrained(folder / "narrow")
    return folder / "model"


def engine(kind, model, strategy="fsdp2", packed=True, fused=False, padded_to=0, precision=FP32, options=None, **more):
    """An engine of verl's, as its workers make one."""
    made = kind(
        model_config=HFModelConfig(
            path=str(model),
            use_remove_padding=packed,
            use_fused_kernels=fused,
            override_config={"attn_implementation": "sdpa"},
            fused_kernel_options={"impl_backend": "torch", "memory_budget": 2**18, **(options or {})},
            **more,
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            mixed_precision=precision,
            use_torch_compile=False,
            pad_to_length=padded_to > 0,
            pad_to_length_bucket=padded_to or 1,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=4),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def nested(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def batch(packed, rank=None, **asked):
    """Four conversations of each rank's own, in micro-batches of two, with a temperature each."""
    torch.manual_seed(1 + (dist.get_rank() if rank is None else rank))
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    ids = [torch.randint(V, (n,)) for n in lengths]
    tensors = {
        "input_ids": nested(ids),
        "position_ids": nested(map(torch.arange, lengths)),
        "prompts": nested(x[:p] for x, p in zip(ids, PROMPTS, strict=True)),
        "responses": nested(x[p:] for x, p in zip(ids, PROMPTS, strict=True)),
        "response_mask": nested(torch.ones(r) for r in RESPONSES),
        "loss_mask": nested(torch.ones(r) for r in RESPONSES),
        "old_log_probs": nested(torch.randn(r) - 8 for r in RESPONSES),
        "ref_log_prob": nested(torch.randn(r) - 8 for r in RESPONSES),
        "advantages": nested(torch.randn(r) for r in RESPONSES),
        "temperature": torch.tensor([1.0, 0.7, 1.3, 0.9]),
    }
    if asked.pop("fine_tuning", False):
        tensors["loss_mask"] = nested(torch.arange(n) >= p for n, p in zip(lengths, PROMPTS, strict=True))
        tensors = {name: tensors[name] for name in ("input_ids", "position_ids", "loss_mask", "temperature")}
    if asked.get("distillation_use_topk"):
        best = [torch.randn(n, V).log_softmax(-1).topk(K) for n in lengths]
        tensors |= {"teacher_logprobs": nested(x.values for x in best), "teacher_ids": nested(x.indices for x in best)}
    return tu.get_tensordict(
        tensors,
        {
            "use_remove_padding": packed,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "global_batch_size": 8,
            "pad_mode": "no_padding",
            "return_model_output": True,
            **asked,
        },
    )


def numbers(made, loss, packed=True, **asked):
    """Values, loss, gradient norm and largest allocation of a step, and the values once more after it."""
    data = batch(packed, **asked)
    with made.train_mode(), AllocationTracker() as seen:
        output = made.train_batch(data, loss_function=loss)
    values = {key: x.values().tolist() for key, x in output["model_output"].items()}
    found = {"loss": output["loss"], "norm": [output["metrics"]["grad_norm"]], **values}
    if not asked.get("distillation_use_topk") and "distillation_losses" not in found:
        with made.eval_mode():
            again = made.infer_batch(batch(packed, **asked))["model_output"]
        found |= {f"{key}, after": x.values().tolist() for key, x in again.items()}
    return {"class": type(made).__name__, "numbers": found, "largest": seen.largest}


def from_elsewhere(made):
    """How many numbers come of a padded micro-batch, which verl's workers have in host memory."""
    here, _ = tu.chunk_tensordict(batch(False), 2)
    with made.eval_mode():
        _, output = made.forward_step(SimpleNamespace(to=lambda device: here), None, forward_only=True)
    return output["model_output"]["log_probs"].values().numel()


def policy_loss():
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )
    return partial(ppo_loss, actor)


def distilling(chunked=False):
    loss = DistillationLossConfig(
        loss_mode="forward_kl_topk",
        topk=K,
        use_policy_gradient=False,
        use_task_rewards=False,
        use_chunked_topk=chunked,
    )
    actor = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2)
    return partial(distillation_ppo_loss, actor, DistillationConfig(distillation_loss=loss))


ASKED = {"calculate_entropy": True, "calculate_sum_pi_squared": True}
TEACHER = {"distillation_use_topk": True, "distillation_only": True}
LORA = {"lora_rank": 4, "target_modules": ["q_proj"]}  # verl cannot shard adapters of the head
CASES = {
    "fsdp2": ({"padded_to": 32}, policy_loss, ASKED),
    "fsdp": ({"strategy": "fsdp"}, policy_loss, ASKED),
    "padded": ({"packed": False}, policy_loss, ASKED),
    "lora": (LORA, policy_loss, ASKED),
    "bf16": ({"precision": None}, policy_loss, ASKED),
    "distilled": ({}, distilling, TEACHER),
}


TAUGHT = {
    "forward": {},
    "reverse": {"strategy": "fsdp", "distill_loss": "reverse"},
    "jsd": {"packed": False, "distill_loss": "jsd"},
    "fine-tuning": {"fine_tuning": True},
    "half": {"distill_weight": 0.25},
    "in bf16": {"precision": None, "distill_loss": "reverse"},
}


def learned(model, kind, packed=True, fine_tuning=False, strategy="fsdp2", precision=FP32, **options):
    """`numbers` of a step that learns from a teacher, beside the loss of verl's own kind of training."""
    options = {"teacher": str(model.parent / "teacher"), **options}
    made = engine(kind, model, strategy, packed, precision=precision, options=options)
    loss, asked = (partial(sft_loss, None), {"fine_tuning": True}) if fine_tuning else (policy_loss(), ASKED)
    return numbers(made, loss, packed, **asked)


def dense64(model, kind):
    """This rank's divergences and loss, and the gradient norm over all ranks, by logits in float64."""
    student, teacher = (
        Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
        for path in (model, model.parent / "teacher")
    )
    each, own, total, count = [], 0.0, 0.0, 0
    for rank in range(dist.get_world_size()):
        data = batch(True, rank)
        for ids, temperature, start in zip(data["input_ids"].unbind(), data["temperature"], PROMPTS, strict=True):
            t, s = ((x(ids[None]).logits[0, :, :V] / temperature).log_softmax(-1) for x in (teacher, student))
            t = t.detach()
            m = torch.logaddexp(s, t) - math.log(2)
            terms = {
                "forward": t.exp() * (t - s),
                "reverse": s.exp() * (s - t),
                "jsd": (s.exp() * (s - m) + t.exp() * (t - m)) / 2,
            }
            found = terms[kind].sum(-1)
            if rank == dist.get_rank():
                each, own = each + found.tolist(), own + found[start - 1 : -1].sum().item()
            total, count = total + found[start - 1 : -1].sum(), count + len(ids) - start
    (total / count).backward()
    norm = torch.stack([x.grad.norm() for x in student.parameters()]).norm()
    return {"distillation_losses": each, "loss": own * dist.get_world_size() / count, "norm": norm.item()}


def refused(act):
    try:
        act()
    except ConfigError as error:
        return str(error)
    return ""


def scaled(made):
    """What a step says of a model that halves its logits without a word in its configuration."""
    own = Qwen3ForCausalLM.forward

    def forward(self, *args, **kwargs):
        outputs = own(self, *args, **kwargs)
        outputs.logits = outputs.logits / 2
        return outputs

    inner = causal_lm(made.module)
    inner.forward = MethodType(forward, inner)
    return refused(lambda: numbers(made, policy_loss(), **ASKED))


def fine_tune(place: Path, model: Path, *changes: str):
    """What verl's own command logs of the example's steps and its validation."""
    found = {"loss": [], "norm": [], "validation": [], "logits": 0}

    def log(self, data, step, **_):
        found["validation" if "val/loss" in data else "loss"].append(data.get("val/loss", data.get("train/loss")))
        if "train/grad_norm" in data:
            found["norm"].append(data["train/grad_norm"])

    own = Qwen3ForCausalLM.forward

    def forward(self, *args, **kwargs):
        outputs = own(self, *args, **kwargs)
        found["logits"] += outputs.logits.numel() > self.config.vocab_size  # one row is a probe
        return outputs

    Tracking.log, Qwen3ForCausalLM.forward, sft.destroy_global_process_group = log, forward, lambda: None
    arguments = (
        *("--config-dir", str(ROOT / "examples"), "--config-name", "verl_tiny"),
        *(f"model.path={model}", "+model.override_config.attn_implementation=sdpa", "trainer.device=cpu"),
        *(f"data.train_files={place / 'data.parquet'}", f"data.val_files={place / 'data.parquet'}"),
        *("data.num_workers=0", "data.ignore_input_ids_mismatch=True", "engine.use_torch_compile=False"),
        *(f"+engine.mixed_precision.{name}={dtype}" for name, dtype in FP32.items()),
        *("optim.lr=0.01", "trainer.resume_mode=disable", f"hydra.run.dir={place}"),
    )
    sys.argv = ["sft_trainer", *arguments, *changes]
    try:
        sft.main()
    finally:
        Qwen3ForCausalLM.forward = own
    return found


def main(place: Path) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        prepare(place)
    dist.barrier()
    model, own = place / "model", FSDPEngineWithLMHead
    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(own)
    results: dict = {"dense run": fine_tune(place, model, "model.external_lib=null")}
    results["streamed run"] = fine_tune(place, model)
    streamed = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    for name, (options, loss, asked) in CASES.items():
        for kind in (own, streamed):
            made = engine(kind, model, **options)
            results[f"{name}, {kind.__name__}"] = numbers(made, loss(), options.get("packed", True), **asked)
    teacher = f"+model.fused_kernel_options.teacher={model}"
    results["taught run"] = fine_tune(place, model, teacher, "+model.fused_kernel_options.distill_weight=0.25")
    for name, options in TAUGHT.items():
        results[f"{name}, taught"] = learned(model, streamed, **options)
    results |= {f"{kind}, float64": dense64(model, kind) for kind in ("forward", "reverse", "jsd")}
    results["from elsewhere"] = from_elsewhere(engine(streamed, model, packed=False))
    results["fused"] = refused(lambda: engine(streamed, model, fused=True))
    results["megatron"] = refused(lambda: EngineRegistry.new("language_model", "megatron"))
    results["chunked"] = refused(lambda: numbers(engine(streamed, model), distilling(chunked=True), **TEACHER))
    for option, value in {"distill_loss": "backward", "distill_weight": 2, "teacher": str(place / "other")}.items():
        results[option] = refused(lambda found={option: value}: engine(streamed, model, options=found))
    results["scaled"] = scaled(engine(streamed, model))
    results["narrow"] = refused(lambda: engine(streamed, model, options={"teacher": str(place / "narrow")}))
    results["misspelt"] = refused(lambda: engine(streamed, model, options={"distil_loss": "jsd"}))
    both = {"teacher": str(place / "teacher")}
    results["both"] = refused(lambda: numbers(engine(streamed, model, options=both), distilling(), **TEACHER))
    if dist.get_rank() == 0:
        (place / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
