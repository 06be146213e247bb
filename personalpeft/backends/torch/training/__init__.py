"""Train LoRA layers over the frozen base on torch."""
