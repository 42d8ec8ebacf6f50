"""Starting processes; what a process then does is `train`'s business. Imports no torch."""
