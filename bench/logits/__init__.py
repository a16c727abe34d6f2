"""Log-probs of logits that exist already."""
