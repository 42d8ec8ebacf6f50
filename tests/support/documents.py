"""Documents in the form that attention takes, from the number of each token's document."""

from typing import Any

import torch
from torch import Tensor

from meshwright.data.document_offsets import batch_documents
from meshwright.ops.documents import Documents, host_number


def document_arguments(ids_BS: Tensor) -> dict[str, Any]:
    """The arguments of `Decoder.forward` for one micro-batch with these documents."""
    found = batch_documents(ids_BS.cpu().numpy(), len(ids_BS))
    offsets_P = torch.from_numpy(found.offsets_MP[0]).to(ids_BS.device)
    return {"document_offsets_P": offsets_P, "longest_document": found.longest_M[0]}


def documents_of(ids_BS: Tensor | None) -> Documents | None:
    """The argument of attention for these documents; None stays None."""
    if ids_BS is None:
        return None
    found = document_arguments(ids_BS)
    return Documents(found["document_offsets_P"], host_number(found["longest_document"]))
