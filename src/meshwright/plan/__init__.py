"""What is decided: work, memory, traffic and the search over layouts. Imports no torch.

A call of the package, `meshwright.plan("llama-3.1-8b", on="h100:8")`, is `meshwright.api.questions.plan`.
"""

from meshwright.callable_package import make_callable

make_callable(__name__)
