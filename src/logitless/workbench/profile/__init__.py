"""Where the memory of a training step goes, traced on fake tensors or measured."""
