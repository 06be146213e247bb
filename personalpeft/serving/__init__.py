"""From stacks and prompts to pieces of text: residency and the engine loop."""
