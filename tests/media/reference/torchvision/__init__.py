"""Stands in for torchvision, which cannot be imported beside a torch without CUDA: the few functions that are called.

`tests/media/test_preparation.py` holds what the real one, 0.28.0, gave for some pictures.
"""

__version__ = "0.28.0"
