"""What a GPU would be asked for, counted without one: `python -m bench.gpu.counts.run`, or `make gpu-counts`.

Tensors that have shapes and no numbers claim to be on a CUDA device. The library then takes the way that it takes
there; every product, kernel, operator and wait is recorded, each kernel is compiled as it would be there, and its
machine code is counted. Times are predictions from these counts and from constants that `machine` states.
"""
