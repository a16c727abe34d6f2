"""GRPO through TRL with the exact KL: the penalty is KL(policy || reference) over the whole vocabulary.

    python recipes/grpo.py                        # a tiny model learns to answer in digits, less than a minute on a CPU
    python recipes/grpo.py --model Qwen/Qwen3-0.6B --lora-rank 16 --lr 1e-5 --steps 200

TRL estimates the KL from the one token that was sampled. `install(trainer, exact_kl=True)` takes it over all tokens
that might have been, without logits; nothing else of the trainer changes. Replace `QUESTIONS` and `reward` by yours.
"""

import argparse
import random
import re

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from logitless.integrations.trl import install

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a hub id or directory; default: a tiny model with random weights")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=32, help="completions per step")
parser.add_argument("--group", type=int, default=8, help="completions of one prompt, compared with each other")
parser.add_argument("--tokens", type=int, default=4, help="the longest completion")
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--beta", type=float, default=0.04, help="the weight of the KL")
parser.add_argument("--lora-rank", type=int, default=0, help="0: every weight is trained")
parser.add_argument("--output", default="runs/grpo")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
random.seed(args.seed)
torch.manual_seed(args.seed)

# The task: sums of two digits.
QUESTIONS = [{"prompt": f"{a} + {b} =", "total": a + b} for a in range(10) for b in range(10)]
random.shuffle(QUESTIONS)


def reward(completions: list[str], total: list[int], **_) -> list[float]:
    """1 where the first number is the sum; else a tenth of the share of digits, so that there is something to climb."""
    scores = []
    for text, right in zip(completions, total, strict=True):
        answer = re.match(r"\s*(\d+)", text)
        digits = sum(letter.isdigit() for letter in text) / max(1, len(text))
        scores.append(1.0 if answer and int(answer[1]) == right else 0.1 * digits)
    return scores


def tiny_model(directory: str) -> str:
    """A model with random weights and a tokenizer of single bytes, saved where TRL can load it from."""
    tokenizer = Qwen2Tokenizer().train_new_from_iterator([], vocab_size=257, show_progress=False)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class Report(TrainerCallback):
    """One line per step."""

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            print(
                f"step {state.global_step:4d}  reward {logs['reward']:.3f}  exact KL {logs['kl']:.4f}  "
                f"gradient {logs['grad_norm']:.2f}",
                flush=True,
            )


gpu = torch.cuda.is_available()
trainer = GRPOTrainer(
    model=args.model or tiny_model(f"{args.output}/start"),
    reward_funcs=reward,
    train_dataset=Dataset.from_list(QUESTIONS),
    peft_config=LoraConfig(r=args.lora_rank, target_modules="all-linear") if args.lora_rank else None,
    callbacks=[Report()],
    args=GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        num_generations=args.group,
        max_completion_length=args.tokens,
        learning_rate=args.lr,
        beta=args.beta,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=gpu,
        use_cpu=not gpu,
        seed=args.seed,
    ),
)
trainer.remove_callback(PrinterCallback)

install(trainer, exact_kl=True)
trainer.train()

history = [entry for entry in trainer.state.log_history if "reward" in entry]
first, last = history[0], history[-1]
print(f"reward {first['reward']:.3f} -> {last['reward']:.3f}, at a KL of {last['kl']:.4f} nats a token")
trainer.save_model(args.output)
