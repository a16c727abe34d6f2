"""The pass as Triton kernels. Only `support` may be imported where triton is not installed."""
