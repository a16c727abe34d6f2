"""Where a CPU's time goes: what single operations, slices and layouts take."""
