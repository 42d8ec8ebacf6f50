"""Single operations and their plain references. Imports nothing of ours but errors and hardware."""
