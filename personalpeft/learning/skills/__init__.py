"""Practice: a skill's layer tries tasks, a verifier judges, and what was right becomes likelier."""
