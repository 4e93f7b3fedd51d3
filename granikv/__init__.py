"""granikv: which part of a shared-prefix speed-up is the layout, which the kernel, and which the measurement."""

__version__ = "0.1.0"
