"""The terminal chat: frozen values for what was said, threads for what takes time, thin widgets for what is seen."""
