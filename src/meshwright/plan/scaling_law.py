"""The loss that a published law expects of so many parameters and tokens.

    L(N, D) = E + A / N^alpha + B / D^beta        N parameters, D tokens, L nats per token
    C = 6 N D                                     FLOPs of training

The constants are the corrected fit of Besiroglu et al., "Chinchilla Scaling: A replication attempt"
(arXiv:2404.10102, 2024), to the runs of Hoffmann et al., "Training Compute-Optimal Large Language Models"
(arXiv:2203.15556, 2022), whose own fit of the same form is known to be off. Losses are those of Chinchilla's
data and tokenizer: compare them with each other, not with losses of other data.
"""

from dataclasses import dataclass

SOURCE = "Hoffmann et al. 2022 (Chinchilla), constants of Besiroglu et al. 2024, arXiv:2404.10102"
FLOPS_PER_PARAMETER_TOKEN = 6.0


@dataclass(frozen=True)
class ScalingLaw:
    """Constants of the parametric loss."""

    irreducible: float
    parameter_scale: float
    parameter_power: float
    token_scale: float
    token_power: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Expected loss in nats per token."""
        of_size = self.parameter_scale / parameters**self.parameter_power
        of_data = self.token_scale / tokens**self.token_power
        return self.irreducible + of_size + of_data

    def optimal_parameters(self, flops: float) -> float:
        """The parameters that minimise the loss for this many FLOPs of training."""
        a, b = self.parameter_power, self.token_power
        ratio = (a * self.parameter_scale / (b * self.token_scale)) ** (1.0 / (a + b))
        return ratio * (flops / FLOPS_PER_PARAMETER_TOKEN) ** (b / (a + b))


CHINCHILLA = ScalingLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
