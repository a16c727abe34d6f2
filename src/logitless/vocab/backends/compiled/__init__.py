"""The pass on a CPU with its element-wise work compiled by TorchInductor: the eager formulas, a few loops a slice."""
