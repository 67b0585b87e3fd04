"""For people who add strategies: random plans, equations, and what every strategy must pass."""
