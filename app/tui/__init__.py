"""The terminal chat: frozen values for state, threads for blocking work, Textual widgets."""
