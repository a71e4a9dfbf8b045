"""A kernel as one HTML page: map and barriers, shared memory, registers, source, and machine code beside it.

>>> from flashgen.tools.page import page
>>> text = page(variant, "sm_90a")
"""

from flashgen.tools.page.kernelpage import page

__all__ = ["page"]
