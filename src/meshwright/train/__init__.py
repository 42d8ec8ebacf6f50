"""Training: `state` is what a resume needs, `build` assembles, `step` computes, `loop` goes on."""
