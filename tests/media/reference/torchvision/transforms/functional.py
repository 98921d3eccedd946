"""Names that transformers imports from here."""

from torchvision.transforms.v2.functional import pil_to_tensor  # noqa: F401
