"""`logitless demo`: a real model before and after a few minutes of training, on one page."""
