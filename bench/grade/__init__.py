"""GRADE measured: memory, time, gradients and what is learned."""
