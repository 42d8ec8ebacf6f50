"""From a question to a decision: the space of layouts, their prices, the candidate."""
