"""The pass in plain torch operations, on any device."""
