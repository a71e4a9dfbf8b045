"""Timing kernels against other libraries (``bench``) and choosing tiles by measurement (``tune``)."""
