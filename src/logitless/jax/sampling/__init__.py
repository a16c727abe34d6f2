"""What `sample_tokens` is made of: noise, the rules' nuclei, drawing a token, and the record of it."""
