"""Classes of kernels and operators by name, and which kernels compute on tensor cores.

Names are those of cuBLAS, cuDNN, CUTLASS, torch, Triton and this package.
"""

import re

MATMUL, ATTENTION, NORM, ELEMENTWISE = "matmul", "attention", "normalisation", "element-wise"
OPTIMIZER, COMMUNICATION, COPY, OTHER = "optimizer", "communication", "copy", "other"
CLASSES: tuple[str, ...] = (MATMUL, ATTENTION, NORM, ELEMENTWISE, OPTIMIZER, COMMUNICATION, COPY, OTHER)
TITLES = {
    MATMUL: "matmul (tensor contraction)",
    ATTENTION: "attention",
    NORM: "normalisation, reduction",
    ELEMENTWISE: "element-wise",
    OPTIMIZER: "optimizer",
    COMMUNICATION: "communication",
    COPY: "copy",
    OTHER: "other",
}
# The first pattern that matches a kernel's name decides.
_KERNELS = (
    (COMMUNICATION, r"nccl|nvshmem|symm_mem|multimem"),
    (COPY, r"^memcpy|^memset"),
    (ATTENTION, r"sdpa|fmha|flash|attention|attend|_attn"),
    (OPTIMIZER, r"multi_tensor_apply|adam|stochastic_round|sgd"),
    (
        MATMUL,
        r"gemm|nvjet|cutlass|xmma|cublas|s16816|wgmma|triton_tem|triton_mm|splitk|matmul|scaled_mm|gemv"
        r"|convolve|implicit_con|wgrad|dgrad|cudnn.*conv|dot_kernel",
    ),
    (NORM, r"triton_(red|per|split_scan)|reduce|softmax|norm|cross_entropy|loss"),
    (
        ELEMENTWISE,
        r"triton_|_(gelu|swiglu)_|elementwise|vectorized|index|gather|scatter|embedding|fill|cat|copy",
    ),
)
_OPS = (
    (COMMUNICATION, r"^c10d::|^gloo|^nccl|_c10d_functional"),
    (ATTENTION, r"scaled_dot_product|flash_attention|_attention|attend"),
    (
        MATMUL,
        r"::(_?(scaled_)?(grouped_)?mm(_out)?|addmm_?|bmm|baddbmm_?|matmul|linear|addmv|mv|dot|einsum)$"
        r"|convolution|mkldnn.*linear|_scaled_mm|_scaled_grouped_mm|_grouped_mm",
    ),
    (NORM, r"norm|softmax|::(sum|mean|var|std|amax|amin|max|min|logsumexp|cumsum|argmax|nll_loss|_log)"),
    (COPY, r"::(copy_|_to_copy|to|clone|contiguous|_pin_memory|_local_scalar_dense|item)$"),
    (
        OTHER,
        r"::(empty|empty_like|empty_strided|new_empty|view|_unsafe_view|reshape|transpose|t|as_strided|slice"
        r"|select|unsqueeze|squeeze|expand|permute|narrow|detach_?|alias|resolve_conj|resolve_neg|unflatten"
        r"|flatten|split|chunk|unbind|result_type|is_nonzero|lift_fresh|set_|resize_|unfold|view_as)$"
        r"|^autograd::|^\w*backward\d*$|^torch::autograd|^detach$",
    ),
    (OPTIMIZER, r"_foreach|_fused_adam"),
    (ELEMENTWISE, r"^aten::|^triton_poi|^prims::"),
    (NORM, r"^triton_(red|per)"),
)
# Names of kernels on tensor cores, and of kernels on the general cores.
_TENSOR_CORE = re.compile(
    r"nvjet|tensorop|s16816|s1688|h16816|h1688|h884|s884|i16832|i8816|wgmma|hmma|imma|tf32|wmma|161616"
    r"|xmma_\w*(bf16|f16|e4m3|e5m2|i8)|cutlass::device_kernel|enable_3x_kernel|triton_(mm|tem)|scaled_mm"
    r"|fmha|flash|sdpa|grouped"
)
_GENERAL_CORE = re.compile(
    r"simt|(?<![a-z])[sd]gemm|ffma|gemv|gemmsn|gemmk1|dot_kernel|f32f32_f32f32|magma_s"
)


def class_of(kernel: str) -> str:
    """The class of a kernel by its name."""
    lowered = kernel.lower()
    return next((name for name, pattern in _KERNELS if re.search(pattern, lowered)), OTHER)


def class_of_op(op: str) -> str:
    """The class of an operator by its name."""
    lowered = op.lower()
    return next((name for name, pattern in _OPS if re.search(pattern, lowered)), OTHER)


def uses_tensor_cores(kernel: str) -> bool:
    """Whether a matmul or attention kernel computes on tensor cores, by its name."""
    lowered = kernel.lower()
    return bool(_TENSOR_CORE.search(lowered)) and not _GENERAL_CORE.search(lowered)
