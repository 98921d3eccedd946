"""Names that transformers imports and does not use here."""

ImageReadMode = decode_image = None
