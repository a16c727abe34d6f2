"""Pretrain a causal language model on text, with the logitless loss: the (tokens, vocabulary) logits never exist.

    python recipes/pretrain.py                      # a tiny model on Python's own library, less than a minute on a CPU
    python recipes/pretrain.py --model Qwen/Qwen3-0.6B-Base --data books/*.txt --length 4096 --batch-size 4 --lr 2e-5

What differs from any other training loop is `loss_of`.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

import logitless as ll

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a hub id or directory to go on from; default: a tiny model with random weights")
parser.add_argument("--data", nargs="*", type=Path, help="text files; default: the modules of Python's own library")
parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
parser.add_argument("--batch-size", type=int, default=8, help="sequences per pass")
parser.add_argument("--accumulate", type=int, default=1, help="passes per step")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate, after the warm-up")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--output", type=Path, default=Path("runs/pretrain"))
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)

# The text: one document per file.
files = args.data or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
texts = [path.read_text("utf-8", errors="replace") for path in files]

# The model and its tokenizer.
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
else:
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, vocab_size=2048, show_progress=False)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
model.to(args.device).train()

# One long row of tokens; the last twentieth is held out.
ids = torch.tensor([i for text in tokenizer(texts).input_ids for i in [*text, tokenizer.eos_token_id]])
train_ids, held_ids = ids.split([len(ids) - len(ids) // 20, len(ids) // 20])
if len(held_ids) <= args.length:
    need = 20 * (args.length + 1)
    parser.error(f"--data: expected {need:,} tokens or more, got {len(ids):,}; give more text, or a lower --length")


def batch_of(ids: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Random stretches of the text, (batch, length + 1)."""
    starts = torch.randint(len(ids) - args.length, (args.batch_size, 1), generator=generator)
    return ids[starts + torch.arange(args.length + 1)].to(args.device)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token. Both gradients are formed in this one pass over the vocabulary."""
    device = torch.device(args.device).type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = ll.hidden_states(model, {"input_ids": batch[:, :-1], "use_cache": False})
        return ll.linear_cross_entropy(hidden, ll.LMHead.of(model), batch[:, 1:])


@torch.no_grad()
def held_out_loss(batches: int = 4) -> float:
    """The same stretches of the held-out text each time."""
    generator = torch.Generator().manual_seed(args.seed)
    return sum(loss_of(batch_of(held_ids, generator)).item() for _ in range(batches)) / batches


def learning_rate(step: int) -> float:
    """A linear warm-up over a twentieth of the steps, then a cosine down to a tenth."""
    warmup = max(1, args.steps // 20)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def price_of(batch: torch.Tensor) -> str:
    """What `loss_of` costs: matrix products, slices and bytes."""
    hidden = ll.hidden_states(model, {"input_ids": batch[:, :-1], "use_cache": False})
    return str(ll.explain(hidden, ll.LMHead.of(model), batch[:, 1:], loss=True))


print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {len(ids):,} tokens of text")
print(f"the loss: {price_of(batch_of(train_ids))}")

matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
)
losses, before = [], held_out_loss()
print(f"held-out loss {before:.3f} before training")

for step in range(args.steps):
    began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    total = 0.0
    for _ in range(args.accumulate):
        loss = loss_of(batch_of(train_ids)) / args.accumulate
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total)
    if step % 10 == 0 or step == args.steps - 1:
        speed = args.accumulate * args.batch_size * args.length / (time.perf_counter() - began)
        print(f"step {step:4d}  loss {total:.3f}  gradient {norm:.2f}  {speed:,.0f} tokens/s", flush=True)

after = held_out_loss()
print(f"held-out loss {before:.3f} -> {after:.3f}")

# A sample, drawn from the hidden states: no logits here either.
model.eval()
prompt = tokenizer("def ", return_tensors="pt").to(args.device)
sample = ll.generate(model, prompt, max_new_tokens=48, do_sample=True, temperature=0.8, top_p=0.95)
print(tokenizer.decode(sample.ids[0]))

model.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
print(f"saved to {args.output}: AutoModelForCausalLM.from_pretrained('{args.output}')")
