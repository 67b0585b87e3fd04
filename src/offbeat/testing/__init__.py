"""For authors of strategies: equations, and the conformance suite of every strategy."""
