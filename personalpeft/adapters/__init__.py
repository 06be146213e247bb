"""LoRA away from any device: the packed format, composition, validation, PEFT folders."""
