"""The vLLM backend: a remote OpenAI-compatible server serves, torch learns."""
