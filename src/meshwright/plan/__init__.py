"""What is decided: work, memory, traffic and the search over layouts. Imports no torch."""
