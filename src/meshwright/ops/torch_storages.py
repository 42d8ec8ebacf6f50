"""The identity of a storage, for which torch has only a private name.

A storage is identified by the address of its C++ object, `_cdata`. Its data pointer would not do: it is zero
for a tensor without data, and two storages of an empty one share it.
"""

import torch


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a storage while it exists; a later storage may have the same one."""
    return storage._cdata
