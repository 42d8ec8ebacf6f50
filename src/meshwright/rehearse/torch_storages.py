"""That a storage changes its size, of which torch tells nobody.

FSDP2 keeps the storage of a gathered (unsharded) weight and resizes it to zero and back, outside of any
operator, so no dispatch mode sees it: `UntypedStorage.resize_` is wrapped.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch


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
