"""What torch has no public name for about storages: their identity, and that one changes its size.

FSDP2 keeps the storage of a gathered (unsharded) weight and resizes it to zero and back, outside of any
operator, so no dispatch mode sees it: `UntypedStorage.resize_` is wrapped. A storage is identified by the
address of its C++ object, `_cdata`; its data pointer is zero for tensors without data.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a storage while it exists; a later storage may have the same one."""
    return storage._cdata


@contextlib.contextmanager
def resizes_reported(report: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `report` is called with each storage after its size has changed."""
    resize = torch.UntypedStorage.resize_

    def reported(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        report(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", reported):
        yield
