"""Codes: what codecs do to tensors, and how what they have made goes round."""
