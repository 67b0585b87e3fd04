"""Published methods, one module each: strategy, rules and codecs of its own, and equations.

The registry finds the modules of this package. The name of a strategy is that of its module, with
`-` for `_`, so a method needs no line in another file.
"""
