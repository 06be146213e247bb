"""Adapter files: packed, PEFT, GGUF and published folders."""
