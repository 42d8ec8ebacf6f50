"""One file per mesh axis, and `apply`, which says in which order they are laid over a model."""
