"""LoRA adapters independent of any device: types, composition, validation, file formats."""
