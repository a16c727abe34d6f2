"""Native Sparse Attention (Yuan et al., arXiv 2502.11089) for models of Qwen3's shape, memory linear in the context."""
