"""The vLLM backend: an OpenAI-compatible server elsewhere serves, torch learns here."""
