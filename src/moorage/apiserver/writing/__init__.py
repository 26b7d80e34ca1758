"""Create, update, patch, apply and delete: decoding, admission, validation, field ownership."""
