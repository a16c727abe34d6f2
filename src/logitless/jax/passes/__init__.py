"""The pass over the vocabulary: online-softmax accumulation, the logits' gradient, and the engine that runs both."""
