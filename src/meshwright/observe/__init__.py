"""What a run writes down: metrics are reductions, events are facts per rank, reports are for people."""
