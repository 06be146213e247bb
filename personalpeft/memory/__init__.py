"""Rules and facts that act through the prompt."""
