"""What acts at once: rules and facts that enter the prompt."""
