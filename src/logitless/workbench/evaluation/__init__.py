"""Evaluating a model on text or tasks: perplexity, accuracy, calibration, and how far it is from another model."""
