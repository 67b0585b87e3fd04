"""Measuring: ready order and times of a model, rates of links, loss and noise of gradients."""
