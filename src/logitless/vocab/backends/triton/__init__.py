"""The pass as Triton kernels: imported on first use, where triton is installed."""
