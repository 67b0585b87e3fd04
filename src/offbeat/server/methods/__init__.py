"""Published methods with servers, one module each.

The registry finds the modules of this package. The name of a strategy is that of its module, with
`-` for `_`.
"""
