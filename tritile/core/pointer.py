"""Stand for a tensor where there is no memory: `Pointer`."""

import torch


class Pointer:
    """Stand for a tensor where only its dtype and the alignment of its address matter.

    An offset of 0, in elements, is aligned like torch's allocations, which start at multiples of 512 bytes.
    """

    def __init__(self, dtype: torch.dtype, offset: int = 0) -> None:
        self.dtype, self._offset = dtype, offset

    @classmethod
    def named(cls, dtype: str, elements: int = 0) -> "Pointer":
        """Return one for memory of torch's dtype of this name, however many elements it has."""
        return cls(getattr(torch, dtype))

    def data_ptr(self) -> int:
        """Return an address of that alignment; nothing lies there."""
        return 4096 + self._offset * self.dtype.itemsize

    def element_size(self) -> int:
        """Return bytes of an element."""
        return self.dtype.itemsize

    def storage_offset(self) -> int:
        """Tell where it begins, in elements."""
        return self._offset

    def as_strided(self, size: tuple[int, ...], strides: tuple[int, ...], offset: int) -> "Pointer":
        """Return the same from another offset on."""
        return Pointer(self.dtype, offset)
