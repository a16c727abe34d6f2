"""The benchmark on a GPU, `bench/gpu.sh`, and what a GPU would be asked for."""
