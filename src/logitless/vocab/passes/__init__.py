"""The passes over a whole call, one for each price, and their place in autograd and torch.compile."""
