"""One file per mesh axis (dp, tp, cp, ep, pp), and `apply`, which applies them in a fixed order."""
