"""`logitless align`: self-certainty, rewards and preferences through TRL's trainers."""
