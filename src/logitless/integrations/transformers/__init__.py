"""transformers' models on the pass: loss, generation and scoring without logits."""
