"""What turns hidden states into logits: `LMHead`, LoRA factors, shards, and how a model's head is found."""
