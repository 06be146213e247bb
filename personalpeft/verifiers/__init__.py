"""Verifiers of this distribution, registered as entry points like those of plugins."""
