"""Scoring existing text: documents in, a parquet file with a row per token out."""
