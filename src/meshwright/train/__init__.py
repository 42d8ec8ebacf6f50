"""Training: `build` assembles a run, `loop` runs it, `step` is one update, `state` is what a resume needs.

A call of the package, `meshwright.train("run.yaml")`, is `meshwright.api.training.train`.
"""

from meshwright.callable_package import make_callable

make_callable(__name__)
