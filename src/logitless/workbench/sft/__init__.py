"""Training a causal language model on text, on `transformers.Trainer`, without the logits tensor."""
