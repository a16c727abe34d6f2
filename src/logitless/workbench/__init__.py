"""Programs on top of the library: training, alignment, scoring, planning and profiling."""
