"""GGUF files, llama.cpp's: what their headers say, and the same model as a transformers directory."""
