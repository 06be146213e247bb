"""Shared base models: cards, digests, and how their files are resolved and converted."""
