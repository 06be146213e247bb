"""Read and write base models as GGUF files."""
