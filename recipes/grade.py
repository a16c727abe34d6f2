"""GRADE: train a policy by backpropagation through the text that it generates (arXiv 2601.11574).

    python recipes/grade.py                       # tiny models with random weights, less than a minute on a CPU
    python recipes/grade.py --model Qwen/Qwen3-0.6B --reward-model runs/my-classifier --lr 1e-5 --tokens 64

Every token is drawn by Gumbel-softmax and read on as a weighted sum of embedding rows, so that a frozen classifier's
gradient reaches the policy through all of them. The classifier must have the policy's tokenizer. Weights are kept for
the `--top-k` likeliest entries of each token: the (batch, tokens, vocabulary) tensor never exists.
"""

import argparse
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from logitless import relax
from logitless.integrations.transformers.soft_tokens import reader_of, table_of

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="the policy, a hub id or directory; default: tiny models with random weights")
parser.add_argument("--reward-model", help="a sequence classifier with the policy's tokenizer")
parser.add_argument("--reward-label", type=int, default=1, help="the label whose probability is the reward")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--tokens", type=int, default=12, help="length of a continuation; an end token does not stop it")
parser.add_argument("--top-k", type=int, default=256)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--beta", type=float, default=0.02, help="the weight of the KL")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--output", default="runs/grade")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
if args.model and not args.reward_model:
    parser.error("--model also needs --reward-model: a sequence classifier with the same tokenizer")
random.seed(args.seed)
torch.manual_seed(args.seed)

PROMPTS = [f"{what} of this film was" for what in ("The start", "The end", "Most", "None", "The plot", "The cast")]


def learn_letters(judge: Qwen3ForSequenceClassification) -> None:
    """Teaches the tiny classifier which texts are more than half of letters: label 1."""
    is_letter = torch.tensor([tokenizer.decode([i]).strip().isalpha() for i in range(len(tokenizer))])
    letters, others = is_letter.nonzero()[:, 0], (~is_letter).nonzero()[:, 0]
    optimizer = torch.optim.AdamW(judge.parameters(), lr=3e-3)
    for _ in range(100):
        chosen = torch.rand(32, args.tokens) < torch.rand(32, 1)
        some = [ids[torch.randint(len(ids), chosen.shape)] for ids in (letters, others)]
        judge(torch.where(chosen, *some), labels=(chosen.float().mean(-1) > 0.5).long()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# The policy, and the classifier that rewards it.
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model)
    judge = AutoModelForSequenceClassification.from_pretrained(args.reward_model)
else:
    tokenizer = Qwen2Tokenizer(padding_side="left").train_new_from_iterator(PROMPTS, 512, show_progress=False)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,  # wide enough that a frozen head can be sure of a token
        num_labels=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model, judge = Qwen3ForCausalLM(config), Qwen3ForSequenceClassification(config)
    judge.config.pad_token_id = tokenizer.pad_token_id  # asked for in any batch; nothing is padded here
    learn_letters(judge)

judge.to(args.device).eval().requires_grad_(False)
# With its adapters the model is the policy, without them the reference that the KL is measured to.
policy = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).to(args.device).eval()  # no dropout
vocab_size = max(tokenizer.get_vocab().values()) + 1  # rows behind, which pad an embedding, have no text
reader, reference = reader_of(policy, vocab_size), reader_of(policy, vocab_size, without_adapters=True)
judge_table = table_of(judge, vocab_size)


def rollout(prompts: list[str], tau: float) -> tuple[relax.Rollout, torch.Tensor]:
    """Continuations: soft tokens (B, T) with their KL to the reference, and what the classifier reads (B, T, E)."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(args.device)
    seeds = torch.randint(2**62, (len(prompts),), device=args.device)  # each sequence has noise of its own
    # One-hot forward, the soft weights' gradient backward (straight-through): hard=False is soft both ways.
    sampling = relax.Sampling(args.tokens, tau, k=min(args.top_k, vocab_size), hard=True)
    made = relax.generate(reader, batch.input_ids, batch.attention_mask, seeds, sampling, reference=reference)
    return made, relax.soft_embedding(made.soft, judge_table)


trained = [p for p in policy.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
history = []
for step in range(args.steps):
    tau = relax.anneal(step, args.steps)  # from 2 to 0.5
    made, read = rollout(random.choices(PROMPTS, k=args.batch_size), tau)
    reward = judge(inputs_embeds=read).logits.float().softmax(-1)[:, args.reward_label]
    kl = made.kl.sum(-1)
    made.backward((args.beta * kl - reward).mean())  # not the loss's own: through every token
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    history.append({"reward": reward.mean().item(), "kl": kl.mean().item(), "gradient": norm.item()})
    print(
        f"step {step:4d}  reward {history[-1]['reward']:.3f}  KL {history[-1]['kl']:.3f}  gradient {norm:.3f}  "
        f"tau {tau:.2f}  the {args.top_k} likeliest hold {made.soft.coverage.mean():.1%}",
        flush=True,
    )

first, last = history[0], history[-1]
print(f"reward {first['reward']:.3f} -> {last['reward']:.3f}, at a KL of {last['kl']:.3f} nats a continuation")
print(f"a continuation: {tokenizer.decode(made.soft.token[0])!r}")
policy.save_pretrained(args.output)
