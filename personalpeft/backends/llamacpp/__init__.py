"""llama.cpp: serves a base's own GGUF on the device, and learns on torch."""
