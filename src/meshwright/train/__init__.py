"""Training: `build` assembles a run, `loop` runs it, `step` is one update, `state` is what a resume needs."""
