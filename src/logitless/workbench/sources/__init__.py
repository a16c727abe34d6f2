"""What runs are made from: models by name, tokenizers, documents, conversations and how they are packed."""
