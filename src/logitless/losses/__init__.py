"""Losses as pure functions of per-token numbers: one loss per token (per pair for preferences), no vocabulary in sight."""
