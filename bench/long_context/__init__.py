"""What a context of 131,072 tokens takes."""
