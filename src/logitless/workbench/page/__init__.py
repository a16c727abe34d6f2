"""One self-contained HTML page from the planner and the profiler."""
