"""Shared models: cards, digests, and how their files are found and prepared."""
