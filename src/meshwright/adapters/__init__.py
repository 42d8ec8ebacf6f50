"""Fine-tuning by adapters: attach them to a model, merge them, read and write peft folders."""
