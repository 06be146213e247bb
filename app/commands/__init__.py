"""The commands, each thin over the library's public surface."""
