"""Attention that writes its score matrices to memory, as the first Megatron releases (fp16) ran it."""

import numpy as np

from meshwright.hardware.catalogue import Device
from meshwright.plan.time.kernels import copy_rate, matmul_seconds
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.operators import Matmul, score_elements
from meshwright.plan.workload.workload import Workload

# Bytes that scale, mask, softmax and dropout move per element of the scores.
FORWARD_BYTES_PER_SCORE, BACKWARD_BYTES_PER_SCORE = 9.0, 13.0


def unfused_attention_seconds(workload: Workload, at: Layouts, device: Device) -> tuple[Floats, Floats]:
    """Forward and backward of one layer: two batched matmuls over all keys, and traffic of the scores."""
    attention = workload.model.attention
    num_matmuls = at.microbatch_sequences * attention.num_heads / at.tp
    sequence = np.full(len(at), float(workload.sequence_length))
    head_width = np.full(len(at), float(attention.head_width))
    scores = Matmul("scores", sequence, sequence, head_width, num_matmuls, low_precision=False)
    values = Matmul("values", sequence, head_width, sequence, num_matmuls, low_precision=False)
    matmuls = matmul_seconds(scores, device, workload) + matmul_seconds(values, device, workload)
    elements, rate = score_elements(workload, at), copy_rate(device)
    forward = matmuls + FORWARD_BYTES_PER_SCORE * elements / rate
    return forward, 2.0 * matmuls + BACKWARD_BYTES_PER_SCORE * elements / rate
