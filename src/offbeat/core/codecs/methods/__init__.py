"""Codecs of published methods, one module each: meaning in NumPy and implementation on tensors.

`core/codecs/__init__.py` imports the modules of this package and registers their codecs. They
import no torch: planning works without it.
"""
