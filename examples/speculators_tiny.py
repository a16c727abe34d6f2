"""An EAGLE-3 draft model with random weights, trained by speculators on random hidden states, without logits.

    python examples/speculators_tiny.py            # a minute on a CPU
    python examples/speculators_tiny.py --dense    # speculators' own losses, to compare with

What differs from any other training of a draft model is `install`.
"""

import sys

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from logitless.integrations.speculators import install

TOKENS, WIDTH, VOCAB = 128, 64, 8000
torch.manual_seed(0)
layers = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="eager",
)
model = Eagle3DraftModel(
    Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=[0, 1],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
)
for head in (model.embed_tokens, model.lm_head, model.verifier_lm_head):  # a verifier's, in real life
    torch.nn.init.normal_(head.weight, std=0.3)

if "--dense" not in sys.argv:
    install(model, memory_budget=2**22)

batch = {
    "hidden_states": torch.randn(1, TOKENS, 2 * WIDTH),  # of two of the verifier's layers
    "input_ids": torch.randint(VOCAB, (1, TOKENS)),
    "document_ids": torch.zeros(1, TOKENS, dtype=torch.long),
    "loss_mask": torch.ones(1, TOKENS, dtype=torch.bool),
    "verifier_last_hidden_states": torch.randn(1, TOKENS, WIDTH),
}
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
losses = []
for step in range(10):
    _, loss, metrics = model(**batch, ttt_steps=2, loss_config=resolve_loss_config("kl_div", "eager"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    accuracy = metrics["full_acc_0_sum"] / metrics["full_acc_0_total"]
    print(f"step {step}  loss {losses[-1]:.4f}  accuracy {accuracy:.3f}")
