"""The llama.cpp backend: llama.cpp serves a GGUF file of the base, torch learns."""
