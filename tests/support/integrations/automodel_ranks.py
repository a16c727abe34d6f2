"""NeMo Automodel's own recipes on processors: the losses of a few steps with its losses and with ours."""

# ruff: noqa: E402 - what Automodel asks of CUDA is there before it is imported

import json
import sys
import types

import torch

sys.modules["triton"] = None  # Automodel 0.7 has a kernel that newer Tritons refuse, and none serves a processor
CPU = torch.device("cpu")
torch.cuda.reset_peak_memory_stats = torch.cuda.empty_cache = torch.cuda.synchronize = lambda device=None: None
torch.cuda.max_memory_allocated = lambda device=None: 0
torch.cuda.current_device = lambda: CPU

from nemo_automodel._transformers import auto_model
from nemo_automodel.components.config.loader import load_yaml_config
from nemo_automodel.recipes.llm import kd
from nemo_automodel.recipes.llm.kd import KnowledgeDistillationRecipeForNextTokenPrediction
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from tests.support.integrations.launching import ROOT, leave


class Torch(types.ModuleType):
    """torch, where `torch.device("cuda", 0)` is the processor."""

    device = staticmethod(lambda *_: CPU)

    def __getattr__(self, name):
        return getattr(torch, name)


auto_model.torch = Torch("torch")
kd._verify_tokenizer_compatibility = lambda *_: None  # of models that have a name

LOSS = "nemo_automodel.components.loss."
MASKED = {"loss_fn": {"_target_": f"{LOSS}masked_ce.MaskedCrossEntropy"}}
CHUNKED = {"loss_fn": {"_target_": f"{LOSS}chunked_ce.ChunkedCrossEntropy", "chunk_len": 50, "compile": False}}
SMALL = {"loss_fn.memory_budget": 2**16}
TIED = {"model.config.tie_word_embeddings": True}
SOFTCAP = {
    "model.config._target_": "transformers.Gemma2Config",
    "model.config.final_logit_softcapping": 0.5,
    "model.config.initializer_range": 0.3,
    "model.force_hf": True,
}
FP32 = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "torch.float32")
POLICY = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", **FP32}
COMMON = {"dist_env.backend": "gloo", "distributed.mp_policy": POLICY}


def run(recipe=TrainFinetuneRecipeForNextTokenPrediction, **changes):
    """Losses and gradient norms of the steps, and the norm of the head's weight after them."""
    config = load_yaml_config(str(ROOT / "examples" / "automodel_tiny.yaml"))
    for name, value in (COMMON | changes).items():
        config.set_by_dotted(name, value)
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    trainer = recipe(config)
    trainer.setup()
    found = {"loss": [], "norm": [], "class": type(trainer.loss_fn).__name__}

    def log(metrics, *_, **__):
        found["loss"].append(float(metrics.metrics["loss"]))
        found["norm"].append(float(metrics.metrics["grad_norm"]))

    trainer.log_train_metrics = log
    trainer.run_train_validation_loop()
    weight = trainer.model_parts[0].get_output_embeddings().weight
    found["weight"] = getattr(weight, "full_tensor", lambda: weight)().double().norm().item()
    return found


def main(place: str) -> None:
    config = load_yaml_config(str(ROOT / "examples" / "automodel_tiny.yaml"))
    divergence = {"_target_": f"{LOSS}kd_loss.KDLoss"}
    teacher = {"teacher_model": config.model.to_dict(), "kd_ratio": 0.5, "kd_loss_fn": divergence}
    distil = KnowledgeDistillationRecipeForNextTokenPrediction
    results = {
        "masked": run(**MASKED),
        "chunked": run(**CHUNKED),
        "streamed": run(),
        "small": run(**SMALL),
        "masked, tied": run(**MASKED, **TIED),
        "streamed, tied": run(**TIED),
        "masked, softcap": run(**MASKED, **SOFTCAP),
        "streamed, softcap": run(**SOFTCAP),
        "masked, distilled": run(distil, **MASKED, **teacher),
        "streamed, distilled": run(distil, **teacher),
    }
    if torch.distributed.get_rank() == 0:
        with open(place, "w") as file:
            json.dump(results, file)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
